"""Rotates a step's bfloat16 queries and keys, and writes keys and values. Needs numba.

One pass over memory writes rotated queries into a new array, and rotated keys and values into a
pool or any other array with strides. The module keeps no state.
"""

from __future__ import annotations

import numba
import torch
from torch import Tensor

from baton.engine.cpu.compiled import compiled, take_threads
from baton.engine.cpu.dot_bf16 import LANES
from baton.engine.cpu.row_ir import copy_row, rotate_row


def rotate_into(
    address: int,
    strides: tuple[int, ...],
    rows: tuple[Tensor, Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    cells: tuple[Tensor, Tensor],
) -> Tensor:
    """Rotate queries and keys, and write keys and values. Returns the rotated queries.

    `rows` are queries, keys and values [rows, heads or kv_heads, dim], `angles` those of
    `Rotary.angles`, all bfloat16. Keys go to `address`, with `strides` in bytes of a block, a KV
    head, a layer, from keys to values, and of a token; `cells` are the block and the token index
    of each row, int64 [rows] each."""
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
        cells[0].numpy(),
        cells[1].numpy(),
        out.data_ptr(),
    )
    return out


def rotate_walk(  # type: ignore[no-untyped-def] # numba infers types
    pool,  # address of the layer
    strides,  # bytes: of a block, KV head, layer, k to v, token
    queries,  # address, bytes from row to row and head to head, heads
    keys,
    values,  # or empty
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
                rotate_head(at, row, angles, out + (row * queries[3] + head) * dim * 2)
            token = pool + blocks[row] * strides[0] + slots[row] * strides[4]
            for head in range(keys[3]):
                target = token + head * strides[1]
                rotate_head(keys[0] + row * keys[1] + head * keys[2], row, angles, target)
                value = values[0] + row * values[1] + head * values[2]
                copy_row(value, target + strides[3], dim // LANES)


def _rotate_head(at, row, angles, out):  # type: ignore[no-untyped-def] # numba infers types
    """Copy a row's head from `at` to `out` with its first numbers rotated."""
    cos, sin, turned, dim = angles
    rotate_row(at, cos + row * turned * 2, sin + row * turned * 2, out, turned // (2 * LANES))
    if turned < dim:
        copy_row(at + turned * 2, out + turned * 2, (dim - turned) // LANES)


rotate_head = compiled(_rotate_head)
_rotate = compiled(rotate_walk, parallel=True)
