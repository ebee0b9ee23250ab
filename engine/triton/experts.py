"""Grouped matrix product for a GPU: rows sorted by expert, all experts in one launch.

    rows    0 . . . . 4 5 6 . . . . . 12          offsets [0, 5, 5, 13]
    expert  0 0 0 0 0 | | 2 2 2 2 2 2 2
    tiles   [ 0  ][ 0 ]   [ 2  ][ 2  ]            a tile never crosses an expert's border

Each program finds its expert from the offsets on the device, so the host does not wait and the
launch can be captured in a graph. The module keeps no state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.triton.tile import INTERPRETED, power_of_two, precision, product


def sort_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return (order, offsets) of `chosen` int64 [rows, choices], on its device. `order` int64
    [rows * choices] lists the flat indices of `chosen` expert by expert, ascending within one;
    `offsets` int32 [experts + 1] has the start of each expert."""
    flat = chosen.flatten()
    ordered, order = flat.sort(stable=True)
    borders = torch.arange(experts + 1, device=chosen.device, dtype=ordered.dtype)
    return order, torch.searchsorted(ordered, borders, out_int32=True)


def expert_matmul(
    x: Tensor,
    weights: Tensor,
    offsets: Tensor,
    source: Tensor | None = None,
    tile_rows: int = 0,
) -> Tensor:
    """Return [rows, out], where row r is x[source[r]] times its expert's matrix, transposed.

    `x` [tokens, in] contiguous, `weights` [experts, out, in] contiguous, `offsets` int32
    [experts + 1], `source` int64 [rows] (None: row r is x[r]). Products are summed in float32.
    `tile_rows` 0: chosen by the number of rows; else a row's bits do not depend on that number.
    The grouping is a device-side search as in MegaBlocks (Gale et al. 2022, arXiv:2211.15841),
    but with tiles of rows.
    """
    rows = x.shape[0] if source is None else source.shape[0]
    experts, width, depth = weights.shape
    out = x.new_empty((rows, width))
    if not rows:
        return out
    block_m = tile_rows or tile_rows_for(rows, experts)
    block_n = 128 if block_m > 16 else 64
    tiles = min(triton.cdiv(rows, block_m) + experts, rows)  # an upper bound
    _grouped[(triton.cdiv(width, block_n), tiles)](
        x,
        weights,
        offsets,
        source if source is not None else offsets,
        out,
        width,
        depth,
        EXPERTS=experts,
        EXPERTS_UP=triton.next_power_of_2(experts),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=64 if depth >= 64 else max(16, triton.next_power_of_2(depth)),
        GATHER=source is not None,
        PRECISION=precision(x.dtype),
        INTERPRETED=INTERPRETED,
        num_warps=8 if block_m == 128 else 4,
        num_stages=3,
    )
    return out


def tile_rows_for(rows: int, experts: int) -> int:
    return min(128, max(16, power_of_two(-(-rows // experts))))


def expert_matmul_reference(
    x: Tensor, weights: Tensor, offsets: Tensor, source: Tensor | None = None
) -> Tensor:
    """Same as `expert_matmul`, in torch, expert by expert."""
    rows = x if source is None else x[source]
    parts = []
    borders = offsets.tolist()
    for expert, (first, end) in enumerate(zip(borders, borders[1:], strict=False)):
        parts.append(rows[first:end] @ weights[expert].T)
    return torch.cat(parts)


@triton.jit
def tile_of(  # type: ignore[no-untyped-def] # Triton infers types
    offset_ptr, EXPERTS: tl.constexpr, EXPERTS_UP: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return the expert of this program's tile (EXPERTS: none), the tile's first row, and the end
    of the expert's rows."""
    tile, each = tl.program_id(1), tl.arange(0, EXPERTS_UP)
    begins = tl.load(offset_ptr + each, mask=each < EXPERTS, other=0)
    ends = tl.load(offset_ptr + each + 1, mask=each < EXPERTS, other=0)
    tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(tiles, axis=0)  # tiles of this expert and those before
    expert = tl.sum((upto <= tile).to(tl.int32), axis=0)
    expert = tl.minimum(expert, EXPERTS)  # entries beyond the last expert count too
    before = tl.sum(tl.where(each < expert, tiles, 0), axis=0)
    known = tl.minimum(expert, EXPERTS - 1)
    begin = tl.load(offset_ptr + known) + (tile - before) * BLOCK_M
    return expert, begin, tl.load(offset_ptr + known + 1)


@triton.jit
def _grouped(  # type: ignore[no-untyped-def] # Triton infers types
    x_ptr,
    weight_ptr,
    offset_ptr,
    source_ptr,
    out_ptr,
    width,
    depth,
    EXPERTS: tl.constexpr,
    EXPERTS_UP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATHER: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    expert, begin, end = tile_of(offset_ptr, EXPERTS, EXPERTS_UP, BLOCK_M)
    if expert < EXPERTS:
        row = begin + tl.arange(0, BLOCK_M)
        inside = row < end
        source = row.to(tl.int64)
        if GATHER:
            source = tl.load(source_ptr + row, mask=inside, other=0)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        step = tl.arange(0, BLOCK_K)
        x_tile = x_ptr + source[:, None] * depth + step[None, :]
        matrix = weight_ptr + expert.to(tl.int64) * width * depth
        w_tile = matrix + column.to(tl.int64)[None, :] * depth + step[:, None]
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, depth, BLOCK_K):
            deep = start + step < depth
            a = tl.load(x_tile + start, mask=inside[:, None] & deep[None, :], other=0.0)
            b = tl.load(w_tile + start, mask=deep[:, None] & (column < width)[None, :], other=0.0)
            sums = product(a, b, sums, PRECISION, INTERPRETED)
        target = out_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
        written = inside[:, None] & (column < width)[None, :]
        tl.store(target, sums.to(out_ptr.dtype.element_ty), mask=written)
