"""The engine's GPU kernels compiled for sm_80 and sm_90, on a machine without a GPU.

    python -P tests/engine/triton_builds.py [--capability 90] [--json FILE]

The launch functions run as on a GPU, with CPU tensors in the place of the GPU's, up to the
launch: so what is compiled is what a launch there would use. Prints registers, spilled bytes
and shared memory of each kernel. Needs triton without its interpreter.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.kv_quant import KV_QUANTS
from baton.engine.model.attention import HeadNorms
from baton.engine.sampling.draw_adjustments import Adjustments
from baton.engine.sampling.draw_logprobs import LogprobBuffers
from baton.engine.sampling.draw_rules import DrawRules
from baton.engine.sampling.mask_words import MaskWords
from baton.engine.triton.adjust import adjust_logits, find_logprobs
from baton.engine.triton.checksum import block_checksums
from baton.engine.triton.decode import Splits, decode_attention, decode_tiles, new_partials
from baton.engine.triton.experts import expert_matmul
from baton.engine.triton.gate import gated
from baton.engine.triton.kv_write import rotate_and_write, write
from baton.engine.triton.linear import FixedTileLinear, fixed_products
from baton.engine.triton.mla import latent_attention, write_latents
from baton.engine.triton.norm import add_rms_norm, rms_norm
from baton.engine.triton.prefill import (
    PrefillChunk,
    device_tiles,
    plan_prefill,
    prefill_attention,
    single_attention,
)
from baton.engine.triton.quantized import dequantized, quantized_matmul
from baton.engine.triton.quantized_experts import StackedCodes, quantized_expert_matmul
from baton.engine.triton.sampling import draw_tokens

SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10}  # bytes that a program may ask for
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)\b.*?LOCAL:(\d+)")

_CPU = torch.device("cpu")


class _Target:
    """Stands where Triton looks for a GPU."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


@contextmanager
def compiling_for(capability: int) -> Iterator[list[Any]]:
    """Let launches compile and not run while the context lasts, and yield the list of what they
    compiled. The process cannot use a GPU afterwards: Triton keeps looking at this target."""
    made: list[Any] = []
    launch = JITFunction.run

    def compile_only(
        self: JITFunction, *args: Any, grid: object, warmup: bool, **options: Any
    ) -> None:
        made.append(launch(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    driver.set_active(_Target(capability))
    try:
        yield made
    finally:
        JITFunction.run = launch


def _bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def _norms() -> None:
    add_rms_norm(_bf16(4, 4096), _bf16(4, 4096), _bf16(4096), 1e-5)
    rms_norm(_bf16(4, 48, 128)[:, :32], _bf16(128), 1e-6)
    add_rms_norm(_bf16(4, 16384), _bf16(4, 16384), _bf16(16384), 1e-5, 1.0)


def _gates() -> None:
    gated(_bf16(4, 28672))
    gated(_bf16(4, 28672), "gelu_tanh")


def _experts(tokens: int) -> None:
    rows = torch.zeros(tokens * 8, dtype=torch.int64)
    offsets = torch.zeros(129, dtype=torch.int32)
    expert_matmul(_bf16(tokens, 2048), _bf16(128, 96, 2048), offsets, rows)


def _coded_experts(packing: str, tokens: int) -> None:
    rows, groups = torch.zeros(tokens * 8, dtype=torch.int64), torch.empty(128, 96, 16)
    codes = torch.zeros(128, 96, 1024 if packing == "int4" else 2048, dtype=torch.uint8)
    zeros = torch.zeros(128, 96, 16, dtype=torch.int16) if packing == "int4" else None
    stack = StackedCodes(packing, codes, groups, zeros, 128)
    offsets = torch.zeros(129, dtype=torch.int32)
    quantized_expert_matmul(_bf16(tokens, 2048), stack, offsets, rows)


def _fixed(width: int, depth: int, dtype: torch.dtype) -> None:
    FixedTileLinear(torch.empty(width, depth, dtype=dtype), torch.empty(width, dtype=dtype))(
        torch.empty(3, depth, dtype=dtype)
    )


def _fixed_heads() -> None:
    queries, up = _bf16(3, 128, 192), _bf16(128, 256, 512)
    mixed = fixed_products(queries[..., :128].transpose(0, 1), up[:, :128])
    fixed_products(mixed, up[:, 128:].transpose(1, 2))


def _quantized(packing: str, rows: int) -> None:
    values = torch.zeros(4096, 4096 // (2 if packing == "int4" else 1), dtype=torch.uint8)
    values = values.view(torch.int8) if packing == "int8" else values
    values = values.view(torch.float8_e4m3fn) if packing == "fp8" else values
    scales, zeros = _bf16(4096, 32), torch.zeros(4096, 32, dtype=torch.uint8)
    quantized_matmul(_bf16(rows, 4096), values, scales, packing, zeros)
    dequantized(values, scales, packing, None, torch.bfloat16)


def _sampling() -> None:
    tokens, finite = torch.empty(4, dtype=torch.int64), torch.empty(4, dtype=torch.int8)
    draws, logits = [None] * 4, torch.empty(4, 151_936)
    adjust_logits(logits, Adjustments.of(draws))
    draw_tokens(logits, DrawRules.of(draws), tokens, finite)
    draw_tokens(logits[:1], DrawRules.of(draws[:1]), tokens, finite)
    masks = MaskWords(torch.empty(4, dtype=torch.int32), torch.empty(2, 4_748, dtype=torch.int32))
    draw_tokens(logits, DrawRules.of(draws), tokens, finite, masks)
    find_logprobs(logits, tokens, tokens, LogprobBuffers.on(logits.device, 4))


def _checksums() -> None:
    pool = torch.empty(2, 32 * 8 * 8192, dtype=torch.uint8)
    block_checksums(pool, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 8)


def _stored(
    kv_heads: int, dim: int, dtype: torch.dtype, codes: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A layer of a pool and its scales."""
    spec: Any = SimpleNamespace(kv_heads=kv_heads, layers=1, head_dim=dim, latent=None, features=0)
    pool = KvPool(spec, 2, 16, dtype, quant=KV_QUANTS.get(codes))
    return pool.tensor.select(2, 0), None if pool.scales is None else pool.scales.select(2, 0)


def _prefill(
    kv_heads: int, group: int, dim: int, dtype: torch.dtype, codes: str = "", **features: Any
) -> None:
    kv, scales = _stored(kv_heads, dim, dtype, codes)
    queries = torch.empty(3, kv_heads * group, dim, dtype=dtype)
    tables = torch.zeros(1, 1, dtype=torch.int32)
    tiles = device_tiles(group, dim, dtype, bool(codes))
    plan = plan_prefill([PrefillChunk(0, 3, 0, 0)], tables, group, tiles)
    features |= {"scales": scales, "tiles": tiles}
    prefill_attention(queries, queries, kv, plan, 0.1, **features)


def _single(kv_heads: int, group: int, dim: int, dtype: torch.dtype) -> None:
    kv, _ = _stored(kv_heads, dim, dtype, "")
    queries = torch.empty(3, kv_heads * group, dim, dtype=dtype)
    tables, lengths = torch.zeros(3, 1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    tiles = device_tiles(group, dim, dtype)
    given = (queries, queries, kv, tables, lengths, 0.1)
    single_attention(*given, tiles=tiles, fused=False)


def _decode(
    kv_heads: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    splits: Splits,
    codes: str = "",
    *,
    filled: bool = True,
    **features: Any,
) -> None:
    kv, scales = _stored(kv_heads, dim, dtype, codes)
    queries = torch.empty(3, kv_heads * group, dim, dtype=dtype)
    tables, lengths = torch.zeros(3, 1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    partials = new_partials(3, kv_heads * group, splits.capacity(100, 64), dim, _CPU)
    features |= {"scales": scales, "tiles": decode_tiles(group, dim, dtype, filled=filled)}
    decode_attention(queries, queries, kv, tables, lengths, splits, partials, 0.1, **features)


def _write(
    kv_heads: int,
    group: int,
    dim: int,
    turning: int,
    dtype: torch.dtype,
    codes: str = "",
    *,
    norms: bool = False,
) -> None:
    kv, scales = _stored(kv_heads, dim, dtype, codes)
    queries = torch.empty(3, kv_heads * group, dim, dtype=dtype)
    angles = torch.empty(3, 1, turning, dtype=dtype)
    slots = torch.zeros(3, dtype=torch.int64)
    keys = queries[:, :kv_heads]
    weights = HeadNorms(torch.empty(dim, dtype=dtype), torch.empty(dim), 1e-6) if norms else None
    rotate_and_write(queries, keys, keys, (angles, angles), kv, slots, slots, scales, weights)
    write(keys, keys, kv, slots, slots, scales)


def _latent(heads: int, splits: Splits, codes: str = "") -> None:
    queries, out = _bf16(3, heads, 576), _bf16(3, heads, 512)
    spec: Any = SimpleNamespace(kv_heads=1, layers=1, head_dim=576, latent=True, features=0)
    pool = KvPool(spec, 2, 16, _BF16, quant=KV_QUANTS.get(codes))
    kv, scales = pool.tensor[:, 0, 0], None if pool.scales is None else pool.scales[:, 0, 0]
    rows, tables = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 1, dtype=torch.int32)
    partials = new_partials(3, heads, splits.capacity(100, 64), 512, _CPU)
    given = (queries, kv, tables, rows, rows, splits, partials, 0.1)
    latent_attention(out, *given, scales=scales)
    write_latents(queries[:, 0], kv, scales, rows.long(), rows.long(), 512)


_BF16, _CAPPED = torch.bfloat16, {"window": 4096, "soft_cap": 50.0}
CASES: dict[str, Callable[[], None]] = {
    "norm": _norms,
    "gate": _gates,
    "experts, decode": partial(_experts, 4),
    "experts, prefill": partial(_experts, 2048),
    "int4 experts, decode": partial(_coded_experts, "int4", 4),
    "fp8 experts, prefill": partial(_coded_experts, "fp8", 2048),
    "int8, 1 row": partial(_quantized, "int8", 1),
    "int4, 1 row": partial(_quantized, "int4", 1),
    "int4, 64 rows": partial(_quantized, "int4", 64),
    "fp8, 1 row": partial(_quantized, "fp8", 1),
    "fixed, llama3 8b": partial(_fixed, 28672, 4096, torch.bfloat16),
    "fixed, llama3 8b, narrow": partial(_fixed, 4096, 14336, torch.bfloat16),
    "fixed, float32": partial(_fixed, 128, 200, torch.float32),
    "fixed, deepseek v3": _fixed_heads,
    "sampling": _sampling,
    "checksum": _checksums,
    "prefill, llama3 8b": partial(_prefill, 8, 4, 128, _BF16),
    "prefill, llama3 8b, unfused": partial(_prefill, 8, 4, 128, _BF16, fused=False),
    "prefill, llama3 8b, single rows": partial(_single, 8, 4, 128, _BF16),
    "prefill, qwen2 0.5b": partial(_prefill, 2, 7, 64, torch.float16),
    "prefill, window and cap": partial(_prefill, 8, 4, 128, _BF16, **_CAPPED),
    "prefill, phi3 mini": partial(_prefill, 32, 1, 96, torch.float16),
    "prefill, gemma2 9b": partial(_prefill, 8, 2, 256, _BF16, **_CAPPED),
    "prefill, float32": partial(_prefill, 2, 7, 64, torch.float32),
    "decode, llama3 8b": partial(_decode, 8, 4, 128, _BF16, Splits(4)),
    "decode, llama3 8b, few rows": partial(_decode, 8, 4, 128, _BF16, Splits(4), filled=False),
    "decode, qwen2 0.5b": partial(_decode, 2, 7, 64, torch.float16, Splits(4, 512)),
    "decode, float32": partial(_decode, 2, 7, 64, torch.float32, Splits(4)),
    "decode, gemma2 9b": partial(_decode, 8, 2, 256, _BF16, Splits(1), **_CAPPED),
    "latent, deepseek v3": partial(_latent, 128, Splits(4)),
    "int8 kv, latent": partial(_latent, 128, Splits(4), "int8"),
    "fp8 kv, latent, few heads": partial(_latent, 16, Splits(1), "fp8_e4m3"),
    "write, llama3 8b": partial(_write, 8, 4, 128, 128, _BF16),
    "write, qwen3 0.6b": partial(_write, 8, 2, 128, 128, _BF16, norms=True),
    "write, a part turns": partial(_write, 4, 7, 96, 24, torch.float32),
    "int8 kv, prefill": partial(_prefill, 8, 4, 128, _BF16, "int8"),
    "int8 kv, decode": partial(_decode, 8, 4, 128, _BF16, Splits(4), "int8"),
    "int8 kv, decode, few rows": partial(
        _decode, 8, 4, 128, _BF16, Splits(4), "int8", filled=False
    ),
    "int8 kv, write": partial(_write, 8, 4, 128, 128, _BF16, "int8"),
    "int8 kv, write, norms": partial(_write, 8, 2, 128, 64, _BF16, "int8", norms=True),
    "fp8 kv, prefill": partial(_prefill, 8, 2, 256, _BF16, "fp8_e4m3", **_CAPPED),
    "fp8 kv, decode": partial(_decode, 2, 7, 64, torch.float16, Splits(4, 512), "fp8_e4m3"),
    "fp8 kv, write": partial(_write, 4, 7, 96, 24, torch.float32, "fp8_e4m3"),
}


def compile_case(name: str, capability: int) -> list[dict[str, object]]:
    """Compile what the case launches; a row for each kernel."""
    with compiling_for(capability) as made:
        CASES[name]()
    rows: list[dict[str, object]] = []
    for kernel in made:
        registers, spilled = _usage(kernel.asm["cubin"])
        rows.append(
            {
                "case": name,
                "kernel": kernel.metadata.name,
                "capability": capability,
                "registers": registers,
                "spilled_bytes": spilled,
                "products": kernel.asm["ptx"].count("mma.sync"),
                "group_products": kernel.asm["ptx"].count("wgmma.mma_async"),
                "wide_copies": kernel.asm["ptx"].count("cp.async.cg.shared.global"),
                "engine_copies": kernel.asm["ptx"].count("cp.async.bulk.tensor"),
                "shared_bytes": kernel.metadata.shared,
                "fits": kernel.metadata.shared <= SHARED_LIMIT[capability],
            }
        )
    return rows


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    found = _USAGE.search(said.stdout)
    if found is None:
        raise ValueError(f"cuobjdump told no resource usage: {said.stdout!r}")
    registers, stack, local = (int(x) for x in found.groups())
    return registers, stack + local


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--capability", type=int, choices=SHARED_LIMIT, help="of this one alone")
    given = parser.parse_args()
    capabilities = [given.capability] if given.capability else list(SHARED_LIMIT)
    rows = [row for cap in capabilities for name in CASES for row in compile_case(name, cap)]
    for row in rows:
        print(
            f"sm_{row['capability']}  {row['case']:<18} {row['kernel']:<12} "
            f"{row['registers']:>4} registers {row['spilled_bytes']:>5} B spilled "
            f"{row['shared_bytes']:>7} B shared"
        )
    if given.json is not None:
        given.json.write_text(json.dumps(rows))
    return 0 if all(row["fits"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
