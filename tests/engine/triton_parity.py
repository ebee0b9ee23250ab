"""The engine's GPU kernels against what they must compute, on a GPU or in Triton's interpreter.

A check makes fresh random inputs, and returns its error and the largest one that is allowed.
Memory from torch is poisoned with NaN first where a kernel must write all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from parity import Check
from torch import Tensor

from baton.engine.model.quantized_weight import QuantizedWeight
from baton.engine.triton.checksum import block_checksums
from baton.engine.triton.experts import expert_matmul, expert_matmul_reference, sort_by_expert
from baton.engine.triton.gate import gated, gated_reference
from baton.engine.triton.norm import add_rms_norm, rms_norm
from baton.engine.triton.quantized import (
    TritonQuantized,
    dequantized,
    dequantized_reference,
    quantized_matmul,
)

CHECKS: dict[str, Check] = {}
_KINDS = {"fp32": (torch.float32, 2e-5), "bf16": (torch.bfloat16, 1e-2)}


def check(name: str) -> Callable[[Check], Check]:
    def keep(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return keep


def error(out: Tensor, reference: Tensor) -> float:
    """Norm of the difference over norm of the reference, in float64; NaN counts as infinite."""
    wide, wanted = out.double().cpu(), reference.double().cpu()
    if wide.shape != wanted.shape:
        raise ValueError(f"shape {list(wide.shape)} instead of {list(wanted.shape)}")
    found = float((wide - wanted).norm() / wanted.norm().clamp(min=1e-30))
    return found if found == found else float("inf")


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill every `torch.empty` with NaN (integers: the largest number) while the context lasts."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    was, warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(was, warn_only=warned)


def _norm(kind: str, offset: float) -> Check:
    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        dtype, allowed = _KINDS[kind]
        rows, size = (3, 72) if tiny else (257, 4096)
        x, residual = (torch.randn(rows, size, device=device).to(dtype) for _ in range(2))
        weight = torch.randn(size, device=device).to(dtype)
        with poisoned():
            out, total = add_rms_norm(x, residual, weight, 1e-6, offset)
        wide = (x + residual).double()
        scale = (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        wanted = wide * scale * (weight.double() + offset)
        return max(error(out, wanted), error(total, x + residual)), allowed

    return run


for _kind in _KINDS:
    CHECKS[f"add_rms_norm {_kind}"] = _norm(_kind, 0.0)
CHECKS["add_rms_norm one plus weight"] = _norm("fp32", 1.0)


@check("rms_norm of heads inside a wider row")
def _norm_heads(device: torch.device, tiny: bool) -> tuple[float, float]:
    rows, heads, size = (5, 3, 24) if tiny else (300, 32, 128)
    x = torch.randn(rows, heads + 2, size, device=device)[:, 1 : heads + 1]
    weight = torch.randn(size, device=device)
    with poisoned():
        out = rms_norm(x, weight, 1e-5)
    wide = x.double()
    wanted = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    return error(out, wanted), 2e-5


@check("rms_norm bits do not depend on the rows")
def _norm_bits(device: torch.device, tiny: bool) -> tuple[float, float]:
    wrong = 0
    for size in (24, 72) if tiny else (128, 1024, 4096, 5120):
        x = torch.randn(7 if tiny else 70, size, device=device).to(torch.bfloat16)
        weight = torch.randn(size, device=device)
        whole = rms_norm(x, weight, 1e-5)
        wrong += sum(
            int((rms_norm(x[first:end], weight, 1e-5) != whole[first:end]).sum())
            for first, end in ((0, 1), (2, 5), (6, 7))
        )
    return float(wrong), 0.0


def _gate(kind: str, activation: str) -> Check:
    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        dtype, allowed = _KINDS[kind]
        rows, width = (3, 1100) if tiny else (257, 14336)
        x = (torch.randn(rows, 2 * width, device=device) * 3).to(dtype)
        with poisoned():
            out = gated(x, activation)
        return error(out, gated_reference(x.double(), activation)), allowed

    return run


for _kind in _KINDS:
    for _activation in ("silu", "gelu_tanh"):
        CHECKS[f"gated {_activation} {_kind}"] = _gate(_kind, _activation)


def _experts(kind: str, gather: bool, per_expert: int) -> Check:
    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        dtype, allowed = _KINDS[kind]
        experts, width, depth = (5, 80, 72) if tiny else (64, 1536, 2048)
        tokens, choices = max(1, per_expert * experts // 2), 2
        weights = (torch.randn(experts, width, depth, device=device) / depth**0.5).to(dtype)
        # The last two experts are left out: an expert without rows must cost and change nothing.
        chosen = torch.rand(tokens, experts - 2, device=device).topk(choices, dim=-1).indices
        order, offsets = sort_by_expert(chosen, experts)
        x = torch.randn(tokens if gather else tokens * choices, depth, device=device).to(dtype)
        source = order // choices if gather else None
        with poisoned():
            out = expert_matmul(x, weights, offsets, source)
        wanted = expert_matmul_reference(x.double(), weights.double(), offsets, source)
        return error(out, wanted), allowed

    return run


CHECKS["expert_matmul fp32 gathered, few rows"] = _experts("fp32", True, 2)
CHECKS["expert_matmul bf16 gathered, few rows"] = _experts("bf16", True, 2)
CHECKS["expert_matmul bf16 sorted, many rows"] = _experts("bf16", False, 20)


def _packed(
    packing: str, width: int, depth: int, group: int, zeros: bool, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    scales = torch.rand(width, depth // group, device=device) * 0.02 + 0.001
    zero = torch.randint(0, 16, scales.shape, device=device).float() if zeros else None
    if packing == "int8":
        return torch.randint(-127, 128, (width, depth), device=device).to(torch.int8), scales, zero
    if packing == "int4":
        half = torch.randint(0, 256, (width, depth // 2), device=device).to(torch.uint8)
        return half, scales, zero
    return torch.randn(width, depth, device=device).to(torch.float8_e4m3fn), scales, zero


def _quantized(packing: str, kind: str, rows: int, group: int, zeros: bool) -> Check:
    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        dtype, allowed = _KINDS[kind]
        width, depth = (72, max(256, group)) if tiny else (4096, 4096)
        size = group or depth
        values, scales, zero = _packed(packing, width, depth, size, zeros, device)
        x = torch.randn(rows, depth, device=device).to(dtype)
        bias = torch.randn(width, device=device).to(dtype)
        with poisoned():
            out = quantized_matmul(x, values, scales, packing, zero, bias)
        matrix = dequantized_reference(values, scales, packing, zero, torch.float64)
        return error(out, x.double() @ matrix.T + bias.double()), allowed

    return run


@check("quantized weight as loaded, last group cut, columns permuted")
def _loaded(device: torch.device, tiny: bool) -> tuple[float, float]:
    depth = 176 if tiny else 4048
    codes = torch.randint(0, 256, (40, depth // 2), dtype=torch.uint8)
    groups = -(-depth // 64)
    scales, zeros = torch.rand(40, groups), torch.randint(0, 16, (40, groups)).to(torch.int16)
    weight = QuantizedWeight("int4", codes, scales, 64, zeros, torch.randperm(depth))
    x = torch.randn(3, depth, device=device)
    with poisoned():
        out = TritonQuantized(weight, torch.ones(40), device)(x)
    return error(out, x.double().cpu() @ weight.dequantized(torch.float64).T + 1), 2e-5


CHECKS["quantized int8 by channel, 1 row, fp32"] = _quantized("int8", "fp32", 1, 0, False)
CHECKS["quantized int8 by groups of 32, 5 rows, bf16"] = _quantized("int8", "bf16", 5, 32, False)
CHECKS["quantized int4 with zeros, 3 rows, fp32"] = _quantized("int4", "fp32", 3, 64, True)
CHECKS["quantized int4 about 8, 17 rows, bf16"] = _quantized("int4", "bf16", 17, 128, False)
CHECKS["quantized int4 by groups of 16, 2 rows, fp32"] = _quantized("int4", "fp32", 2, 16, True)
CHECKS["quantized fp8 by channel, 2 rows, fp32"] = _quantized("fp8", "fp32", 2, 0, False)
CHECKS["quantized fp8 by groups, 65 rows, bf16"] = _quantized("fp8", "bf16", 65, 128, False)


@check("every E4M3 number is decoded exactly")
def _decoded(device: torch.device, tiny: bool) -> tuple[float, float]:
    bits = torch.arange(256, dtype=torch.uint8, device=device)
    bits = bits[(bits & 0x7F) != 0x7F].repeat(8)[: 16 * 127].view(1, -1)  # without its NaN
    values = bits.view(torch.float8_e4m3fn)
    scales = torch.ones(1, 1, device=device)
    with poisoned():
        out = dequantized(values, scales, "fp8", None, torch.float32)
    return float((out != values.to(torch.float32)).sum()), 0.0


def checksum_reference(
    blocks_of_pool: np.ndarray, blocks: list[int], seeds: list[int], slabs: int
) -> list[list[int]]:
    """nh64-1, written out with Python's integers, from its definition."""
    low64 = (1 << 64) - 1

    def mix(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & low64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & low64
        return value ^ (value >> 31)

    sums = []
    for block, seed in zip(blocks, seeds, strict=True):
        row = []
        for slab in blocks_of_pool[block].view(np.uint64).reshape(slabs, -1).tolist():
            product = 0
            for index, word in enumerate(slab):
                keyed = word ^ ((seed + index * 0x9E3779B97F4A7C15) & low64)
                product += (keyed & 0xFFFFFFFF) * (keyed >> 32)
            row.append(mix((product & low64) ^ mix((sum(slab) + seed) & low64)))
        sums.append(row)
    return sums


def _checksums(slab_words: int) -> Check:
    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        slabs, seeds = 2, [0, (1 << 64) - 1, 0xDEADBEEF12345678]
        words = np.random.default_rng().integers(0, 256, (5, slabs * slab_words * 8), np.uint8)
        pool = torch.from_numpy(words).to(device)
        signed = torch.from_numpy(np.array(seeds, dtype=np.uint64).view(np.int64)).to(device)
        blocks = [4, 0, 2]
        with poisoned():
            found = block_checksums(pool, torch.tensor(blocks, device=device), signed, slabs)
        ours = found.cpu().numpy().view(np.uint64).tolist()
        return float(ours != checksum_reference(words, blocks, seeds, slabs)), 0.0

    return run


CHECKS["checksum of one short slab"] = _checksums(37)
CHECKS["checksum summed in parts"] = _checksums(16384 + 1030)
