"""Decode attention over the paged pool: one query token per row, with its KV divided into splits.

A program computes one row, one KV head with all query heads of its group (the rows of one matrix
product), and one split of the tokens; a second kernel merges the splits by their log-sum-exp
(Flash-Decoding, Dao et al. 2023). Shapes and launches depend on no length, so both kernels can be
captured in a CUDA graph. The limit is memory bandwidth: each key and value is read once. Tiles and
splits were measured on an H200 (docs/decisions/0118). The caller owns the buffers of the partial
results.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.triton.kv_quant import codes_name, scale_strides, stored_bytes
from baton.engine.triton.tile import (
    INTERPRETED,
    NO_SCORE,
    Tiles,
    attend_stretch,
    options,
    power_of_two,
    precision,
)

MIN_SPLIT_TOKENS = 128  # a shorter split costs more in the merge than it saves
MAX_SPLITS = 64
_TYPICAL_TOKENS = 4096  # of a sequence of unknown length
_RESIDENT_PROGRAMS = 4  # of a multiprocessor
# How much longer a multiprocessor reads if it has only so many programs: measured.
_FEW_PROGRAMS = {1: 1.56, 2: 1.055}
_START_TOKENS = 50  # a program's start and end cost as much as reading so many tokens
_MERGED_AT_ONCE = 16  # splits
_MERGE_TOKENS = 64  # to merge so many costs a row as much as reading so many tokens
_SLACK = 1.02  # of the least cost, for fewer splits


@dataclass(frozen=True, slots=True)
class Splits:
    """The division of rows into splits. `programs` share the splits of a row. `tokens` 0: one
    split per program, whose numbers of tiles differ by at most one; else each split has `tokens`,
    and a row's result does not depend on its batch."""

    programs: int
    tokens: int = 0

    @property
    def direct(self) -> bool:
        """Return whether each row has one split, whose result needs no merge."""
        return self.programs == 1 and not self.tokens

    def capacity(self, longest: int, tile: int) -> int:
        """Return the partial results per row and head, for rows of at most `longest` tokens."""
        return -(-(longest + tile) // self.tokens) if self.tokens else self.programs


@dataclass(frozen=True, slots=True)
class Partials:
    """The partial results of a row's splits, which the merge reads; float32."""

    mixed: Tensor  # [rows, heads, capacity, dim]: the split's attention
    weights: Tensor  # [rows, heads, capacity]: log2 of the sum of its exponentials


@lru_cache(maxsize=4096)
def choose_splits(rows: int, kv_heads: int, longest: int, processors: int) -> Splits:
    """Choose the number of splits: the fewest whose cost is close to the least one.

    The cost is in tokens: those that the multiprocessor with the most programs reads, and the
    merge. One or two programs do not keep enough reads in flight and count as more tokens; more
    programs than it holds at once are dealt out as others end."""
    tokens = min(longest, _TYPICAL_TOKENS)

    def cost(count: int) -> float:
        programs = rows * kv_heads * count / processors  # of a multiprocessor
        most = ceil(programs)
        read = (most if most <= _RESIDENT_PROGRAMS else programs + 0.5) * (
            tokens / count + _START_TOKENS
        )
        merge = -(-count // _MERGED_AT_ONCE) * _MERGE_TOKENS if count > 1 else 0
        return read * _FEW_PROGRAMS.get(most, 1.0) + merge

    counts = range(1, max(min(longest // MIN_SPLIT_TOKENS, MAX_SPLITS), 1) + 1)
    costs = [cost(count) for count in counts]
    good = _SLACK * min(costs)
    return Splits(next(n for n, cost in zip(counts, costs, strict=True) if cost <= good))


def fixed_splits(rows: int, kv_heads: int, longest: int, processors: int, tokens: int) -> Splits:
    """Return splits of `tokens` each, with the number of programs that `choose_splits` finds."""
    programs = choose_splits(rows, kv_heads, longest, processors).programs
    return Splits(min(programs, -(-longest // tokens)), tokens)


def decode_tiles(group: int, dim: int, dtype: torch.dtype, *, filled: bool = True) -> Tiles:
    """Return the tiles: the group's heads, padded to the 16 rows that a matrix product needs.
    `filled`: whether programs for one split of each row fill the device."""
    rows = max(power_of_two(group), 16)
    if dtype == torch.float32:
        return Tiles(rows, 32, 4, 1)
    # With five stages the table is read two tiles ahead, keys and values one tile ahead. With
    # three, more programs fit on a multiprocessor, which helps as soon as there are enough.
    return Tiles(rows, 64, 4, 3) if filled and dim <= 128 else Tiles(rows, 32, 4, 5)


def new_partials(rows: int, heads: int, capacity: int, dim: int, device: torch.device) -> Partials:
    mixed = torch.empty(rows, heads, capacity, dim, dtype=torch.float32, device=device)
    return Partials(mixed, torch.empty(mixed.shape[:3], dtype=torch.float32, device=device))


@triton.jit
def split_of(  # type: ignore[no-untyped-def] # Triton infers types
    length,  # tokens of the row
    programs,
    SPLIT_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return the oldest token in the window, the start of the first split (a multiple of TOKENS),
    the number of tiles, and the number of splits, at least one, which may be empty."""
    oldest = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else length * 0
    first = oldest // TOKENS * TOKENS
    tiles = tl.cdiv(length - first, TOKENS)
    if SPLIT_TOKENS > 0:
        count = tl.cdiv(tiles, tl.cdiv(SPLIT_TOKENS, TOKENS))
    else:
        count = tl.minimum(tiles, programs)
    return oldest, first, tiles, tl.maximum(count, 1)


@triton.jit
def stretch_of(  # type: ignore[no-untyped-def] # Triton infers types
    split, first, tiles, count, SPLIT_TOKENS: tl.constexpr, TOKENS: tl.constexpr
):
    """Return the range of tokens [low, high) of a split; `first`, `tiles` and `count` are those of
    `split_of`. The last range may exceed the row."""
    if SPLIT_TOKENS > 0:
        each = tl.cdiv(SPLIT_TOKENS, TOKENS)
        return first + split * each * TOKENS, first + (split + 1) * each * TOKENS
    else:
        low, high = split * tiles // count, (split + 1) * tiles // count
        return first + low * TOKENS, first + high * TOKENS


# fmt: off
# Specialising on a batch's values would compile kernels while clients wait.
@triton.jit(do_not_specialize=["stride_table", "capacity"])
def decode_kernel(  # type: ignore[no-untyped-def] # Triton infers types
    mixed_out,  # float32 [rows, heads, capacity, DIM], or the result itself with capacity 1
    weights_out,  # float32 [rows, heads, capacity]
    queries,  # [rows, heads, DIM]
    kv,  # pointer to one layer of the pool: [block, kv_head, k|v, token, DIM]
    scales,  # of CODES, float32 [block, kv_head, k|v, token]; else None
    tables,
    lengths,  # int32 [rows]; 0: the row is padding, its result is 0
    stride_query_row, stride_query_head,
    stride_block, stride_head, stride_kv, stride_token, stride_table,
    stride_scale_block, stride_scale_head, stride_scale_kv,
    scale, capacity,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, SPLIT_TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, MERGED: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, CODES: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + row)
    oldest, first, tiles, count = split_of(length, tl.num_programs(2), SPLIT_TOKENS, TOKENS, WINDOW)
    table = tables + row * stride_table
    keys = kv + head.to(tl.int64) * stride_head
    if CODES != "":
        scales = scales + head.to(tl.int64) * stride_scale_head

    lanes = tl.arange(0, ROWS)  # the heads of the group
    dims = tl.arange(0, DIM_PAD)
    live = (lanes < GROUP)[:, None] & (dims < DIM)[None, :]
    query_head = head * GROUP + lanes
    at = row * stride_query_row + query_head[:, None] * stride_query_head + dims[None, :]
    query = tl.load(queries + at, mask=live, other=0.0)
    positions = tl.full([ROWS], 0, tl.int32) + length - 1
    slot = (row * tl.num_programs(1) * GROUP + query_head) * capacity
    for split in range(tl.program_id(2), count, tl.num_programs(2)):
        low, high = stretch_of(split, first, tiles, count, SPLIT_TOKENS, TOKENS)
        mixed, best, total = attend_stretch(
            tl.zeros([ROWS, DIM_PAD], tl.float32),
            tl.full([ROWS], NO_SCORE, tl.float32), tl.zeros([ROWS], tl.float32),
            query, positions, low, tl.minimum(high, length), oldest,
            keys, keys + stride_kv, scales, table,
            stride_block, stride_token, stride_scale_block, stride_scale_kv, scale,
            DIM, DIM_PAD, TOKENS, BLOCK_SIZE, WINDOW, SOFT_CAP, True, PRECISION, INTERPRETED, CODES)
        total = tl.where(total > 0, total, 1.0)
        mixed = (mixed / total[:, None]).to(mixed_out.dtype.element_ty)
        tl.store(mixed_out + (slot + split)[:, None] * DIM + dims[None, :], mixed, mask=live)
        if MERGED:
            tl.store(weights_out + slot + split, best + tl.log2(total), mask=lanes < GROUP)
# fmt: on


@triton.jit(do_not_specialize=["capacity", "programs"])
def merge_kernel(  # type: ignore[no-untyped-def] # Triton infers types
    out,  # [rows, heads, DIM]
    mixed_in,  # float32 [rows, heads, capacity, DIM]
    weights_in,  # float32 [rows, heads, capacity]
    lengths,
    stride_out_row,
    stride_out_head,
    capacity,
    programs,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    PER_TURN: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, _, _, count = split_of(tl.load(lengths + row), programs, SPLIT_TOKENS, TOKENS, WINDOW)
    slot = (row * tl.num_programs(1) + head) * capacity
    dims = tl.arange(0, DIM_PAD)
    best, total = tl.full([1], NO_SCORE, tl.float32), tl.zeros([1], tl.float32)
    mixed = tl.zeros([DIM_PAD], tl.float32)
    for begin in range(0, count, PER_TURN):
        splits = begin + tl.arange(0, PER_TURN)
        there = splits < count
        weights = tl.load(weights_in + slot + splits, mask=there, other=NO_SCORE)
        highest = tl.maximum(best, tl.max(weights, axis=0))
        weights = tl.where(there, tl.exp2(weights - highest), 0.0)
        cells = (slot + splits)[:, None] * DIM + dims[None, :]
        part = tl.load(mixed_in + cells, mask=there[:, None] & (dims < DIM)[None, :], other=0.0)
        shrink = tl.exp2(best - highest)
        mixed = mixed * shrink + tl.sum(part * weights[:, None], axis=0)
        total = total * shrink + tl.sum(weights, axis=0)
        best = highest
    at = row * stride_out_row + head * stride_out_head + dims
    tl.store(out + at, (mixed / total).to(out.dtype.element_ty), mask=dims < DIM)


def decode_attention(
    out: Tensor,
    queries: Tensor,
    kv: Tensor,
    tables: Tensor,
    lengths: Tensor,
    splits: Splits,
    partials: Partials,
    scale: float,
    *,
    scales: Tensor | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    tiles: Tiles | None = None,
) -> None:
    """Fill `out` [rows, heads, dim], contiguous, with the attention of `queries`, same shape.

    `kv` is one layer of the pool, [block, kv_head, k|v, token, dim]; `scales` float32 [block,
    kv_head, k|v, token] if `kv` is quantised; `tables` int32 [rows, blocks] and `lengths` int32
    [rows] count the row's own token, whose KV is written.
    `partials` holds at least as many rows and splits. `window` in tokens, 0: none.
    """
    rows, heads, dim = queries.shape
    kv_heads, size = kv.shape[1], kv.shape[3]
    group = heads // kv_heads
    tiles = tiles or decode_tiles(group, dim, queries.dtype)
    constants = decode_constants(tiles, group, dim, size, queries.dtype)
    shared = {"SPLIT_TOKENS": splits.tokens, "WINDOW": window}
    decode_kernel[(rows, kv_heads, splits.programs)](
        out if splits.direct else partials.mixed,
        partials.weights,
        queries,
        stored_bytes(kv),
        scales,
        tables,
        lengths,
        *queries.stride()[:2],
        *kv.stride()[:4],
        tables.stride(0),
        *scale_strides(scales),
        scale,
        1 if splits.direct else partials.mixed.shape[2],
        **constants,
        **shared,
        SOFT_CAP=soft_cap,
        MERGED=not splits.direct,
        INTERPRETED=INTERPRETED,
        CODES=codes_name(kv),
        **options(tiles),
    )
    if not splits.direct:
        merge_splits(out, partials, lengths, splits, tiles.tokens, window)


def merge_splits(
    out: Tensor, partials: Partials, lengths: Tensor, splits: Splits, tokens: int, window: int
) -> None:
    """Merge the partial results of tiles of `tokens` into `out` [rows, heads, dim]."""
    rows, heads, dim = out.shape
    merge_kernel[(rows, heads)](
        out,
        partials.mixed,
        partials.weights,
        lengths,
        *out.stride()[:2],
        partials.mixed.shape[2],
        splits.programs,
        DIM=dim,
        DIM_PAD=power_of_two(dim),
        TOKENS=tokens,
        SPLIT_TOKENS=splits.tokens,
        WINDOW=window,
        PER_TURN=_MERGED_AT_ONCE,
        num_warps=4 if dim > 128 else 1,
    )


def decode_constants(
    tiles: Tiles, group: int, dim: int, block_size: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the compile-time values of a launch, except splits, window and soft cap."""
    return {
        "GROUP": group,
        "DIM": dim,
        "DIM_PAD": max(power_of_two(dim), 16),
        "ROWS": tiles.rows,
        "TOKENS": tiles.tokens,
        "BLOCK_SIZE": block_size,
        "PRECISION": precision(dtype),
    }
