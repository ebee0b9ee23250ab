"""The kernel that rotates and writes KV, and whole steps of attention, against torch's.

As in `attention_parity.py`, a check returns its error and the largest that is allowed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from attention_parity import Shape
from parity import Check, error
from torch import Tensor

from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.kv_quant import KV_QUANTS
from baton.engine.model.attention import HeadNorms, TorchAttention
from baton.engine.model.rope import Rotary, rotate
from baton.engine.model.step_layout import Bounds, lay_out
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.engine.spec.model_spec import AttentionSpec
from baton.engine.spec.rope_spec import RopeSpec
from baton.engine.triton.attention_backend import TritonAttention
from baton.engine.triton.decode_buffers import DecodeLimits
from baton.engine.triton.kv_write import rotate_and_write, write

CHECKS: dict[str, Check] = {}


def write_check(turning: int, dtype: torch.dtype) -> Check:
    """Rotation and write against torch's; nothing else in the pool is touched, and a row of
    padding writes nothing."""

    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        shape = Shape(2, 3, 24, 8) if tiny else Shape(8, 4, 128, 16)
        part = turning if tiny else shape.dim * turning // 24
        rows, size, heads = (5 if tiny else 300), shape.block_size, shape.kv_heads
        heads_in_all = heads * (shape.group + 2)
        fused = torch.randn(rows, heads_in_all, shape.dim).to(device, dtype)
        queries, keys, values = fused.split([heads * shape.group, heads, heads], dim=1)
        positions = torch.randint(0, 500, (rows,), device=device)
        angles = Rotary(RopeSpec("default", 1e4), part, device).angles(positions, dtype)
        pool = torch.full((rows, heads, 3, 2, size, shape.dim), torch.nan, dtype=dtype).to(device)
        blocks = torch.randperm(rows, device=device)
        slots = torch.randint(0, size, (rows,), device=device)
        blocks[1] = -1
        wanted = pool.clone()
        real = blocks >= 0
        turned = rotate(keys, *angles)
        for index, written in enumerate((turned, values)):
            wanted[blocks[real], :, 1, index, slots[real]] = written[real]
        out = rotate_and_write(queries, keys, values, angles, pool[:, :, 1], blocks, slots)
        plain = torch.full_like(pool, float("nan"))
        write(turned, values, plain[:, :, 1], blocks, slots)
        if not torch.equal(pool.isnan(), wanted.isnan()) or not out.isfinite().all():
            return float("inf"), 0.0
        if not torch.equal(plain.nan_to_num(7.0), wanted.nan_to_num(7.0)):
            return float("inf"), 0.0
        truth = rotate(queries.double(), *(x.double() for x in angles))
        worst = max(error(out, truth), error(pool.nan_to_num(0.0), wanted.nan_to_num(0.0).double()))
        return worst, {torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]

    return run


def normalised_write_check(turning: int, dtype: torch.dtype, codes: str = "") -> Check:
    """Norms of heads, then rotation and write, against both written out, rounded in between."""

    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        shape = Shape(2, 3, 24, 8) if tiny else Shape(8, 4, 128, 16)
        part = turning if tiny else shape.dim * turning // 24
        rows, heads = (5 if tiny else 300), shape.kv_heads
        sizes = [heads * shape.group, heads, heads]
        fused = torch.randn(rows, sum(sizes), shape.dim).to(device, dtype)
        queries, keys, values = fused.split(sizes, dim=1)
        weights = [torch.rand(shape.dim, device=device) + 0.5 for _ in range(2)]
        norms = HeadNorms(weights[0].to(dtype), weights[1], 1e-6)  # some are kept in float32
        angles = Rotary(RopeSpec("default", 1e4), part, device).angles(
            torch.randint(0, 500, (rows,), device=device), dtype
        )
        spec: Any = SimpleNamespace(
            kv_heads=heads, layers=1, head_dim=shape.dim, latent=None, features=0
        )
        pool = KvPool(spec, rows, shape.block_size, dtype, device, KV_QUANTS.get(codes))
        order, slots = torch.randperm(rows, device=device), torch.zeros(rows, device=device).long()
        scales = None if pool.scales is None else pool.scales.select(2, 0)
        kv = pool.tensor.select(2, 0)
        given = (queries, keys, values, angles, kv, order, slots, scales, norms)
        out = rotate_and_write(*given)
        wanted = []
        for x, weight in ((queries, norms.queries), (keys, norms.keys)):
            wide = x.double()
            scale = (wide.square().mean(-1, keepdim=True) + norms.eps).rsqrt()
            normed = (wide * scale * weight.double()).to(dtype)
            wanted.append(rotate(normed.double(), *(each.double() for each in angles)))
        written = pool.take(0, order)[:, :, :, 0]  # [rows, kv_head, k|v, dim]
        worst = max(error(out, wanted[0]), error(written[:, :, 1], values.double()))
        allowed = 5e-2 if codes else {torch.float32: 1e-6, torch.bfloat16: 1.5e-2}[dtype]
        return max(worst, error(written[:, :, 0], wanted[1])), allowed

    return run


def step_check(limits: DecodeLimits, deterministic: bool) -> Check:
    """A whole step by `TritonAttention`, of rows that decode and chunks, layer by layer, against
    `TorchAttention`; then a second step, of decode rows alone."""

    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        spec = AttentionSpec(0.21, (0, 6), soft_cap=4.0)
        blocks, size, worst = 30, 8, 0.0
        pools = [torch.full((blocks, 1, 2, 2, size, 16), float("nan")) for _ in range(2)]
        order = torch.randperm(blocks).tolist()
        cut = (order[:3], order[3:9], order[9:11], order[11:20])
        for slices in (
            (Slice([1] * 20, 0, cut[0]), Slice([1], 0, cut[2]), Slice([1] * 7, 0, cut[3])),
            (Slice([1], 20, cut[0]), Slice([1] * 30, 0, cut[1]), Slice([1], 1, cut[2])),
            (Slice([1], 21, cut[0]), Slice([1], 30, cut[1])),
        ):
            layout = lay_out(StepBatch(slices), Bounds(blocks, size, 9, 500))
            rows = len(layout.tokens)
            pool = Pool(pools[0].to(device))
            ours = TritonAttention(pool, spec, 2, limits, deterministic=deterministic)
            theirs = TorchAttention(Pool(pools[1]), spec)
            for layer in range(2):
                fused = torch.randn(rows, 4, 16)
                angles = Rotary(RopeSpec("default", 1e4), 16).angles(layout.positions, fused.dtype)
                queries, keys, values = fused.split([2, 1, 1], dim=1)
                theirs.write(layer, rotate(keys, *angles), values, layout)
                wanted = theirs.attend(layer, rotate(queries, *angles), layout)
                given = (queries.to(device), keys.to(device), values.to(device))
                on_device = (angles[0].to(device), angles[1].to(device))
                turned = ours.rotate_and_write(layer, *given, on_device, layout)
                found = ours.attend(layer, turned, layout)
                worst = max(worst, error(found.cpu(), wanted.double()))
            pools[0] = pool.tensor.cpu()
        return worst, 2e-6

    return run


class Pool(KvPool):
    """As much of one as attention looks at."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.dtype, self.block_size = tensor, tensor.dtype, tensor.shape[-2]
        self.quant = self.scales = None


CHECKS["write, whole heads turn, float32"] = write_check(24, torch.float32)
CHECKS["write, a part of a head turns, float32"] = write_check(10, torch.float32)
CHECKS["write, whole heads turn, bfloat16"] = write_check(24, torch.bfloat16)
CHECKS["write, norms, whole heads turn, float32"] = normalised_write_check(24, torch.float32)
CHECKS["write, norms, a part of a head turns, float32"] = normalised_write_check(10, torch.float32)
CHECKS["write, norms, whole heads turn, bfloat16"] = normalised_write_check(24, torch.bfloat16)
CHECKS["write, norms, int8, a part of a head turns, bfloat16"] = normalised_write_check(
    10, torch.bfloat16, "int8"
)
CHECKS["step, splits by count"] = step_check(DecodeLimits(4, 500), False)
CHECKS["step, fixed splits"] = step_check(DecodeLimits(4, 500, split_tokens=64), False)
CHECKS["step, buffers for fewer rows"] = step_check(DecodeLimits(1, 500), False)
CHECKS["step, deterministic"] = step_check(DecodeLimits(4, 500), True)
