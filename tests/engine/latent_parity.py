"""The kernels of latent attention against the same in float64, on any device.

As in `attention_parity.py`, a check returns the error of its worst row and the largest that is
allowed, and memory that no kernel may read holds NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import torch
from parity import Check, error, noticed
from torch import Tensor

from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.kv_quant import KV_QUANTS
from baton.engine.model.mla import LatentAttention
from baton.engine.model.step_layout import Bounds, StepLayout, lay_out
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.engine.spec.moe_spec import LatentSpec
from baton.engine.triton.decode import Splits, new_partials
from baton.engine.triton.decode_buffers import DecodeLimits
from baton.engine.triton.mla import latent_attention
from baton.engine.triton.mla_backend import TritonLatentAttention

ALLOWED = {torch.float32: 4e-6, torch.bfloat16: 2e-2}


def latent_spec(tiny: bool) -> LatentSpec:
    return LatentSpec(
        rank=24 if tiny else 512,
        rope_dim=8 if tiny else 64,
        plain_dim=16 if tiny else 128,
        value_dim=8 if tiny else 128,
        query_rank=None,
        interleaved=False,
    )


def steps(blocks: int, size: int) -> Iterator[StepLayout]:
    """Of three sequences: chunks that are expanded, chunks that are not, rows that decode."""
    order = torch.randperm(blocks).tolist()
    cut = (order[:5], order[5:8], order[8:12])
    for slices in (
        (Slice([1] * 33, 0, cut[0]), Slice([1], 0, cut[1])),
        (Slice([1] * 3, 33, cut[0]), Slice([1], 1, cut[1]), Slice([1] * 25, 0, cut[2])),
        (Slice([1], 36, cut[0]), Slice([1], 2, cut[1]), Slice([1], 25, cut[2])),
    ):
        yield lay_out(StepBatch(slices), Bounds(blocks, size, 9, 500))


def latent_check(limits: DecodeLimits, deterministic: bool, dtype: torch.dtype) -> Check:
    """Steps of rows that decode, chunks that are expanded and chunks that are not, by
    `TritonLatentAttention` against `LatentAttention` in float64."""

    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        spec = latent_spec(tiny)
        heads, scale = (3, 0.3) if tiny else (128, 0.07)
        blocks, size, worst = 30, 8, 0.0
        up = (torch.randn(heads, spec.plain_dim + spec.value_dim, spec.rank) * 0.2).to(dtype)
        pool = torch.full((blocks, 1, 2, size, spec.width), float("nan"), dtype=dtype)
        our_pool, their_pool = _pool(pool.to(device)), _pool(pool.double())
        theirs = LatentAttention(their_pool, spec, heads, scale)
        ours = TritonLatentAttention(
            our_pool, spec, heads, scale, limits, deterministic=deterministic
        )
        for layout in steps(blocks, size):
            rows = len(layout.tokens)
            for layer in range(2):
                queries = torch.randn(rows, heads, spec.query_dim).to(dtype)
                latents = torch.randn(rows, spec.width).to(dtype)
                theirs.write(layer, latents.double(), layout)
                wanted = theirs.attend(layer, queries.double(), up.double(), layout)
                ours.write(layer, latents.to(device), layout)
                found = ours.attend(layer, queries.to(device), up.to(device), layout)
                worst = max(worst, error(found.cpu(), wanted))
        same = torch.equal(our_pool.tensor.cpu().isnan(), their_pool.tensor.isnan())
        return worst if same else float("inf"), ALLOWED[dtype]

    return run


def codes_check(
    name: str, dtype: torch.dtype, deterministic: bool = False, mistake: float = 1.0
) -> Check:
    """Steps over a pool in eight bits: bytes are those that torch makes on a CPU, attention that
    of `LatentAttention` in float64 over them. `mistake` multiplies one scale of its pool."""

    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        spec, codes = latent_spec(tiny), KV_QUANTS[name]
        heads, scale = (3, 0.3) if tiny else (128, 0.07)
        blocks, size, worst, wrong = 30, 8, 0.0, 0
        shape: Any = SimpleNamespace(
            kv_heads=1, layers=2, head_dim=spec.width, latent=spec, features=0
        )
        pool = KvPool(shape, blocks, size, dtype, device, codes)
        plain = KvPool(shape, blocks, size, torch.float64, quant=codes)
        for each in (pool, plain):
            each.memory.fill_(0x7F)  # FP8's NaN; int8's greatest
            each.scales.fill_(float("nan"))
        up = (torch.randn(heads, spec.plain_dim + spec.value_dim, spec.rank) * 0.2).to(dtype)
        limits = DecodeLimits(8, 500)
        ours = TritonLatentAttention(pool, spec, heads, scale, limits, deterministic=deterministic)
        theirs = LatentAttention(plain, spec, heads, scale)
        for layout in steps(blocks, size):
            rows = len(layout.tokens)
            for layer in range(2):
                queries = torch.randn(rows, heads, spec.query_dim).to(dtype)
                latents = torch.randn(rows, spec.width)
                latents[:, spec.rank :] *= 5  # keys are larger than latents
                latents = latents.to(dtype)
                ours.write(layer, latents.to(device), layout)
                theirs.write(layer, latents, layout)
                wrong += int((pool.memory[:blocks].cpu() != plain.memory).sum())
                cell = layout.write_blocks[0], 0, layer, layout.write_slots[0], 0
                plain.scales[cell] *= mistake
                wanted = theirs.attend(layer, queries.double(), up.double(), layout)
                plain.scales[cell] /= mistake
                found = ours.attend(layer, queries.to(device), up.to(device), layout)
                worst = max(worst, error(found.cpu(), wanted))
        return worst + wrong, ALLOWED[dtype]

    return run


def latent_batch_check(device: torch.device, tiny: bool) -> tuple[float, float]:
    """Deterministic: a row's result is the same bits alone and in a chunk."""
    heads, rank, width, size = (3, 24, 32, 8) if tiny else (128, 512, 576, 16)
    dtype = torch.float32 if tiny else torch.bfloat16
    pool = torch.randn(8, size, width).to(device, dtype)
    tables = torch.randperm(8, dtype=torch.int32).view(1, 8).to(device)
    queries = torch.randn(5, heads, width).to(device, dtype)
    lengths = torch.tensor([30, 31, 32, 33, 60], dtype=torch.int32, device=device)
    sequences, outs = torch.zeros(5, dtype=torch.int32, device=device), []
    for rows, programs in ((slice(0, 5), 3), (slice(3, 4), 1)):
        splits = Splits(programs, 32)
        count = len(lengths[rows])
        partials = new_partials(count, heads, splits.capacity(60, 32), rank, device)
        out = torch.full((count, heads, rank), float("nan"), dtype=dtype, device=device)
        given = (queries[rows], pool, tables, sequences[rows], lengths[rows])
        latent_attention(out, *given, splits, partials, 0.1)
        outs.append(out)
    return float((outs[0][3] != outs[1][0]).sum()), 0.0


def one_row_off(check: Check) -> Check:
    """Of a step that is right but for one row, which must be noticed, by far."""

    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        attend = TritonLatentAttention.attend

        def off(
            self: TritonLatentAttention, layer: int, queries: Tensor, up: Tensor, layout: StepLayout
        ) -> Tensor:
            out = attend(self, layer, queries, up, layout)
            out[-1] *= 1.01
            return out

        TritonLatentAttention.attend = off
        try:
            found, allowed = check(device, tiny)
        finally:
            TritonLatentAttention.attend = attend
        return allowed / found, 0.1

    return run


def _pool(tensor: Tensor) -> KvPool:
    """As much of a `KvPool` as attention looks at."""
    size = tensor.shape[-2]
    plain = {"quant": None, "scales": None}
    made = SimpleNamespace(tensor=tensor, dtype=tensor.dtype, block_size=size, **plain)
    return cast(KvPool, made)


CHECKS: dict[str, Check] = {}
CHECKS["latent step, splits by count"] = latent_check(DecodeLimits(3, 500), False, torch.float32)
CHECKS["latent step, fixed splits"] = latent_check(DecodeLimits(40, 500, 32), True, torch.float32)
CHECKS["latent step, bfloat16"] = latent_check(DecodeLimits(8, 500), False, torch.bfloat16)
CHECKS["latent step, one row that is off is noticed"] = one_row_off(
    latent_check(DecodeLimits(3, 500), False, torch.float32)
)
for _name in KV_QUANTS:
    CHECKS[f"latent step, {_name}"] = codes_check(_name, torch.float32)
CHECKS["latent step, int8, bfloat16"] = codes_check("int8", torch.bfloat16)
CHECKS["latent step, fp8_e4m3, deterministic"] = codes_check("fp8_e4m3", torch.float32, True)
CHECKS["latent step, a wrong scale is noticed"] = noticed(
    codes_check("int8", torch.float32, mistake=1.5)
)
CHECKS["latent rows, bits do not depend on the batch"] = latent_batch_check
