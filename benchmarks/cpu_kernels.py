"""Measure the gain of each CPU kernel over torch and oneDNN, interleaved on this machine.

    python -m benchmarks.cpu_kernels [--rounds N] [--threads N] [--isa avx2 | --isa avx512]
        [--only TEXT] [--json FILE]

Each case runs the kernel of engine/cpu and torch's own way over the same operands, once each in
every round, in an order that changes. A figure is torch's time over the kernel's: above 1 the
kernel is faster. It is the median of the rounds' ratios; the fastest time of either side stands
beside it. Operands are those of a Qwen3-shaped layer (hidden 1024, 16 query and 8 KV heads of
128, FFN 3072), of many layers in turns where a step would find them outside the caches.

`--isa` restricts Numba, torch and oneDNN to AVX2, or to AVX-512 with BF16 and without AMX, so that
one processor shows what others would gain. The program starts itself again with that environment,
and with the short spinning of idle threads that `baton serve` sets.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as functional
from torch import Tensor

from baton.deploy.serve.plan import SHORT_SPIN
from baton.engine.cpu.attention_bf16_invariant import InvariantBfloatAttention
from baton.engine.cpu.attention_kv_quant import KvQuantAttention
from baton.engine.cpu.attention_numba import NumbaAttention
from baton.engine.cpu.linear_numba import Panels
from baton.engine.cpu.linear_quantized import QuantizedMatrix
from baton.engine.cpu.row_kernels import NumbaNorms, silu_gate
from baton.engine.cpu_draws.sampling_numba import compiled_draw
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.kv_quant import FP8_E4M3, INT8
from baton.engine.model.attention import TorchAttention
from baton.engine.model.decoder import Decoder, FusedPass
from baton.engine.model.linear import bfloat16_is_fast, product
from baton.engine.model.quantized_weight import QuantizedWeight, quantize_int4, quantize_int8
from baton.engine.model.rope import Rotary, rotate
from baton.engine.model.row_ops import TorchNorms, torch_gating
from baton.engine.model.step_layout import Bounds, StepLayout, lay_out
from baton.engine.sampling.sampling import torch_draw
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.engine.spec.model_spec import ModelSpec, read_spec
from baton.runtime.sampling import SamplingParams
from benchmarks.figures.ceilings import matrix_unit
from benchmarks.figures.report import Figure, parser, report
from benchmarks.inputs.cached_model import cached_model

SPIN = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": SHORT_SPIN}
_AVX2_FEATURES = "+avx,+avx2,+fma,+bmi,+bmi2,+f16c,+lzcnt,+popcnt,+sse4.2"
_AVX512_FEATURES = "+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl,+avx512vnni,+avx512bf16"
RESTRICTED = {
    "avx2": {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": _AVX2_FEATURES,
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "avx512": {
        "NUMBA_CPU_NAME": "cooperlake",
        "NUMBA_CPU_FEATURES": f"{_AVX2_FEATURES},{_AVX512_FEATURES}",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
}
COLD_MATRICES = 24  # of 6 MiB each: no core's own cache holds them
BLOCK_TOKENS = 16
VOCABULARY = 151_936

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel beside torch's way to the same result."""

    name: str
    kernel: Call
    torch: Call


def products() -> Iterator[Case]:
    """A bfloat16 matrix [3072, 1024] by rows: the panels beside oneDNN's packed matrix."""
    weights = [torch.randn(3072, 1024).to(torch.bfloat16) for _ in range(COLD_MATRICES)]
    panels, packed = [Panels(each) for each in weights], [_one_dnn(each) for each in weights]
    for rows in (1, 8, 32, 256, 1024):
        x = torch.randn(rows, 1024).to(torch.bfloat16)

        def ours(x: Tensor = x) -> None:
            for each in panels:
                each(x)

        def theirs(x: Tensor = x) -> None:
            for each in packed:
                each(x)

        yield Case(f"product_bf16_{rows}_rows", ours, theirs)


def _one_dnn(weight: Tensor) -> Callable[[Tensor], Tensor]:
    if not bfloat16_is_fast() or os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2":
        return lambda x: product(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def attention(spec: ModelSpec) -> Iterator[Case]:
    """One layer's attention of a decode batch and of a prompt's chunk, over KV of each dtype, and
    that of the deterministic mode beside torch's over bf16."""
    blocks = 32 * 33
    for dtype, quant in (("bf16", None), ("int8", INT8), ("fp8", FP8_E4M3), ("strict", None)):
        pool = KvPool(spec, blocks, BLOCK_TOKENS, torch.bfloat16, quant=quant)
        _fill(pool, spec)
        made = InvariantBfloatAttention if dtype == "strict" else NumbaAttention
        kernel = (made if quant is None else KvQuantAttention)(pool, spec.attention)
        plain = TorchAttention(pool, spec.attention)
        for name, layout in (
            ("decode_1x512", _decode_layout(spec, blocks, 1)),
            ("decode_32x512", _decode_layout(spec, blocks, 32)),
            ("chunk_512_after_0", _chunk_layout(spec, 0, 512)),
            ("chunk_256_after_512", _chunk_layout(spec, 512, 256)),
        ):
            queries = torch.randn(len(layout.tokens), spec.heads, spec.head_dim)
            yield Case(
                f"attention_{dtype}_{name}",
                *(
                    _over_layers(each, queries.to(torch.bfloat16), layout, spec.layers)
                    for each in (kernel, plain)
                ),
            )


def kv_writes(spec: ModelSpec) -> Iterator[Case]:
    """The write of a chunk's and of a decode batch's KV in 8 bits."""
    for dtype, quant in (("int8", INT8), ("fp8", FP8_E4M3)):
        pool = KvPool(spec, 1024 // BLOCK_TOKENS, BLOCK_TOKENS, torch.bfloat16, quant=quant)
        kernel, plain = KvQuantAttention(pool, spec.attention), TorchAttention(pool, spec.attention)
        for count in (32, 512):
            layout = _chunk_layout(spec, 0, count) if count > 32 else _decode_rows(spec, count)
            k, v = (torch.randn(count, spec.kv_heads, spec.head_dim).bfloat16() for _ in "kv")

            def write(
                to: TorchAttention, k: Tensor = k, v: Tensor = v, layout: StepLayout = layout
            ) -> None:
                to.write(0, k, v, layout)

            yield Case(
                f"write_{dtype}_{count}_tokens",
                _repeated(partial(write, kernel), count),
                _repeated(partial(write, plain), count),
            )


def _over_layers(backend: TorchAttention, queries: Tensor, layout: StepLayout, layers: int) -> Call:
    some = range(0, layers, 7)  # layers of a block lie apart, so none is in a cache
    return lambda: [backend.attend(layer, queries, layout) for layer in some]


def _fill(pool: KvPool, spec: ModelSpec) -> None:
    if pool.quant is None:
        pool.tensor.normal_()
        return
    every = torch.arange(pool.blocks).repeat_interleave(BLOCK_TOKENS)
    slots = torch.arange(BLOCK_TOKENS).repeat(pool.blocks)
    kv = torch.randn(len(every), spec.kv_heads, 2, spec.head_dim).to(torch.bfloat16)
    for layer in range(spec.layers):
        pool.put(layer, every, slots, kv)


def _decode_layout(spec: ModelSpec, blocks: int, rows: int) -> StepLayout:
    order = random.Random(0).sample(range(blocks), blocks)
    slices = [Slice([1], 512, order[33 * row : 33 * row + 33]) for row in range(rows)]
    return lay_out(StepBatch(tuple(slices)), _bounds(spec, blocks))


def _chunk_layout(spec: ModelSpec, start: int, tokens: int) -> StepLayout:
    order = list(range((start + tokens) // BLOCK_TOKENS))
    return lay_out(StepBatch((Slice([1] * tokens, start, order),)), _bounds(spec, len(order)))


def _bounds(spec: ModelSpec, blocks: int) -> Bounds:
    return Bounds(blocks, BLOCK_TOKENS, spec.vocab_size, spec.max_context)


def rows(spec: ModelSpec) -> Iterator[Case]:
    """Norms, gates and rotation of a step's rows."""
    ours, theirs = NumbaNorms(), TorchNorms()
    weight = torch.randn(1024).to(torch.bfloat16)
    pool = KvPool(spec, 1024 // BLOCK_TOKENS, BLOCK_TOKENS, torch.bfloat16)
    kernel, plain = NumbaAttention(pool, spec.attention), TorchAttention(pool, spec.attention)
    for count in (1, 32, 1024):
        x = torch.randn(count, 1024).to(torch.bfloat16)
        both = torch.randn(count, 6144).to(torch.bfloat16)
        yield Case(
            f"norm_{count}_rows",
            # mypy infers no type for the default of a lambda
            _repeated(lambda x=x: ours.add_norm(x, x, weight, 1e-6), count),  # type: ignore[misc]
            _repeated(lambda x=x: theirs.add_norm(x, x, weight, 1e-6), count),  # type: ignore[misc]
        )
        yield Case(
            f"gate_{count}_rows",
            # mypy infers no type for the default of a lambda
            _repeated(lambda both=both: silu_gate(both), count),  # type: ignore[misc]
            _repeated(lambda both=both: torch_gating(both, "silu"), count),  # type: ignore[misc]
        )
        yield _rotation(spec, kernel, plain, count)


def _rotation(spec: ModelSpec, kernel: NumbaAttention, plain: TorchAttention, count: int) -> Case:
    layout = _chunk_layout(spec, 0, count) if count > 32 else _decode_rows(spec, count)
    q, k, v = (
        torch.randn(count, heads, spec.head_dim).to(torch.bfloat16)
        for heads in (spec.heads, spec.kv_heads, spec.kv_heads)
    )
    angles = Rotary(spec.rope, spec.rotary_dim).angles(layout.positions, torch.bfloat16)

    def theirs() -> Tensor:
        plain.write(0, rotate(k, *angles), v, layout)
        return rotate(q, *angles)

    return Case(
        f"rotate_and_write_{count}_rows",
        _repeated(lambda: kernel.rotate_and_write(0, q, k, v, angles, layout), count),
        _repeated(theirs, count),
    )


def _decode_rows(spec: ModelSpec, count: int) -> StepLayout:
    slices = [Slice([1], 8, [row]) for row in range(count)]
    return lay_out(StepBatch(tuple(slices)), _bounds(spec, 1024 // BLOCK_TOKENS))


def _repeated(call: Call, count: int) -> Call:
    """Short calls many times, so that a clock's tick is no part of the figure."""
    times = range(max(1, 512 // count))
    return lambda: [call() for _ in times]


def draws() -> Iterator[Case]:
    """Draws of 32 rows of a vocabulary of 151,936 tokens."""
    logits = torch.randn(32, VOCABULARY) * 3
    for name, params in (
        ("plain", SamplingParams(temperature=0.8)),
        ("top_k_top_p", SamplingParams(temperature=0.8, top_k=20, top_p=0.95)),
        ("wide_top_p", SamplingParams(temperature=2.0, top_p=0.9999)),
    ):
        asked = [Draw(0, 1000 + row, params) for row in range(32)]
        yield Case(
            f"draw_{name}",
            partial(compiled_draw, logits, asked),
            partial(torch_draw, logits, asked),
        )


def quantised() -> Iterator[Case]:
    """A quantised matrix [3072, 1024] by many rows: compiled unpacking beside torch's own."""
    codes = torch.randn(3072, 1024).to(torch.float8_e4m3fn)
    for kind, weight in (
        ("int4", quantize_int4(torch.randn(3072, 1024), 128)),
        ("int8", quantize_int8(torch.randn(3072, 1024))),
        ("fp8", QuantizedWeight("fp8", codes, torch.full((3072, 1), 0.5), 1024)),
    ):
        kernel = QuantizedMatrix(weight)
        for rows in (32, 128, 512):
            x = torch.randn(rows, 1024).to(torch.bfloat16)

            def theirs(x: Tensor = x, weight: QuantizedWeight = weight) -> Tensor:
                return functional.linear(x, weight.values(slice(0, weight.rows)).to(x.dtype))

            yield Case(f"product_{kind}_{rows}_rows", partial(kernel, x), theirs)


def whole_steps() -> Iterator[Case]:
    """A decode step as one compiled call beside the same kernels layer by layer."""
    blocks = 32 * 33
    runner = build_runner(
        cached_model(), EngineOptions(blocks=blocks, block_size=BLOCK_TOKENS, dtype="bfloat16")
    )
    runner.pool.tensor.normal_()
    decoder = runner.decoder
    assert isinstance(decoder, Decoder)
    fused_pass = decoder._fused_pass
    if fused_pass is None:
        return
    order = random.Random(0).sample(range(blocks), blocks)
    greedy = (Draw(0, 513, SamplingParams(temperature=0.0)),)
    for rows in (1, 8, 32):
        slices = [Slice([1], 512, order[33 * row : 33 * row + 33], greedy) for row in range(rows)]
        batch = StepBatch(tuple(slices))

        def step(chosen: FusedPass | None, batch: StepBatch = batch) -> None:
            decoder._fused_pass = chosen
            runner.run(batch)

        yield Case(
            f"decode_pass_{rows}_rows",
            # mypy infers no type for the default of a lambda
            lambda step=step: step(fused_pass),  # type: ignore[misc]
            lambda step=step: step(None),  # type: ignore[misc]
        )


def measured(case: Case, rounds: int) -> tuple[float, float, float]:
    """Median ratio of torch's time over the kernel's, and the fastest of either, in seconds."""
    order = random.Random(case.name)
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        sides = [0, 1]
        order.shuffle(sides)
        for side in sides:
            call = (case.kernel, case.torch)[side]
            began = time.perf_counter()
            call()
            if number:  # the first round warms up
                times[side].append(time.perf_counter() - began)
    ratios = [theirs / ours for ours, theirs in zip(*times, strict=True)]
    return statistics.median(ratios), min(times[0]), min(times[1])


def cases(only: str) -> Iterator[Case]:
    spec = read_spec(cached_model())
    groups: Sequence[Callable[[], Iterator[Case]]] = (
        products, lambda: attention(spec), lambda: kv_writes(spec), lambda: rows(spec), draws,
        quantised, whole_steps,
    )  # fmt: skip
    for group in groups:
        yield from (case for case in group() if only in case.name)


def main() -> None:
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--isa", choices=RESTRICTED, help="use no more than these instructions")
    options.add_argument("--only", default="", metavar="TEXT", help="cases with this in the name")
    given = options.parse_args()
    wanted = SPIN | RESTRICTED.get(given.isa, {})
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        again = [sys.executable, "-m", "benchmarks.cpu_kernels", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | wanted)
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    found = []
    for case in cases(given.only):
        ratio, ours, theirs = measured(case, given.rounds)
        beside = f"kernel {ours * 1e3:.3g} ms, torch {theirs * 1e3:.3g} ms"
        found.append(Figure(case.name, ratio, "times", beside))
    unit = f"{given.isa} alone" if given.isa else matrix_unit()
    report(found, given.json, [f"{unit}; {given.threads} threads"])


if __name__ == "__main__":
    main()
