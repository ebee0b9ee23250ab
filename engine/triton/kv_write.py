"""RoPE and the KV write in one pass: returns rotated queries, writes rotated keys and values.

A program computes one token and one KV head with the query heads of its group. Expected limit:
memory bandwidth, each value is read and written once; torch takes six passes. For a quantised
pool, rows are first rounded to the model's dtype, then encoded. The torch reference is
`rope.rotate` and `TorchAttention.write`. Not yet run on a GPU. The module owns nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.triton.kv_quant import (
    UNFUSED,
    codes_name,
    encoded,
    magnitude,
    scale_of,
    scale_strides,
    store_row,
    stored_bytes,
)
from baton.engine.triton.tile import power_of_two

_WARPS = 2


# fmt: off
@triton.jit
def rotated_halves(first, live, cos, sin, HALF: tl.constexpr):  # type: ignore[no-untyped-def] # Triton infers types
    """Return both halves of the rotated entries, float32; `first` points to those of the first."""
    second = tl.load(first + HALF, mask=live, other=0.0).to(tl.float32)
    first = tl.load(first, mask=live, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def write_quantized(  # type: ignore[no-untyped-def] # Triton infers types
    cell,  # pointer to the codes of the token's key
    scale,  # to its scale
    left, right,  # float32 [HALF_PAD], zero beyond HALF: the rotated entries
    key,  # pointer to the key, whose other entries are read
    value,
    stride_kv, stride_scale_kv,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    CODES: tl.constexpr,
):
    half, dims = tl.arange(0, HALF_PAD), tl.arange(0, DIM_PAD)
    unrotated = (dims >= 2 * HALF) & (dims < DIM)
    left = left.to(key.dtype.element_ty).to(tl.float32)
    right = right.to(key.dtype.element_ty).to(tl.float32)
    rest = tl.load(key + dims, mask=unrotated, other=0.0).to(tl.float32)
    highest = tl.maximum(magnitude(left), magnitude(right))
    found, inverse = scale_of(tl.maximum(highest, magnitude(rest)), CODES)
    tl.store(scale, found)
    tl.store(cell + half, encoded(left, inverse, CODES), mask=half < HALF)
    tl.store(cell + half + HALF, encoded(right, inverse, CODES), mask=half < HALF)
    tl.store(cell + dims, encoded(rest, inverse, CODES), mask=unrotated)
    numbers = tl.load(value + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    store_row(cell + stride_kv + dims, scale + stride_scale_kv, numbers, dims < DIM, CODES)


@triton.jit
def rotate_write_kernel(  # type: ignore[no-untyped-def] # Triton infers types
    out,  # [rows, heads, DIM]: rotated queries
    queries,  # [rows, heads, DIM]
    keys, values,  # [rows, kv_heads, DIM]
    cos, sin,  # [rows, HALF]
    kv,  # pointer to one layer of the pool: [block, kv_head, k|v, token, DIM]
    scales,  # of CODES, float32 [block, kv_head, k|v, token]; else None
    blocks,  # int64 [rows]; negative: the row is padding and writes nothing
    slots,  # int64 [rows]: the token's index in its block
    stride_out_row, stride_out_head, stride_query_row, stride_query_head,
    stride_key_row, stride_key_head, stride_value_row, stride_value_head, stride_angle,
    stride_block, stride_head, stride_kv, stride_token,
    stride_scale_block, stride_scale_head, stride_scale_kv,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, CODES: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = tl.arange(0, HALF_PAD)
    turning = half < HALF
    c = tl.load(cos + row * stride_angle + half, mask=turning, other=0.0).to(tl.float32)
    s = tl.load(sin + row * stride_angle + half, mask=turning, other=0.0).to(tl.float32)
    dims = tl.arange(0, DIM_PAD)
    unrotated = (dims >= 2 * HALF) & (dims < DIM)  # empty if whole heads rotate

    if GROUP > 0:
        lanes = tl.arange(0, GROUP_PAD)
        query_head = (head * GROUP + lanes)[:, None]
        source = queries + row * stride_query_row + query_head * stride_query_head
        target = out + row * stride_out_row + query_head * stride_out_head
        live = (lanes < GROUP)[:, None] & turning[None, :]
        first, second = rotated_halves(source + half[None, :], live, c[None, :], s[None, :], HALF)
        tl.store(target + half[None, :], first.to(out.dtype.element_ty), mask=live)
        tl.store(target + half[None, :] + HALF, second.to(out.dtype.element_ty), mask=live)
        if 2 * HALF < DIM:
            live = (lanes < GROUP)[:, None] & unrotated[None, :]
            tl.store(target + dims[None, :], tl.load(source + dims[None, :], mask=live), mask=live)

    block = tl.load(blocks + row)
    if block >= 0:
        cell = kv + block * stride_block + head.to(tl.int64) * stride_head
        cell += tl.load(slots + row) * stride_token
        key = keys + row * stride_key_row + head * stride_key_head
        left, right = rotated_halves(key + half, turning, c, s, HALF)
        if CODES != "":
            scale = scales + block * stride_scale_block + head.to(tl.int64) * stride_scale_head
            scale += tl.load(slots + row)
            value = values + row * stride_value_row + head * stride_value_head
            write_quantized(cell, scale, left, right, key, value, stride_kv, stride_scale_kv,
                HALF, HALF_PAD, DIM, DIM_PAD, CODES)
        else:
            tl.store(cell + half, left.to(kv.dtype.element_ty), mask=turning)
            tl.store(cell + half + HALF, right.to(kv.dtype.element_ty), mask=turning)
            if 2 * HALF < DIM:
                rest = tl.load(key + dims, mask=unrotated)
                tl.store(cell + dims, rest.to(kv.dtype.element_ty), mask=unrotated)
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
    scales: Tensor | None = None,
) -> Tensor:
    """Rotate `queries` [rows, heads, dim], and write rotated `keys` and `values` [rows, kv_heads,
    dim] into `kv`, one layer of the pool, [block, kv_head, k|v, token, dim]; a quantised pool has
    `scales` float32 [block, kv_head, k|v, token]. Returns the queries.

    `angles`: see `Rotary.angles`, [rows, 1, rotated entries]; `blocks` and `slots` int64 [rows];
    a row with a negative block writes nothing. Computed in float32, rounded once.
    """
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    cos, sin = angles
    half = cos.shape[-1] // 2
    halves = cos[:, 0, :half], sin[:, 0, half:]  # the sine's first half is negated
    _launch(out, queries, keys, values, halves, kv, blocks, slots, scales)
    return out


def write(
    keys: Tensor,
    values: Tensor,
    kv: Tensor,
    blocks: Tensor,
    slots: Tensor,
    scales: Tensor | None = None,
) -> None:
    """Same as `rotate_and_write`, for keys that are already rotated."""
    none = keys[:, 0, :0]
    _launch(keys[:, :0], keys[:, :0], keys, values, (none, none), kv, blocks, slots, scales)


def _launch(
    out: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    halves: tuple[Tensor, Tensor],
    kv: Tensor,
    blocks: Tensor,
    slots: Tensor,
    scales: Tensor | None,
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
        stored_bytes(kv),
        scales,
        blocks,
        slots,
        *out.stride()[:2],
        *queries.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        halves[0].stride(0),
        *kv.stride()[:4],
        *scale_strides(scales),
        **_constants(queries.shape[1] // kv_heads, halves[0].shape[1], dim),
        CODES=codes_name(kv),
        num_warps=_WARPS,
        **({} if scales is None else UNFUSED),
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
