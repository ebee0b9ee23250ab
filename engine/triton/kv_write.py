"""RoPE and the KV write in one pass: returns rotated queries, writes rotated keys and values.

A program computes one token and one KV head with the query heads of its group. For models with
norms of heads it normalises them first, and rounds them to their dtype as a kernel of its own
would. For a quantised pool, rows are first rounded to the model's dtype, then encoded. Each value
is read and written once; torch takes six passes. The torch reference is `rms_norm`, `rope.rotate`
and `TorchAttention.write`. The module owns nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.model.attention import HeadNorms
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
def load_heads(  # type: ignore[no-untyped-def] # Triton infers types
    source,  # pointer to a head, or pointers [heads, 1]
    live,  # whether the head exists, same shape
    weight,  # [DIM]: of the norm
    eps,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    NORM: tl.constexpr,
):
    """Return the entries that rotate, in two halves, and the others, all float32 and zero beyond
    their number. With NORM they are normalised and rounded, as by a kernel of its own."""
    half, dims = tl.arange(0, HALF_PAD), tl.arange(0, DIM_PAD)
    turning, unrotated = half < HALF, (dims >= 2 * HALF) & (dims < DIM)
    kind: tl.constexpr = source.dtype.element_ty
    left = tl.load(source + half, mask=live & turning, other=0.0).to(tl.float32)
    right = tl.load(source + half + HALF, mask=live & turning, other=0.0).to(tl.float32)
    rest = left
    if 2 * HALF < DIM:
        rest = tl.load(source + dims, mask=live & unrotated, other=0.0).to(tl.float32)
    if NORM:
        last: tl.constexpr = len(left.shape) - 1
        squares = tl.sum(left * left + right * right, axis=last, keep_dims=True)
        if 2 * HALF < DIM:
            squares += tl.sum(rest * rest, axis=last, keep_dims=True)
        factor = tl.rsqrt(squares / DIM + eps)
        first = tl.load(weight + half, mask=turning, other=0.0).to(tl.float32)
        second = tl.load(weight + half + HALF, mask=turning, other=0.0).to(tl.float32)
        left = (left * factor * first).to(kind).to(tl.float32)
        right = (right * factor * second).to(kind).to(tl.float32)
        if 2 * HALF < DIM:
            others = tl.load(weight + dims, mask=unrotated, other=0.0).to(tl.float32)
            rest = (rest * factor * others).to(kind).to(tl.float32)
    return left, right, rest


@triton.jit
def write_quantized(  # type: ignore[no-untyped-def] # Triton infers types
    cell,  # pointer to the codes of the token's key
    scale,  # to its scale
    left, right,  # float32 [HALF_PAD], zero beyond HALF: the rotated entries of the key
    rest,  # float32 [DIM_PAD]: the others, zero where there are none; unless all rotate
    value,  # pointer
    stride_kv, stride_scale_kv,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    CODES: tl.constexpr,
):
    half, dims = tl.arange(0, HALF_PAD), tl.arange(0, DIM_PAD)
    left = left.to(value.dtype.element_ty).to(tl.float32)
    right = right.to(value.dtype.element_ty).to(tl.float32)
    highest = tl.maximum(magnitude(left), magnitude(right))
    if 2 * HALF < DIM:
        highest = tl.maximum(highest, magnitude(rest))
    found, inverse = scale_of(highest, CODES)
    tl.store(scale, found)
    tl.store(cell + half, encoded(left, inverse, CODES), mask=half < HALF)
    tl.store(cell + half + HALF, encoded(right, inverse, CODES), mask=half < HALF)
    if 2 * HALF < DIM:
        unrotated = (dims >= 2 * HALF) & (dims < DIM)
        tl.store(cell + dims, encoded(rest, inverse, CODES), mask=unrotated)
    numbers = tl.load(value + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    store_row(cell + stride_kv + dims, scale + stride_scale_kv, numbers, dims < DIM, CODES)


@triton.jit
def rotate_write_kernel(  # type: ignore[no-untyped-def] # Triton infers types
    out,  # [rows, heads, DIM]: rotated queries
    queries,  # [rows, heads, DIM]
    keys, values,  # [rows, kv_heads, DIM]
    query_norm, key_norm,  # of NORM, [DIM]; else None
    cos, sin,  # [rows, HALF]
    kv,  # pointer to one layer of the pool: [block, kv_head, k|v, token, DIM]
    scales,  # of CODES, float32 [block, kv_head, k|v, token]; else None
    blocks,  # int64 [rows]; negative: the row is padding and writes nothing
    slots,  # int64 [rows]: the token's index in its block
    stride_out_row, stride_out_head, stride_query_row, stride_query_head,
    stride_key_row, stride_key_head, stride_value_row, stride_value_head, stride_angle,
    stride_block, stride_head, stride_kv, stride_token,
    stride_scale_block, stride_scale_head, stride_scale_kv,
    eps,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, NORM: tl.constexpr, CODES: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = tl.arange(0, HALF_PAD)
    turning = half < HALF
    c = tl.load(cos + row * stride_angle + half, mask=turning, other=0.0).to(tl.float32)
    s = tl.load(sin + row * stride_angle + half, mask=turning, other=0.0).to(tl.float32)
    block, slot = tl.load(blocks + row), tl.load(slots + row)
    dims = tl.arange(0, DIM_PAD)
    unrotated = (dims >= 2 * HALF) & (dims < DIM)  # empty if whole heads rotate

    if GROUP > 0:
        lanes = tl.arange(0, GROUP_PAD)
        query_head, live = (head * GROUP + lanes)[:, None], (lanes < GROUP)[:, None]
        source = queries + row * stride_query_row + query_head * stride_query_head
        target = out + row * stride_out_row + query_head * stride_out_head
        left, right, rest = load_heads(
            source, live, query_norm, eps, HALF, HALF_PAD, DIM, DIM_PAD, NORM)
        rotated = (left * c - right * s).to(out.dtype.element_ty)
        tl.store(target + half, rotated, mask=live & turning)
        rotated = (right * c + left * s).to(out.dtype.element_ty)
        tl.store(target + half + HALF, rotated, mask=live & turning)
        if 2 * HALF < DIM:
            tl.store(target + dims, rest.to(out.dtype.element_ty), mask=live & unrotated)

    if block >= 0:
        cell = kv + block * stride_block + head.to(tl.int64) * stride_head + slot * stride_token
        key = keys + row * stride_key_row + head * stride_key_head
        key_left, key_right, key_rest = load_heads(
            key, True, key_norm, eps, HALF, HALF_PAD, DIM, DIM_PAD, NORM)
        turned_left, turned_right = key_left * c - key_right * s, key_right * c + key_left * s
        value = values + row * stride_value_row + head * stride_value_head
        if CODES != "":
            scale = scales + block * stride_scale_block + head.to(tl.int64) * stride_scale_head
            write_quantized(cell, scale + slot, turned_left, turned_right, key_rest, value,
                stride_kv, stride_scale_kv, HALF, HALF_PAD, DIM, DIM_PAD, CODES)
        else:
            tl.store(cell + half, turned_left.to(kv.dtype.element_ty), mask=turning)
            tl.store(cell + half + HALF, turned_right.to(kv.dtype.element_ty), mask=turning)
            if 2 * HALF < DIM:
                tl.store(cell + dims, key_rest.to(kv.dtype.element_ty), mask=unrotated)
            value = tl.load(value + dims, mask=dims < DIM)
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
    norms: HeadNorms | None = None,
) -> Tensor:
    """Rotate `queries` [rows, heads, dim], and write rotated `keys` and `values` [rows, kv_heads,
    dim] into `kv`, one layer of the pool, [block, kv_head, k|v, token, dim]; a quantised pool has
    `scales` float32 [block, kv_head, k|v, token]. Returns the queries.

    `angles`: see `Rotary.angles`, [rows, 1, rotated entries]; `blocks` and `slots` int64 [rows];
    a row with a negative block writes nothing. With `norms`, queries and keys are normalised
    first. Computed in float32, rounded once, and once after the norm.
    """
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    cos, sin = angles
    half = cos.shape[-1] // 2
    halves = cos[:, 0, :half], sin[:, 0, half:]  # the sine's first half is negated
    _launch(out, queries, keys, values, halves, kv, blocks, slots, scales, norms)
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
    norms: HeadNorms | None = None,
) -> None:
    rows, kv_heads, dim = keys.shape
    if not rows:
        return
    rotate_write_kernel[(rows, kv_heads)](
        out,
        queries,
        keys,
        values,
        None if norms is None else norms.queries,
        None if norms is None else norms.keys,
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
        0.0 if norms is None else norms.eps,
        **_constants(queries.shape[1] // kv_heads, halves[0].shape[1], dim),
        NORM=norms is not None,
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
