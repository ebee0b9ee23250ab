"""A part of `benchmarks.gpu`: a mixture layer, plain and quantised, and latent attention.

Each is timed as a replayed graph over layers of its own weights or KV, so that no cache holds them
from one layer to the next, beside its floor: the bytes that it must read by the measured copy rate
or its products by the measured matrix rate, whichever takes longer. Holds no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.experts import ExpertWeights, mix, route
from baton.engine.model.linear import PlainMatrix
from baton.engine.model.quantized_weight import CodeDtype
from baton.engine.model.step_layout import Bounds, lay_out
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.engine.spec.model_spec import AttentionSpec, ModelSpec
from baton.engine.spec.moe_spec import ExpertsSpec, LatentSpec
from baton.engine.spec.rope_spec import RopeSpec
from baton.engine.triton.decode_buffers import DecodeLimits
from baton.engine.triton.gate import gated
from baton.engine.triton.matrices import StackedExperts
from baton.engine.triton.mla_backend import TritonLatentAttention
from baton.engine.triton.quantized_experts import StackedCodes
from benchmarks.figures.report import Figure
from benchmarks.gpu_parts.models import BLOCK_SIZE, fill_pool, replay_seconds, step_dtype, table
from benchmarks.gpu_parts.speed import Given

FORMATS: tuple[CodeDtype | None, ...] = (None, "int8", "int4", "fp8")  # None: bfloat16


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """`layers` so many that their experts exceed every cache."""

    layers: int
    hidden: int
    experts: int
    chosen: int
    ffn: int
    group: int  # columns of an int4 scale

    @property
    def expert_parameters(self) -> int:
        return 3 * self.hidden * self.ffn

    @property
    def spec(self) -> ExpertsSpec:
        sparse = (True,) * self.layers
        return ExpertsSpec(sparse, self.experts, self.chosen, self.ffn, normalise=True)


QWEN3_30B = MixtureShape(4, 2048, 128, 8, 768, 128)
TINY_MIXTURE = MixtureShape(2, 64, 4, 2, 32, 32)
DEEPSEEK_V2_LITE = LatentSpec(512, 64, 128, 128, None, True)
TINY_LATENT = LatentSpec(24, 8, 16, 8, None, True)


def experts(given: Given) -> Iterator[Figure]:
    """Microseconds a layer, and over the floor."""
    shape = TINY_MIXTURE if given.dry else QWEN3_30B
    for code in FORMATS:
        layers = [mixture_weights(shape, code, given.device) for _ in range(shape.layers)]
        for rows in (1, 3, 9) if given.dry else (1, 64, 2048):
            yield from _mixture_figures(given, shape, layers, code, rows)
    for rows in (1, 3) if given.dry else (1, 64):
        yield from _latent_figures(given, rows, 40 if given.dry else 4096)


def _mixture_figures(
    given: Given,
    shape: MixtureShape,
    layers: list[ExpertWeights],
    code: CodeDtype | None,
    rows: int,
) -> Iterator[Figure]:
    x = torch.randn(rows, shape.hidden, device=given.device).to(step_dtype(given.device))
    gating = partial(gated, activation="silu")

    def all_layers() -> None:
        for layer in layers:
            mix(x, layer, shape.spec, gating)

    seconds = replay_seconds(all_layers, given.device) / len(layers)
    read = sum(expert_bytes_read(x, layer, shape) for layer in layers) / len(layers)
    flops = 2.0 * rows * shape.chosen * shape.expert_parameters
    name = f"experts_us_{code or 'bf16'}_{rows}"
    yield Figure(name, seconds * 1e6, "us")
    yield over_floor(given, name, seconds, read, flops)


def over_floor(given: Given, name: str, seconds: float, read: float, flops: float) -> Figure:
    """Return `seconds` as a multiple of the shortest time that the ceilings allow for `read` bytes
    and `flops`."""
    reading = read / given.ceiling("copy_gb_per_s") / 1e9
    computing = flops / given.ceiling("matrix_tflops") / 1e12
    floor = max(reading, computing)
    cause = "products" if computing > reading else "bytes"
    return Figure(
        f"{name}_over_floor", seconds / floor, "", f"{floor * 1e6:.3g} us of {cause} is 1"
    )


def expert_bytes_read(x: Tensor, layer: ExpertWeights, shape: MixtureShape) -> float:
    """Return the bytes of the experts that some row chose."""
    chosen, _ = route(layer.gate(x.float()), shape.spec)
    stacked = layer.experts
    assert isinstance(stacked, StackedExperts)
    whole = sum(_bytes_of(each) for each in (stacked.gate_up, stacked.down))
    return whole * len(torch.unique(chosen)) / shape.experts


def _bytes_of(weights: Tensor | StackedCodes) -> int:
    if isinstance(weights, Tensor):
        return weights.nbytes
    zeros = 0 if weights.zeros is None else weights.zeros.nbytes
    return weights.codes.nbytes + weights.scales.nbytes + zeros


def mixture_weights(
    shape: MixtureShape, code: CodeDtype | None, device: torch.device
) -> ExpertWeights:
    """Return random weights of a mixture of experts, in codes if `code` is given."""
    dtype = step_dtype(device)
    gate = torch.randn(shape.experts, shape.hidden, device=device) * shape.hidden**-0.5
    sizes = ((2 * shape.ffn, shape.hidden), (shape.hidden, shape.ffn))
    if code is None:
        gate_up, down = (
            torch.empty(shape.experts, *size, dtype=dtype, device=device).normal_(
                0, size[1] ** -0.5
            )
            for size in sizes
        )
        return ExpertWeights(PlainMatrix(gate), None, StackedExperts(gate_up, down), None)
    gate_up_codes, down_codes = (_codes(shape, code, size, device) for size in sizes)
    stacked = StackedExperts(gate_up_codes, down_codes)
    return ExpertWeights(PlainMatrix(gate), None, stacked, None)


def _codes(
    shape: MixtureShape, code: CodeDtype, size: tuple[int, int], device: torch.device
) -> StackedCodes:
    """Random codes of one matrix of `size` per expert; scales keep the values small."""
    rows, columns = size
    group = shape.group if code == "int4" else columns
    packed = columns // 2 if code == "int4" else columns
    bits = torch.empty(shape.experts, rows, packed, dtype=torch.uint8, device=device)
    bits.random_(0, 256)
    if code == "fp8":
        bits.bitwise_and_(0xF7)  # not E4M3's NaN
    groups = shape.experts, rows, columns // group
    scales = torch.full(groups, 0.01, device=device)
    zeros = None
    if code == "int4":
        zeros = torch.randint(0, 16, groups, dtype=torch.int16, device=device)
    codes = bits.view(torch.int8) if code == "int8" else bits
    return StackedCodes(code, codes, scales, zeros, group)


def _latent_figures(given: Given, rows: int, context: int) -> Iterator[Figure]:
    """One layer's attention of `rows` that decode at `context` tokens: products with the absorbed
    matrices, and the kernel."""
    latent, heads, layers = (TINY_LATENT, 3, 2) if given.dry else (DEEPSEEK_V2_LITE, 16, 8)
    device, dtype = given.device, step_dtype(given.device)
    spec = _latent_model(latent, heads, layers, context)
    blocks = rows * -(-context // BLOCK_SIZE)
    pool = KvPool(spec, blocks, BLOCK_SIZE, dtype, device)
    fill_pool(pool)
    limits = DecodeLimits(rows, context)
    backend = TritonLatentAttention(pool, latent, heads, spec.attention.scale, limits)
    slices = tuple(Slice([1], context - 1, table(row, context)) for row in range(rows))
    layout = lay_out(StepBatch(slices), Bounds(blocks, BLOCK_SIZE, spec.vocab_size, context))
    queries = torch.randn(rows, heads, latent.query_dim, device=device).to(dtype)
    height = latent.plain_dim + latent.value_dim
    ups = [
        (torch.randn(heads, height, latent.rank, device=device) * latent.rank**-0.5).to(dtype)
        for _ in range(layers)
    ]

    def all_layers() -> None:
        for layer, up in enumerate(ups):
            backend.attend(layer, queries, up, layout)

    seconds = replay_seconds(all_layers, device) / layers
    read = rows * context * latent.width * dtype.itemsize + ups[0].nbytes
    flops = 2.0 * rows * heads * context * (latent.width + latent.rank)
    name = f"latent_attention_us_{rows}x{context}"
    yield Figure(name, seconds * 1e6, "us")
    yield over_floor(given, name, seconds, read, flops)


def _latent_model(latent: LatentSpec, heads: int, layers: int, context: int) -> ModelSpec:
    return ModelSpec(
        family="deepseek_v2",
        layers=layers,
        hidden_size=heads * latent.value_dim,
        heads=heads,
        kv_heads=1,
        head_dim=latent.width,
        ffn_size=16,
        vocab_size=16,
        norm_eps=1e-6,
        max_context=context,
        rotary_dim=latent.rope_dim,
        rope=RopeSpec("default", 10_000.0),
        attention=AttentionSpec(latent.query_dim**-0.5, (0,) * layers),
        tied_embeddings=False,
        eos_ids=(),
        latent=latent,
    )
