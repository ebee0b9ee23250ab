"""Blocks of a granter in a pool with another block size: where they land, and their order."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.kv_transfer.block_sizes import (
    BlockRatio,
    SlabRows,
    block_ratio,
    in_own_order,
)
from baton.kv_transfer.checksum import SlabGroup
from baton.kv_transfer.local_pool import HostPool

# Two heads with scales behind their numbers, then a draft's: a head with features behind it.
GROUPS = (SlabRows(2, ((6, 8), (6, 4))), SlabRows(1, ((4, 16), (1, 24))))
TOKEN_BYTES = sum(group.slabs * group.token_bytes for group in GROUPS)
SIZES = [(16, 32), (32, 16), (16, 64), (64, 16), (4, 4)]


def laid_out(tokens: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Return the blocks of some tokens, [blocks, bytes], as the layout says: row by row, and in a
    row token by token. `tokens` [tokens, bytes of a token over all rows]."""
    blocks = []
    for start in range(0, len(tokens), size):
        part, at, content = tokens[start : start + size], 0, []
        for group in GROUPS:
            for _ in range(group.slabs):
                for rows, row_bytes in group.areas:
                    for _ in range(rows):
                        content.append(part[:, at : at + row_bytes].ravel())
                        at += row_bytes
        blocks.append(np.concatenate(content))
    return np.stack(blocks)


def numbers(tokens: int) -> NDArray[np.uint8]:
    dice = np.random.default_rng(3)
    return dice.integers(0, 256, (tokens, TOKEN_BYTES), dtype=np.uint8)


@pytest.mark.parametrize(("granter", "reader"), SIZES)
def test_what_landed_gets_the_order_of_the_own_blocks(granter: int, reader: int) -> None:
    ratio, tokens = block_ratio(granter, reader), numbers(192)
    assert ratio is not None
    theirs, ours = laid_out(tokens, granter), laid_out(tokens, reader)
    landed = theirs.reshape(-1, max(theirs.shape[1], ours.shape[1]))
    made = in_own_order(landed, GROUPS, ratio)
    assert np.array_equal(made.reshape(ours.shape), ours)


@pytest.mark.parametrize(("granter", "reader"), SIZES[:4])
def test_a_pool_orders_its_blocks_and_sums_as_the_granter(granter: int, reader: int) -> None:
    ratio, tokens, large = block_ratio(granter, reader), numbers(128), max(granter, reader)
    assert ratio is not None
    draft_bytes = GROUPS[1].token_bytes
    theirs = HostPool(laid_out(tokens, granter), 2, SlabGroup(1, draft_bytes * granter), GROUPS)
    wanted = laid_out(tokens, reader)
    ours = HostPool(
        np.zeros((20, wanted.shape[1]), np.uint8), 2, SlabGroup(1, draft_bytes * reader), GROUPS
    )
    own = [7, 2, 11, 5, 3, 13, 17, 1][: len(wanted)]
    cells = ratio.cells(own, len(theirs.array))
    width = ours.block_bytes // ratio.joined
    for block, parts in zip(theirs.array, cells, strict=True):
        ours.array.reshape(-1, width)[list(parts)] = block.reshape(len(parts), -1)
    seeds = list(range(40, 40 + len(theirs.array)))
    sums = ours.landed_checksums([cell for parts in cells for cell in parts], seeds, ratio)
    assert np.array_equal(sums, theirs.checksums(range(len(seeds)), seeds))
    ours.put_in_order(own, [ratio.joined] * (128 // large), ratio)
    assert np.array_equal(ours.array[own], wanted)
    rest = [block for block in range(20) if block not in own]
    assert not ours.array[rest].any()


def test_what_no_granter_fills_becomes_zero() -> None:
    """What the block held before could be no number where it lies after the order has changed."""
    ratio, tokens = BlockRatio(joined=4), numbers(64)
    array = np.full((2, 64 * TOKEN_BYTES), 255, np.uint8)
    pool = HostPool(array, 2, SlabGroup(1, GROUPS[1].token_bytes * 64), GROUPS)
    array[1, : array.shape[1] // 2] = laid_out(tokens[:32], 16).ravel()
    pool.put_in_order([1], [2], ratio)
    tokens[32:] = 0
    assert np.array_equal(array[1], laid_out(tokens, 64)[0])
    assert (array[0] == 255).all()


@pytest.mark.parametrize(
    ("granter", "reader", "ratio"),
    [
        (16, 16, BlockRatio()),
        (16, 64, BlockRatio(joined=4)),
        (48, 16, BlockRatio(split=3)),
        (16, 24, None),
        (0, 16, None),
    ],
)
def test_one_size_divides_the_other(granter: int, reader: int, ratio: BlockRatio | None) -> None:
    assert block_ratio(granter, reader) == ratio


def test_blocks_are_counted_in_both_sizes() -> None:
    joined, split = BlockRatio(joined=2), BlockRatio(split=4)
    assert (joined.granter_blocks(3), joined.own_blocks(5)) == (6, 2)
    assert (split.granter_blocks(8), split.own_blocks(2)) == (2, 8)
    with pytest.raises(ValueError, match="6 own blocks end within"):
        split.granter_blocks(6)
    assert joined.cells([9, 4], 3) == [(18,), (19,), (8,)]
    assert joined.blocks_of([18, 19, 8]) == [9, 4]
    assert split.cells([9, 4, 1, 0], 1) == [(9, 4, 1, 0)]
    for ratio in (joined, split):
        with pytest.raises(ValueError, match="do not hold"):
            ratio.cells([9], 3)
