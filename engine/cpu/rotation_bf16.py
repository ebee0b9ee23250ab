"""Rotation of a step's bfloat16 queries and keys, and where keys and values go. Needs numba.

One pass over memory: queries into an array of their own, turned keys and plain values to where
strides and places say, in a pool or in any other array. Keeps no state.
"""

from __future__ import annotations

import numba
import torch
from torch import Tensor

from baton.engine.cpu.compiled import compiled, take_threads
from baton.engine.cpu.dot_bf16 import LANES
from baton.engine.cpu.row_ir import copy_row, turn_row


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
    dim, parts, rows = angles[3], 16, blocks.shape[0]
    for part in numba.prange(parts):
        for row in range(part * rows // parts, (part + 1) * rows // parts):
            for head in range(queries[3]):
                at = queries[0] + row * queries[1] + head * queries[2]
                turn_head(at, row, angles, out + (row * queries[3] + head) * dim * 2)
            token = pool + blocks[row] * strides[0] + slots[row] * strides[4]
            for head in range(keys[3]):
                place = token + head * strides[1]
                turn_head(keys[0] + row * keys[1] + head * keys[2], row, angles, place)
                value = values[0] + row * values[1] + head * values[2]
                copy_row(value, place + strides[3], dim // LANES)


def _turn_head(at, row, angles, out):  # type: ignore[no-untyped-def]
    """A head of a row, at `at`, to `out`: its first numbers turned, the others as they are."""
    cos, sin, turned, dim = angles
    turn_row(at, cos + row * turned * 2, sin + row * turned * 2, out, turned // (2 * LANES))
    if turned < dim:
        copy_row(at + turned * 2, out + turned * 2, (dim - turned) // LANES)


turn_head = compiled(_turn_head)
_rotate = compiled(_rotate_walk, parallel=True)
