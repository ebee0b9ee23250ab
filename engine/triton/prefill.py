"""Attention of a step's chunks over their paged prefixes and themselves, in one launch.

A program computes a tile: some tokens of one chunk, for all query heads that share one KV head, so
that the group shares a tile of keys. A row's result depends only on its sequence, not on the batch
or the division into chunks (see `tile`); unless `fused`, bit for bit. Expected limit: the tensor
cores' rate (4 x heads x head_dim operations for each query and key) from a few hundred tokens on.
If `fused`, `hopper_prefill` computes the chunks that it supports. The module owns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from baton.engine.triton.hopper_prefill import hopper_prefill_attention, is_supported
from baton.engine.triton.kv_quant import UNFUSED, codes_name, scale_strides, stored_bytes
from baton.engine.triton.tile import (
    INTERPRETED,
    NO_SCORE,
    Tiles,
    attend_stretch,
    options,
    power_of_two,
    precision,
)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The rows `first` to `first + count`, which are a sequence's tokens from `start` on."""

    first: int
    count: int
    start: int
    table: int  # the sequence's row in the block tables


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The tiles that all layers of a step share. `tiles` int32 [tiles, 4]: table row, first query
    row, tokens, position of the first. Tiles with the most keys come first, so that none of them
    starts last."""

    tiles: Tensor
    tables: Tensor  # int32 [chunks, longest table]


def prefill_tiles(
    group: int, dim: int, dtype: torch.dtype, capability: int = 90, quantised: bool = False
) -> Tiles:
    """Return the tiles for heads of `dim`, `group` of them per KV head: on Hopper two warpgroups
    of 64 rows, which read from shared memory; elsewhere tiles that spill no registers."""
    if dtype == torch.float32:
        return Tiles(max(16, power_of_two(group)), 32, 4, 1)
    if dim > 128:
        return Tiles(128 if capability >= 90 else max(64, power_of_two(group)), 32, 8, 3)
    rows = max(128, power_of_two(group))
    if capability != 90 or rows > 128:
        return Tiles(rows, 64, 8, 4)
    # Two programs of 128 registers share a multiprocessor: the products of one overlap the
    # softmax of the other, which is worth some 80 bytes of spilled registers.
    return Tiles(rows, 32, 8, 4, 128) if quantised else Tiles(rows, 64, 8, 3, 128)


def plan_prefill(
    chunks: Sequence[PrefillChunk], tables: Tensor, group: int, tiles: Tiles
) -> PrefillPlan:
    """Divide `chunks` into tiles of at most `tiles.rows` query rows, `group` rows per token.
    `tables` is int32 [chunks, blocks]; the plan is on its device. Raises ValueError if a
    group has more heads than a tile has rows."""
    each = tiles.rows // group  # tokens
    if not each:
        raise ValueError(f"{group} query heads of one KV head exceed a tile of {tiles.rows} rows")
    cut = [
        (chunk.table, chunk.first + done, min(each, chunk.count - done), chunk.start + done)
        for chunk in chunks
        for done in range(0, chunk.count, each)
    ]
    cut.sort(key=lambda tile: -(tile[2] + tile[3]))
    found = torch.from_numpy(np.asarray(cut, dtype=np.int32).reshape(-1, 4))
    return PrefillPlan(found.to(tables.device, non_blocking=True), tables)


@triton.jit
def rows_of(tiles, index, SINGLE: tl.constexpr):  # type: ignore[no-untyped-def] # Triton infers types
    """Return a tile's row in the block tables, its first query row, the number of its rows, and
    the position of the first."""
    if SINGLE:
        return index, index, 1, tl.load(tiles + index) - 1
    else:
        tile = tiles + index * 4
        return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)


# fmt: off
# Specialising on a batch's values would compile kernels while clients wait.
@triton.jit(do_not_specialize=["stride_table"])
def prefill_kernel(  # type: ignore[no-untyped-def] # Triton infers types
    out, queries,  # [rows, heads, DIM]
    kv,  # pointer to one layer of the pool: [block, kv_head, k|v, token, DIM]
    scales,  # of CODES, float32 [block, kv_head, k|v, token]; else None
    tables,  # int32 [sequences, longest table]
    tiles,  # of the plan; or SINGLE: int32 [rows], the lengths of sequences of one row each
    stride_out_row, stride_out_head, stride_query_row, stride_query_head,
    stride_block, stride_head, stride_kv, stride_token, stride_table,
    stride_scale_block, stride_scale_head, stride_scale_kv,
    scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SINGLE: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, CODES: tl.constexpr,
):
    head, index = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    sequence, first_row, count, start = rows_of(tiles, index, SINGLE)
    table = tables + sequence.to(tl.int64) * stride_table

    lanes = tl.arange(0, ROWS)  # a lane is a token and one of the group's heads
    dims = tl.arange(0, DIM_PAD)
    token = tl.minimum(lanes // GROUP, count - 1)
    row = (first_row + token).to(tl.int64)
    query_head = head * GROUP + lanes % GROUP
    live = (lanes < count * GROUP)[:, None] & (dims < DIM)[None, :]
    at = row[:, None] * stride_query_row + query_head[:, None] * stride_query_head + dims[None, :]
    query = tl.load(queries + at, mask=live, other=0.0)

    end = start + count
    oldest = tl.maximum(start - WINDOW + 1, 0) if WINDOW > 0 else 0
    low = oldest // TOKENS * TOKENS
    clear_high = (start + 1) // TOKENS * TOKENS  # all rows see all earlier tokens
    clear_low = low
    if WINDOW > 0:  # and all tokens from here on
        clear_low = tl.cdiv(tl.maximum(end - WINDOW, 0), TOKENS) * TOKENS
        clear_low = tl.minimum(clear_low, clear_high)
    keys = kv + head.to(tl.int64) * stride_head
    if CODES != "":
        scales = scales + head.to(tl.int64) * stride_scale_head
    best, total = tl.full([ROWS], NO_SCORE, tl.float32), tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM_PAD], tl.float32)
    if WINDOW > 0:
        mixed, best, total = attend_stretch(
            mixed, best, total, query, start + token, low, clear_low, oldest,
            keys, keys + stride_kv, scales, table,
            stride_block, stride_token, stride_scale_block, stride_scale_kv, scale,
            DIM, DIM_PAD, TOKENS, BLOCK_SIZE, WINDOW, SOFT_CAP, True, PRECISION, INTERPRETED, CODES)
    mixed, best, total = attend_stretch(
        mixed, best, total, query, start + token, clear_low, clear_high, oldest,
        keys, keys + stride_kv, scales, table,
        stride_block, stride_token, stride_scale_block, stride_scale_kv, scale,
        DIM, DIM_PAD, TOKENS, BLOCK_SIZE, WINDOW, SOFT_CAP, False, PRECISION, INTERPRETED, CODES)
    mixed, best, total = attend_stretch(
        mixed, best, total, query, start + token, clear_high, end, oldest,
        keys, keys + stride_kv, scales, table,
        stride_block, stride_token, stride_scale_block, stride_scale_kv, scale,
        DIM, DIM_PAD, TOKENS, BLOCK_SIZE, WINDOW, SOFT_CAP, True, PRECISION, INTERPRETED, CODES)
    at = row[:, None] * stride_out_row + query_head[:, None] * stride_out_head + dims[None, :]
    total = tl.where(total > 0, total, 1.0)  # 0: padding
    tl.store(out + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=live)
# fmt: on


def prefill_attention(
    out: Tensor,
    queries: Tensor,
    kv: Tensor,
    plan: PrefillPlan,
    scale: float,
    *,
    scales: Tensor | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    tiles: Tiles | None = None,
    fused: bool = True,
) -> None:
    """Fill the plan's rows of `out` [rows, heads, dim] with the attention of `queries`.

    `kv` is one layer of the pool, [block, kv_head, k|v, token, dim]; `scales` float32 [block,
    kv_head, k|v, token] if `kv` is quantised; `plan` has the same `tiles` (default:
    `prefill_tiles`). `window` in tokens, the own one included; 0: none. `fused`: the compiler may
    round a product and a sum once, so that masked and unmasked tiles can differ.
    """
    tiles = tiles or _default_tiles(queries, kv)
    if not plan.tiles.shape[0]:
        return
    if fused and is_supported(queries, kv, window, soft_cap, tiles.rows):
        hopper_prefill_attention(out, queries, kv, plan.tables, plan.tiles, scale)
    else:
        given = (out, queries, kv, scales, plan.tables, plan.tiles)
        _launch(*given, scale, window, soft_cap, tiles, fused)


def single_attention(
    out: Tensor,
    queries: Tensor,
    kv: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    scales: Tensor | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    tiles: Tiles | None = None,
    fused: bool = True,
) -> None:
    """Compute `prefill_attention` of one row per sequence: int32 `tables` [rows, blocks] and
    `lengths` [rows], the own token included; 0: padding, whose result is 0. Unless `fused`, a row
    gets the same bits as in a chunk; `decode_attention` is faster but does not guarantee that."""
    given = (out, queries, kv, scales, tables, lengths)
    _launch(*given, scale, window, soft_cap, tiles, fused)


def _launch(
    out: Tensor,
    queries: Tensor,
    kv: Tensor,
    scales: Tensor | None,
    tables: Tensor,
    found: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    tiles: Tiles | None,
    fused: bool,
) -> None:
    """Launch the kernel. `found`: the plan's tiles [tiles, 4], or lengths [rows]."""
    _, heads, dim = queries.shape
    kv_heads, size = kv.shape[1], kv.shape[3]
    group = heads // kv_heads
    tiles = tiles or _default_tiles(queries, kv)
    prefill_kernel[(found.shape[0] * kv_heads,)](
        out,
        queries,
        stored_bytes(kv),
        scales,
        tables,
        found,
        *out.stride()[:2],
        *queries.stride()[:2],
        *kv.stride()[:4],
        tables.stride(0),
        *scale_strides(scales),
        scale,
        **prefill_constants(tiles, kv_heads, group, dim, size, queries.dtype),
        WINDOW=window,
        SOFT_CAP=soft_cap,
        SINGLE=found.dim() == 1,
        INTERPRETED=INTERPRETED,
        CODES=codes_name(kv),
        **options(tiles),
        **({} if fused else UNFUSED),
    )


def device_tiles(group: int, dim: int, dtype: torch.dtype, quantised: bool = False) -> Tiles:
    """Return `prefill_tiles` for the current device."""
    capability = 90 if INTERPRETED else driver.active.get_current_target().arch
    return prefill_tiles(group, dim, dtype, capability, quantised)


def _default_tiles(queries: Tensor, kv: Tensor) -> Tiles:
    _, heads, dim = queries.shape
    return device_tiles(heads // kv.shape[1], dim, queries.dtype, bool(codes_name(kv)))


def prefill_constants(
    tiles: Tiles, kv_heads: int, group: int, dim: int, block_size: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the compile-time values of a launch, except window and soft cap."""
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "DIM": dim,
        "DIM_PAD": max(power_of_two(dim), 16),
        "ROWS": tiles.rows,
        "TOKENS": tiles.tokens,
        "BLOCK_SIZE": block_size,
        "PRECISION": precision(dtype),
    }
