"""Latent attention over the paged pool: queries absorbed, KV cut into splits.

Of multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434): a token's row in the pool
is key and, but for its end, value of all heads, so a program reads it once for a tile of them.
Any row may come: `sequences` names its block table, so the rows of short chunks do too. Splits
are merged as in `triton_decode`. Expected limit: with 16 heads the bytes of the latents, with 128
what the L2 cache delivers to the four tiles of 32. Unproven: not yet run on a GPU. Owns nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.triton_decode import Partials, Splits, merge_splits, split_of
from baton.engine.triton_tile import (
    INTERPRETED,
    NOTHING,
    Tiles,
    logits,
    options,
    power_of_two,
    precision,
    product,
    weigh,
)


def latent_tiles(heads: int, dtype: torch.dtype) -> Tiles:
    """32 heads keep their sums of 512 numbers in registers. 64, which Hopper's matrix units
    would want, spilled 250 to 450 bytes a thread in every cut that was compiled."""
    if dtype == torch.float32:
        return Tiles(16, 16, 4, 1)
    return Tiles(32, 32, 8, 5) if heads > 16 else Tiles(16, 32, 4, 5)


# fmt: off
@triton.jit
def row_tile(start, places, held, DIM: tl.constexpr, DIM_PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """[tokens, DIM_PAD] from `start`, zero where not `held` and beyond DIM."""
    dims = tl.arange(0, DIM_PAD)
    cells = start + places[:, None] + dims[None, :]
    if DIM == DIM_PAD:
        return tl.load(cells, mask=held[:, None], other=0.0)
    else:
        return tl.load(cells, mask=held[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit(do_not_specialize=["stride_table", "capacity"])
def latent_kernel(  # type: ignore[no-untyped-def]
    mixed_out,  # float32 [rows, HEADS, capacity, RANK], or the result itself with capacity 1
    weights_out,  # float32 [rows, HEADS, capacity]
    queries,  # [rows, HEADS, RANK + REST], absorbed
    latents,  # pointer to one layer of the pool: [block, token, RANK + REST]
    tables,
    sequences,  # int32 [rows]: the row of `tables`
    lengths,  # int32 [rows]; 0: the row is padding, its result is 0
    stride_query_row, stride_query_head, stride_block, stride_token, stride_table,
    scale, capacity,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    REST: tl.constexpr, REST_PAD: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, SPLIT_TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    MERGED: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    _, _, each, count = split_of(length, tl.num_programs(2), SPLIT_TOKENS, TOKENS, 0)
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
        best = tl.full([ROWS], NOTHING, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, RANK_PAD], tl.float32)
        for begin in range(split * each, tl.minimum(split * each + each, length), TOKENS):
            tokens = begin + tl.arange(0, TOKENS)
            held = tokens < length
            blocks = tl.load(table + tokens // BLOCK_SIZE, mask=held, other=0)
            places = blocks.to(tl.int64) * stride_block + (tokens % BLOCK_SIZE) * stride_token
            latent = row_tile(latents, places, held, RANK, RANK_PAD)
            shared = row_tile(latents + RANK, places, held, REST, REST_PAD)
            scores = tl.zeros([ROWS, TOKENS], tl.float32)
            scores = product(query, tl.trans(latent), scores, PRECISION, INTERPRETED)
            scores = product(end, tl.trans(shared), scores, PRECISION, INTERPRETED)
            scores = tl.where(held[None, :], logits(scores, scale, 0.0), NOTHING)
            best, total, shrink, weights = weigh(best, total, scores)
            weights = weights.to(latent.dtype)
            mixed = product(weights, latent, mixed * shrink[:, None], PRECISION, INTERPRETED)
        total = tl.where(total > 0, total, 1.0)
        mixed = (mixed / total[:, None]).to(mixed_out.dtype.element_ty)
        tl.store(mixed_out + (slot + split)[:, None] * RANK + dims[None, :], mixed, mask=live)
        if MERGED:
            tl.store(weights_out + slot + split, best + tl.log2(total), mask=heads < HEADS)


@triton.jit
def write_latents_kernel(  # type: ignore[no-untyped-def]
    latents,  # [rows, WIDTH]
    pool,  # pointer to one layer of it: [block, token, WIDTH]
    blocks, slots,  # int64 [rows]; a negative block: padding, nothing is written
    stride_row, stride_block, stride_token,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block, dims = tl.load(blocks + row), tl.arange(0, WIDTH_PAD)
    inside = (dims < WIDTH) & (block >= 0)
    found = tl.load(latents + row * stride_row + dims, mask=inside)
    cell = pool + block * stride_block + tl.load(slots + row) * stride_token
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
) -> None:
    """Fill `out` [rows, heads, rank], contiguous, with weighted sums of latents.

    `queries` [rows, heads, rank + rest] are absorbed; `latents` is one layer of the pool,
    [block, token, rank + rest]. A row attends to the first `lengths` [rows] tokens of the
    sequence in row `sequences` [rows] of `tables` [sequences, blocks]; all int32.
    """
    rows, heads, width = queries.shape
    rank = out.shape[2]
    tiles = tiles or latent_tiles(heads, queries.dtype)
    latent_kernel[(rows, -(-heads // tiles.rows), splits.programs)](
        out if splits.direct else partials.mixed,
        partials.weights,
        queries,
        latents,
        tables,
        sequences,
        lengths,
        *queries.stride()[:2],
        *latents.stride()[:2],
        tables.stride(0),
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
        **options(tiles),
    )
    if not splits.direct:
        merge_splits(out, partials, lengths, splits, tiles.tokens, 0)


def write_latents(latents: Tensor, pool: Tensor, blocks: Tensor, slots: Tensor) -> None:
    """Put `latents` [rows, width] into `pool`, one layer of it, [block, token, width]; `blocks`
    and `slots` int64 [rows], a negative block: write nothing."""
    rows, width = latents.shape
    if rows:
        write_latents_kernel[(rows,)](
            latents,
            pool,
            blocks,
            slots,
            latents.stride(0),
            *pool.stride()[:2],
            WIDTH=width,
            WIDTH_PAD=power_of_two(width),
            num_warps=2,
        )
