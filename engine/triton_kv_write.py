"""RoPE and the KV write in one pass: rotated queries out, rotated keys and values into blocks.

A program takes one token and one KV head with the query heads of its group. Expected limit:
bytes, each value read and written once, where torch would take six passes. The torch reference
is `rope.rotate` and `TorchAttention.write`. Unproven: not yet run on a GPU. Owns nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.triton_tile import power_of_two

_WARPS = 2


# fmt: off
@triton.jit
def turned(first, live, cos, sin, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both halves, float32, of what turns; `first` points to the entries of the first one."""
    second = tl.load(first + HALF, mask=live, other=0.0).to(tl.float32)
    first = tl.load(first, mask=live, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def rotate_write_kernel(  # type: ignore[no-untyped-def]
    out,  # [rows, heads, DIM]: rotated queries
    queries,  # [rows, heads, DIM]
    keys, values,  # [rows, kv_heads, DIM]
    cos, sin,  # [rows, HALF]
    kv,  # pointer to one layer of the pool: [block, kv_head, k|v, token, DIM]
    blocks,  # int64 [rows]; negative: the row is padding, nothing is written for it
    slots,  # int64 [rows]: the token's place in its block
    stride_out_row, stride_out_head, stride_query_row, stride_query_head,
    stride_key_row, stride_key_head, stride_value_row, stride_value_head, stride_angle,
    stride_block, stride_head, stride_kv, stride_token,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = tl.arange(0, HALF_PAD)
    turning = half < HALF
    c = tl.load(cos + row * stride_angle + half, mask=turning, other=0.0).to(tl.float32)
    s = tl.load(sin + row * stride_angle + half, mask=turning, other=0.0).to(tl.float32)
    dims = tl.arange(0, DIM_PAD)
    staying = (dims >= 2 * HALF) & (dims < DIM)  # only where a part of a head turns

    if GROUP > 0:
        lanes = tl.arange(0, GROUP_PAD)
        query_head = (head * GROUP + lanes)[:, None]
        source = queries + row * stride_query_row + query_head * stride_query_head
        target = out + row * stride_out_row + query_head * stride_out_head
        live = (lanes < GROUP)[:, None] & turning[None, :]
        first, second = turned(source + half[None, :], live, c[None, :], s[None, :], HALF)
        tl.store(target + half[None, :], first.to(out.dtype.element_ty), mask=live)
        tl.store(target + half[None, :] + HALF, second.to(out.dtype.element_ty), mask=live)
        if 2 * HALF < DIM:
            live = (lanes < GROUP)[:, None] & staying[None, :]
            tl.store(target + dims[None, :], tl.load(source + dims[None, :], mask=live), mask=live)

    block = tl.load(blocks + row)
    if block >= 0:
        cell = kv + block * stride_block + head.to(tl.int64) * stride_head
        cell += tl.load(slots + row) * stride_token
        key = keys + row * stride_key_row + head * stride_key_head
        left, right = turned(key + half, turning, c, s, HALF)
        tl.store(cell + half, left.to(kv.dtype.element_ty), mask=turning)
        tl.store(cell + half + HALF, right.to(kv.dtype.element_ty), mask=turning)
        if 2 * HALF < DIM:
            rest = tl.load(key + dims, mask=staying)
            tl.store(cell + dims, rest.to(kv.dtype.element_ty), mask=staying)
        value = values + row * stride_value_row + head * stride_value_head + dims
        value = tl.load(value, mask=dims < DIM)
        tl.store(cell + stride_kv + dims, value.to(kv.dtype.element_ty), mask=dims < DIM)
# fmt: on


def rotate_and_write(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    angles: tuple[Tensor, Tensor],
    kv: Tensor,
    blocks: Tensor,
    slots: Tensor,
) -> Tensor:
    """Rotated `queries` [rows, heads, dim]; rotated `keys` and `values` [rows, kv_heads, dim]
    go into `kv`, one layer of the pool, [block, kv_head, k|v, token, dim].

    `angles` as of `Rotary.angles`, [rows, 1, turning entries]; `blocks` and `slots` int64 [rows],
    a negative block: write nothing. Computed in float32, rounded once.
    """
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    cos, sin = angles
    half = cos.shape[-1] // 2
    halves = cos[:, 0, :half], sin[:, 0, half:]  # the first half of the sine is its negative
    _launch(out, queries, keys, values, halves, kv, blocks, slots)
    return out


def write(keys: Tensor, values: Tensor, kv: Tensor, blocks: Tensor, slots: Tensor) -> None:
    """As `rotate_and_write`, of what is rotated already."""
    none = keys[:, 0, :0]
    _launch(keys[:, :0], keys[:, :0], keys, values, (none, none), kv, blocks, slots)


def _launch(
    out: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    halves: tuple[Tensor, Tensor],
    kv: Tensor,
    blocks: Tensor,
    slots: Tensor,
) -> None:
    rows, kv_heads, dim = keys.shape
    if not rows:
        return
    rotate_write_kernel[(rows, kv_heads)](
        out,
        queries,
        keys,
        values,
        *halves,
        kv,
        blocks,
        slots,
        *out.stride()[:2],
        *queries.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        halves[0].stride(0),
        *kv.stride()[:4],
        **_constants(queries.shape[1] // kv_heads, halves[0].shape[1], dim),
        num_warps=_WARPS,
    )


def _constants(group: int, half: int, dim: int) -> dict[str, int]:
    return {
        "GROUP": group,
        "GROUP_PAD": power_of_two(group),
        "HALF": half,
        "HALF_PAD": power_of_two(half),
        "DIM": dim,
        "DIM_PAD": power_of_two(dim),
    }
