"""The kernels over KV in eight bits against `KvQuant` and plain torch, on any device.

Codes and scales are held bit for bit to what torch makes on a CPU; attention to `TorchAttention`
in float64 over the same codes. As in `attention_parity.py`, a check returns the error of its worst
row and the largest that is allowed, and what no kernel may read holds NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from parity import Check, error, noticed
from torch import Tensor

from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.kv_quant import KV_QUANTS, MIN_MAGNITUDE, KvQuant
from baton.engine.model.attention import TorchAttention
from baton.engine.model.rope import Rotary
from baton.engine.model.step_layout import Bounds, StepLayout, lay_out
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.engine.spec.model_spec import AttentionSpec
from baton.engine.spec.rope_spec import RopeSpec
from baton.engine.triton.attention_backend import TritonAttention
from baton.engine.triton.decode_buffers import DecodeLimits
from baton.engine.triton.kv_write import rotate_and_write, write

ALLOWED = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LAYERS = 2
POISON = 0x7F  # FP8's NaN; int8's greatest


def new_pool(
    codes: KvQuant,
    heads: int,
    dim: int,
    blocks: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device | None,
) -> KvPool:
    """Full of what was never written."""
    spec: Any = SimpleNamespace(
        kv_heads=heads, layers=LAYERS, head_dim=dim, latent=None, features=0
    )
    pool = KvPool(spec, blocks, size, dtype, device, codes)
    assert pool.scales is not None
    pool.memory.fill_(POISON)
    pool.scales.fill_(float("nan"))
    return pool


def odd_rows(keys: Tensor, values: Tensor) -> None:
    """Rows that are not like others: zeros, too small for a scale, not finite, a great and a very
    great number, ties between codes, and FP8's least numbers."""
    keys[0], values[0] = 0.0, -0.0
    keys[1], values[1] = MIN_MAGNITUDE / 4, MIN_MAGNITUDE
    keys[2, :, 3], values[2, :, -1] = float("inf"), float("nan")
    keys[3, :, -1], values[3, 0, 0] = 1e4, -3e38
    dim = keys.shape[-1]
    keys[4] = torch.arange(dim) - dim // 2 + 0.5
    keys[4, :, 0] = 127.0
    values[4] = (torch.arange(dim) - dim // 2) * 2.0**-10
    values[4, :, 0] = 448.0


def write_check(name: str, turning: int, dtype: torch.dtype, mistake: float = 0.0) -> Check:
    """Bytes of the pool that differ from those of torch. `mistake` is added to a number that
    torch is given."""

    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        heads, group, dim, size, rows = (2, 3, 24, 8, 7) if tiny else (8, 4, 128, 16, 300)
        part = turning if tiny else dim * turning // 24
        fused = torch.randn(rows, heads * (group + 2), dim)
        _, keys, values = fused.split([heads * group, heads, heads], dim=1)
        odd_rows(keys, values)
        fused = fused.to(dtype)
        given = fused.to(device).split([heads * group, heads, heads], dim=1)
        _, keys, values = fused.split([heads * group, heads, heads], dim=1)
        positions = torch.randperm(rows * size)[:rows]
        blocks, slots = positions // size, positions % size
        blocks[6] = -1
        written = blocks >= 0
        angles = Rotary(RopeSpec("default", 1e4), part).angles(torch.arange(rows) * 3, dtype)
        on_device = (
            angles[0].to(device),
            angles[1].to(device),
            blocks.to(device),
            slots.to(device),
        )
        wrong = 0
        for turns in (True, False):
            ours = new_pool(KV_QUANTS[name], heads, dim, rows, size, dtype, device)
            theirs = new_pool(KV_QUANTS[name], heads, dim, rows, size, dtype, device=None)
            kv, scales = ours.tensor.select(2, 1), ours.scales.select(2, 1)
            if turns:
                out = rotate_and_write(*given, on_device[:2], kv, *on_device[2:], scales)
                assert out[6:].isfinite().all()  # of no odd row
            else:
                write(*given[1:], kv, *on_device[2:], scales)
            truth = torch.stack((turned(keys, angles, tiny) if turns else keys, values), dim=2)
            truth[5, 0, 0, 0] += mistake
            theirs.put(1, blocks[written], slots[written], truth[written])
            wrong += int((ours.memory[:rows].cpu() != theirs.memory[:rows]).sum())
        return float(wrong), 0.0

    return run


def turned(x: Tensor, angles: tuple[Tensor, Tensor], interpreted: bool) -> Tensor:
    """`x` [rows, heads, dim], of which the first entries turn, each product and sum rounded to
    float32, the result to x's kind; to bfloat16 triton's interpreter cuts instead."""
    cos, sin = angles
    half = cos.shape[-1] // 2
    c, s = cos[..., :half].float(), sin[..., half:].float()
    left, right = x[..., :half].float(), x[..., half : 2 * half].float()
    both = torch.cat((left * c - right * s, right * c + left * s), dim=-1)
    if interpreted and x.dtype == torch.bfloat16:
        both = (both.view(torch.int32) & -(1 << 16)).view(torch.float32)
    return torch.cat((both.to(x.dtype), x[..., 2 * half :]), dim=-1)


def layouts(tiny: bool, blocks: int, size: int) -> list[StepLayout]:
    """Steps of four sequences in scattered blocks: chunks, rows that decode, and both."""
    order = torch.randperm(blocks).tolist()
    long, other = (20, 30) if tiny else (1500, 700)
    widths = [-(-(tokens + 2) // size) for tokens in (long, other, 2, 40)]
    cut = [order[sum(widths[:i]) : sum(widths[: i + 1])] for i in range(4)]
    steps: Sequence[tuple[Slice, ...]] = (
        (Slice([1] * long, 0, cut[0]), Slice([1], 0, cut[2]), Slice([1] * 7, 0, cut[3])),
        (Slice([1], long, cut[0]), Slice([1] * other, 0, cut[1]), Slice([1] * 9, 7, cut[3])),
        (Slice([1], long + 1, cut[0]), Slice([1], other, cut[1]), Slice([1], 1, cut[2])),
    )
    made = [lay_out(StepBatch(s), Bounds(blocks, size, 9, 1 << 20)) for s in steps]
    return made[:2] if tiny else made


def step_check(
    name: str, dtype: torch.dtype, deterministic: bool = False, mistake: float = 1.0
) -> Check:
    """Whole steps by `TritonAttention`, with windows or without. `mistake` multiplies the scale of
    one value that the truth is computed with."""

    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        heads, group, dim, size, blocks = (1, 3, 16, 8, 30) if tiny else (8, 4, 128, 16, 200)
        window = 6 if tiny else 250
        # Each window is compiled on its own, which is most of a check's time on a GPU.
        windows = (0 if dtype == torch.bfloat16 else window, window)
        spec = AttentionSpec(0.21, windows, soft_cap=4.0)
        ours = new_pool(KV_QUANTS[name], heads, dim, blocks, size, dtype, device)
        theirs = new_pool(KV_QUANTS[name], heads, dim, blocks, size, torch.float64, None)
        limits = DecodeLimits(4, 2000)
        attention = TritonAttention(ours, spec, heads * group, limits, deterministic=deterministic)
        worst = 0.0
        for layout in layouts(tiny, blocks, size):
            rows = len(layout.tokens)
            angles = Rotary(RopeSpec("default", 1e4), dim).angles(layout.positions, dtype)
            on_device = (angles[0].to(device), angles[1].to(device))
            for layer in range(LAYERS):
                fused = torch.randn(rows, heads * (group + 2), dim)
                fused[:, -heads:] *= 1e-3  # values, whose scales are below float16's normal ones
                given = fused.to(device, dtype).split([heads * group, heads, heads], dim=1)
                queries = attention.rotate_and_write(layer, *given, on_device, layout)
                found = attention.attend(layer, queries, layout)
                theirs.memory.copy_(ours.memory[:blocks])
                cell = layout.write_blocks[0], 0, layer, 1, layout.write_slots[0]
                theirs.scales[cell] *= mistake
                wanted = TorchAttention(theirs, spec).attend(layer, queries.cpu().double(), layout)
                worst = max(worst, error(found.cpu(), wanted))
        return worst, ALLOWED[dtype]

    return run


def broken_check(device: torch.device, tiny: bool) -> tuple[float, float]:
    """A key that is not finite makes NaN of all rows that see it, chunks and decode rows, and of
    no others: codes do not hide it. Counts the rows that are otherwise."""
    heads, group, dim, size, dtype = 1, 2, 16, 8, torch.float32
    spec, limits = AttentionSpec(0.21, (0, 0)), DecodeLimits(4, 500)
    pool = new_pool(KV_QUANTS["int8"], heads, dim, 9, size, dtype, device)
    attention = TritonAttention(pool, spec, heads * group, limits)
    wrong = 0
    for slices, broken, seen in (
        ((Slice([1] * 40, 0, range(6)), Slice([1] * 3, 0, [7])), 12, range(12, 40)),
        ((Slice([1], 40, range(6)), Slice([1], 3, [7])), None, range(1)),
    ):
        layout = lay_out(StepBatch(slices), Bounds(9, size, 9, 500))
        rows = len(layout.tokens)
        queries = torch.randn(rows, heads * group, dim)
        keys, values = torch.randn(2, rows, heads, dim)
        if broken is not None:
            keys[broken, 0, 5] = float("inf")
        attention.write(0, keys.to(device), values.to(device), layout)
        found = attention.attend(0, queries.to(device), layout).cpu()
        wanted = torch.tensor([row in seen for row in range(rows)])
        wrong += int((found.isnan().all(dim=(1, 2)) != wanted).sum())
        wrong += int((found.isfinite().all(dim=(1, 2)) == wanted).sum())
    return float(wrong), 0.0


CHECKS: dict[str, Check] = {}
for _name in KV_QUANTS:
    CHECKS[f"write, {_name}, whole heads turn, float32"] = write_check(_name, 24, torch.float32)
    CHECKS[f"write, {_name}, a part turns, bfloat16"] = write_check(_name, 10, torch.bfloat16)
    CHECKS[f"step, {_name}, float32"] = step_check(_name, torch.float32)
    CHECKS[f"step, {_name}, bfloat16"] = step_check(_name, torch.bfloat16)
CHECKS["write, a wrong number is noticed"] = noticed(
    write_check("int8", 24, torch.float32, mistake=0.1)
)
CHECKS["step, int8, float16"] = step_check("int8", torch.float16)
CHECKS["step, fp8_e4m3, deterministic"] = step_check("fp8_e4m3", torch.float32, True)
CHECKS["step, a wrong scale is noticed"] = noticed(step_check("int8", torch.float32, mistake=1.5))
CHECKS["step, a broken row is seen"] = broken_check
