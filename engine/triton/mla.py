"""Latent attention over the paged pool: absorbed queries, with KV divided into splits.

In multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434) a token's row in the pool is
key and, except its end, value of all heads, so a program reads it once for a tile of heads. In
eight bits, latent and key each have a scale, which multiplies their products and the weights.
`sequences` names the block table of each row, so rows of short chunks can be included. Splits are
merged as in `decode`. Expected limit: memory bandwidth with 16 heads; with 128, the bandwidth of
the L2 cache to four tiles of 32. The module owns nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.triton.decode import Partials, Splits, merge_splits, split_of, stretch_of
from baton.engine.triton.kv_quant import UNFUSED, codes_name, plain, store_row, stored_bytes
from baton.engine.triton.tile import (
    INTERPRETED,
    NO_SCORE,
    Tiles,
    load_scales,
    logits,
    options,
    power_of_two,
    precision,
    product,
    scaled,
    weigh,
)


def latent_tiles(heads: int, dtype: torch.dtype, coded: bool = False) -> Tiles:
    """Return the tiles. The sums of 512 numbers of 32 heads fit into registers. 64 heads, which
    Hopper's matrix units prefer, spilled 250 to 450 bytes per thread in every variant that was
    compiled; 32 heads spilled 60 to 230 bytes for a quantised pool, whose codes are decoded in
    registers."""
    if dtype == torch.float32:
        return Tiles(16, 16, 4, 1)
    if coded:
        return Tiles(16, 32, 8, 4)
    return Tiles(32, 32, 8, 5) if heads > 16 else Tiles(16, 32, 4, 5)


# fmt: off
@triton.jit
def row_tile(start, offsets, held, DIM: tl.constexpr, DIM_PAD: tl.constexpr):  # type: ignore[no-untyped-def] # Triton infers types
    """Load rows [tokens, DIM_PAD] from `start`; zero where not `held` and beyond DIM."""
    dims = tl.arange(0, DIM_PAD)
    cells = start + offsets[:, None] + dims[None, :]
    if DIM == DIM_PAD:
        return tl.load(cells, mask=held[:, None], other=0.0)
    else:
        return tl.load(cells, mask=held[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def latent_scores(  # type: ignore[no-untyped-def] # Triton infers types
    query, end,  # [rows, RANK_PAD] and [rows, REST_PAD]
    latent, shared,  # [tokens, RANK_PAD] and [tokens, REST_PAD]
    units,  # float32 [tokens] of latents and of shared keys, or None
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Return the products of queries and keys, float32 [rows, tokens]."""
    scores = tl.zeros([query.shape[0], latent.shape[0]], tl.float32)
    if units is None:
        scores = product(query, tl.trans(latent), scores, PRECISION, INTERPRETED)
        return product(end, tl.trans(shared), scores, PRECISION, INTERPRETED)
    else:
        keyed = product(end, tl.trans(shared), scores, PRECISION, INTERPRETED)
        scores = product(query, tl.trans(latent), scores, PRECISION, INTERPRETED)
        return scores * units[0][None, :] + keyed * units[1][None, :]


@triton.jit(do_not_specialize=["stride_table", "capacity"])
def latent_kernel(  # type: ignore[no-untyped-def] # Triton infers types
    mixed_out,  # float32 [rows, HEADS, capacity, RANK], or the result itself with capacity 1
    weights_out,  # float32 [rows, HEADS, capacity]
    queries,  # [rows, HEADS, RANK + REST], absorbed
    latents,  # pointer to one layer of the pool: [block, token, RANK + REST]
    scales,  # of CODES, float32 [block, token, latent|key]; else None
    tables,
    sequences,  # int32 [rows]: the row of `tables`
    lengths,  # int32 [rows]; 0: the row is padding, its result is 0
    stride_query_row, stride_query_head, stride_block, stride_token, stride_table,
    stride_scale_block,
    scale, capacity,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    REST: tl.constexpr, REST_PAD: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, SPLIT_TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MERGED: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr, CODES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    _, first, tiles, count = split_of(length, tl.num_programs(2), SPLIT_TOKENS, TOKENS, 0)
    table = tables + tl.load(sequences + row).to(tl.int64) * stride_table
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dims, rest = tl.arange(0, RANK_PAD), tl.arange(0, REST_PAD)
    live = (heads < HEADS)[:, None] & (dims < RANK)[None, :]
    at = queries + row * stride_query_row + heads[:, None] * stride_query_head
    query = tl.load(at + dims[None, :], mask=live, other=0.0)
    inside = (heads < HEADS)[:, None] & (rest < REST)[None, :]
    end = tl.load(at + RANK + rest[None, :], mask=inside, other=0.0)
    slot = (row * HEADS + heads) * capacity
    for split in range(tl.program_id(2), count, tl.num_programs(2)):
        best = tl.full([ROWS], NO_SCORE, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, RANK_PAD], tl.float32)
        low, high = stretch_of(split, first, tiles, count, SPLIT_TOKENS, TOKENS)
        for begin in range(low, tl.minimum(high, length), TOKENS):
            tokens = begin + tl.arange(0, TOKENS)
            held = tokens < length
            blocks = tl.load(table + tokens // BLOCK_SIZE, mask=held, other=0)
            offsets = blocks.to(tl.int64) * stride_block + (tokens % BLOCK_SIZE) * stride_token
            latent = row_tile(latents, offsets, held, RANK, RANK_PAD)
            shared = row_tile(latents + RANK, offsets, held, REST, REST_PAD)
            latent = plain(latent, query.dtype, CODES, INTERPRETED)
            shared = plain(shared, query.dtype, CODES, INTERPRETED)
            units = None
            if CODES != "":
                near = scales + blocks.to(tl.int64) * stride_scale_block + tokens % BLOCK_SIZE * 2
                units = load_scales(near, 1, held, True, CODES)
            scores = latent_scores(query, end, latent, shared, units, PRECISION, INTERPRETED)
            scores = tl.where(held[None, :], logits(scores, scale, 0.0), NO_SCORE)
            best, total, shrink, weights = weigh(best, total, scores)
            if CODES != "":
                # `units` is not None then, which mypy cannot see
                weights, latent = scaled(weights, latent, units[0], query.dtype)  # type: ignore[index]
            weights = weights.to(query.dtype)
            mixed = product(weights, latent, mixed * shrink[:, None], PRECISION, INTERPRETED)
        total = tl.where(total > 0, total, 1.0)
        mixed = (mixed / total[:, None]).to(mixed_out.dtype.element_ty)
        tl.store(mixed_out + (slot + split)[:, None] * RANK + dims[None, :], mixed, mask=live)
        if MERGED:
            tl.store(weights_out + slot + split, best + tl.log2(total), mask=heads < HEADS)


@triton.jit
def write_latents_kernel(  # type: ignore[no-untyped-def] # Triton infers types
    latents,  # [rows, WIDTH]
    pool,  # pointer to one layer of it: [block, token, WIDTH]
    scales,  # of CODES, float32 [block, token, latent|key]; else None
    blocks, slots,  # int64 [rows]; a negative block: padding, nothing is written
    stride_row, stride_block, stride_token, stride_scale_block,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
    CODES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block, slot, dims = tl.load(blocks + row), tl.load(slots + row), tl.arange(0, WIDTH_PAD)
    cell = pool + block * stride_block + slot * stride_token
    source = latents + row * stride_row
    if CODES != "":
        if block >= 0:
            scale = scales + block * stride_scale_block + slot * 2
            first = tl.arange(0, RANK_PAD)
            numbers = tl.load(source + first, mask=first < RANK, other=0.0).to(tl.float32)
            store_row(cell + first, scale, numbers, first < RANK, CODES)
            rest = (dims >= RANK) & (dims < WIDTH)
            numbers = tl.load(source + dims, mask=rest, other=0.0).to(tl.float32)
            store_row(cell + dims, scale + 1, numbers, rest, CODES)
    else:
        inside = (dims < WIDTH) & (block >= 0)
        found = tl.load(source + dims, mask=inside)
        tl.store(cell + dims, found.to(pool.dtype.element_ty), mask=inside)
# fmt: on


def latent_attention(
    out: Tensor,
    queries: Tensor,
    latents: Tensor,
    tables: Tensor,
    sequences: Tensor,
    lengths: Tensor,
    splits: Splits,
    partials: Partials,
    scale: float,
    *,
    tiles: Tiles | None = None,
    scales: Tensor | None = None,
) -> None:
    """Fill `out` [rows, heads, rank], contiguous, with weighted sums of latents.

    `queries` [rows, heads, rank + rest] are absorbed; `latents` is one layer of the pool,
    [block, token, rank + rest]; a quantised pool has `scales` float32 [block, token, latent|key].
    A row attends to the first `lengths` [rows] tokens of the sequence in row `sequences` [rows] of
    `tables` [sequences, blocks]; all int32.
    """
    rows, heads, width = queries.shape
    rank = out.shape[2]
    tiles = tiles or latent_tiles(heads, queries.dtype, scales is not None)
    latent_kernel[(rows, -(-heads // tiles.rows), splits.programs)](
        out if splits.direct else partials.mixed,
        partials.weights,
        queries,
        stored_bytes(latents),
        scales,
        tables,
        sequences,
        lengths,
        *queries.stride()[:2],
        *latents.stride()[:2],
        tables.stride(0),
        _scale_stride(scales),
        scale,
        1 if splits.direct else partials.mixed.shape[2],
        HEADS=heads,
        RANK=rank,
        RANK_PAD=max(power_of_two(rank), 16),
        REST=width - rank,
        REST_PAD=max(power_of_two(width - rank), 16),
        ROWS=tiles.rows,
        TOKENS=tiles.tokens,
        SPLIT_TOKENS=splits.tokens,
        BLOCK_SIZE=latents.shape[1],
        MERGED=not splits.direct,
        PRECISION=precision(queries.dtype),
        INTERPRETED=INTERPRETED,
        CODES=codes_name(latents),
        **options(tiles),
    )
    if not splits.direct:
        merge_splits(out, partials, lengths, splits, tiles.tokens, 0)


def write_latents(
    latents: Tensor,
    pool: Tensor,
    scales: Tensor | None,
    blocks: Tensor,
    slots: Tensor,
    rank: int,
) -> None:
    """Write `latents` [rows, width] into `pool`, one of its layers, [block, token, width]. In a
    quantised pool, the first `rank` numbers of a row have the first of two `scales` float32
    [block, token, 2]. `blocks` and `slots` int64 [rows]; a row with a negative block writes
    nothing."""
    rows, width = latents.shape
    if rows:
        write_latents_kernel[(rows,)](
            latents,
            stored_bytes(pool),
            scales,
            blocks,
            slots,
            latents.stride(0),
            *pool.stride()[:2],
            _scale_stride(scales),
            RANK=rank,
            RANK_PAD=power_of_two(rank),
            WIDTH=width,
            WIDTH_PAD=power_of_two(width),
            CODES=codes_name(pool),
            num_warps=2,
            **({} if scales is None else UNFUSED),
        )


def _scale_stride(scales: Tensor | None) -> int | None:
    """Return the stride between blocks; a block's scales are contiguous, token by token."""
    assert scales is None or scales.stride()[1:] == (2, 1)
    return None if scales is None else scales.stride(0)
