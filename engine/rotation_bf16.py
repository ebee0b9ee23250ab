"""Rotation of a step's bfloat16 queries and keys, and where keys and values go. Needs numba.

One pass over memory: queries into an array of their own, turned keys and plain values to where
strides and places say, in a pool or in any other array. Keeps no state.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from baton.engine.compiled import compiled, take_threads
from baton.engine.softmax_ir import TOKENS, copy, narrow, widen


def rotate_into(
    address: int,
    strides: tuple[int, ...],
    rows: tuple[Tensor, Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    places: tuple[Tensor, Tensor],
) -> Tensor:
    """`rows` are queries, keys and values [rows, heads or kv_heads, dim], `angles` of
    `Rotary.angles`, all of bfloat16. Keys go to `address`, by `strides` in bytes: of a block, a
    KV head, a layer, from keys to values, of a token; `places` are int64 [rows] each, the block
    and the token in it. Returns the turned queries."""
    queries, keys, values = rows
    for given in (*rows, *angles):
        assert given.dtype == torch.bfloat16 and given.stride(-1) == 1
    cos, sin = (each.contiguous() for each in angles)  # [rows, 1, turned]
    out = torch.empty(queries.shape, dtype=queries.dtype)
    take_threads()
    _rotate(
        address,
        strides,
        (queries.data_ptr(), 2 * queries.stride(0), 2 * queries.stride(1), queries.shape[1]),
        (keys.data_ptr(), 2 * keys.stride(0), 2 * keys.stride(1), keys.shape[1]),
        (values.data_ptr(), 2 * values.stride(0), 2 * values.stride(1)),
        (cos.data_ptr(), sin.data_ptr(), cos.shape[-1], queries.shape[2]),
        places[0].numpy(),
        places[1].numpy(),
        out.data_ptr(),
    )
    return out


def _rotate_walk(  # type: ignore[no-untyped-def]
    pool,  # address of the layer
    strides,  # bytes: of a block, KV head, layer, k to v, token
    queries,  # address, bytes from row to row and head to head, heads
    keys,
    values,  # as far as there
    angles,  # addresses of bfloat16 cos and sin [rows, turned], turned, dim
    blocks,  # int64 [rows]
    slots,
    out,  # address of bfloat16 [rows, heads, dim]
):
    cos, sin, turned, dim = angles
    parts = 16
    rows = blocks.shape[0]
    for part in numba.prange(parts):
        across, along = np.empty((2, turned), dtype=np.float32)
        head_values = np.empty(dim, dtype=np.float32)
        for row in range(part * rows // parts, (part + 1) * rows // parts):
            widen(cos + row * turned * 2, across.ctypes.data, turned // TOKENS)
            widen(sin + row * turned * 2, along.ctypes.data, turned // TOKENS)
            for head in range(queries[3]):
                at = queries[0] + row * queries[1] + head * queries[2]
                _turn(at, across, along, head_values, out + (row * queries[3] + head) * dim * 2)
            token = pool + blocks[row] * strides[0] + slots[row] * strides[4]
            for head in range(keys[3]):
                place = token + head * strides[1]
                _turn(keys[0] + row * keys[1] + head * keys[2], across, along, head_values, place)
                value = values[0] + row * values[1] + head * values[2]
                copy(value, place + strides[3], dim // 32)  # 16 pairs at a time


def _turn_head(at, across, along, values, out):  # type: ignore[no-untyped-def]
    """bfloat16 numbers at `at` to `out`, the first of them turned; `values` is room for them."""
    widen(at, values.ctypes.data, values.shape[0] // TOKENS)
    half = across.shape[0] // 2
    for i in range(half):
        low, high = values[i], values[i + half]
        values[i] = low * across[i] + high * along[i]
        values[i + half] = high * across[i + half] + low * along[i + half]
    narrow(values.ctypes.data, out, values.shape[0] // TOKENS, np.float32(1.0))


_turn = compiled(_turn_head)
_rotate = compiled(_rotate_walk, parallel=True)
