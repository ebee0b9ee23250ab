"""Block layout and what moves between any two splits: every byte once, from its owner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv_transfer.layout import (
    BlockLayout,
    LayerGroup,
    draft_heads_of,
    draft_runs,
    heads_of,
    region,
    runs,
)


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, int, int]:
    """KV heads, and two tensor-parallel sizes that divide them or are divided by them."""
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]))
    possible = [tp for tp in range(1, 33) if kv_heads % tp == 0 or tp % kv_heads == 0]
    return kv_heads, draw(st.sampled_from(possible)), draw(st.sampled_from(possible))


def alone(heads: int, **shape: int) -> BlockLayout:
    return BlockLayout((LayerGroup(heads, **shape),))


def test_scales_are_part_of_a_slab():
    """As the engine's pool in eight bits has it: a head's codes, then its scales."""
    plain = alone(4, layers=3, block_size=16, head_dim=64, item_bytes=2)
    codes = alone(4, layers=3, block_size=16, head_dim=64, item_bytes=1, scale_bytes=4)
    slab_bytes = codes.groups[0].slab_bytes
    assert slab_bytes == 3 * 2 * 16 * 64 + 3 * 2 * 16 * 4
    assert codes.block_bytes == 4 * slab_bytes
    run = runs(8, reader_tp=4, reader_rank=1, granter_tp=2)[0]
    half = alone(2, layers=3, block_size=16, head_dim=64, item_bytes=1, scale_bytes=4)
    moved = region(run, codes, 5, half, 7)
    assert moved.granter_offset == 5 * codes.block_bytes + 2 * slab_bytes
    assert moved.reader_offset == 7 * half.block_bytes
    assert moved.length == 2 * slab_bytes  # the heads' scales with their codes
    with pytest.raises(ValueError, match="slabs of"):
        region(run, codes, 5, plain, 7)


def layout(heads: int) -> BlockLayout:
    return alone(heads, layers=2, block_size=2, head_dim=4, item_bytes=2)


def with_draft(heads: int, draft_heads: int) -> BlockLayout:
    draft = LayerGroup(draft_heads, layers=1, block_size=2, head_dim=6, item_bytes=2)
    return BlockLayout((*layout(heads).groups, draft))


@given(splits())
def test_every_reader_byte_comes_once_from_a_rank_that_owns_it(split: tuple[int, int, int]) -> None:
    kv_heads, reader_tp, granter_tp = split
    for rank in range(reader_tp):
        mine = heads_of(kv_heads, reader_tp, rank)
        reader = layout(len(mine))
        covered = np.zeros(reader.block_bytes * 3, dtype=int)
        for run in runs(kv_heads, reader_tp, rank, granter_tp):
            assert 0 <= run.granter_rank < granter_tp
            theirs = heads_of(kv_heads, granter_tp, run.granter_rank)
            moved = mine[run.reader_slab : run.reader_slab + run.slabs]
            assert moved == theirs[run.granter_slab : run.granter_slab + run.slabs]
            assert len(moved) == run.slabs > 0
            granter = layout(len(theirs))
            found = region(run, granter, 5, reader, 1)
            assert found.granter_offset >= granter.offset(5)
            assert found.granter_offset + found.length <= granter.offset(6)
            covered[found.reader_offset : found.reader_offset + found.length] += 1
        assert (covered[reader.offset(1) : reader.offset(2)] == 1).all()
        assert covered.sum() == reader.block_bytes


@given(splits())
def test_heads_of_all_ranks_cover_the_model_evenly(split: tuple[int, int, int]) -> None:
    kv_heads, tp_size, _ = split
    held = [head for rank in range(tp_size) for head in heads_of(kv_heads, tp_size, rank)]
    copies = max(1, tp_size // kv_heads)
    assert sorted(held) == sorted(list(range(kv_heads)) * copies)


def test_equal_splits_move_one_run_of_the_whole_block() -> None:
    (run,) = runs(kv_heads=8, reader_tp=4, reader_rank=3, granter_tp=4)
    assert (run.granter_rank, run.granter_slab, run.reader_slab, run.slabs) == (3, 0, 0, 2)


def test_readers_of_one_head_spread_over_its_copies() -> None:
    ranks = [runs(2, reader_tp=8, reader_rank=r, granter_tp=8)[0].granter_rank for r in range(8)]
    assert sorted(ranks) == list(range(8))


def test_a_latent_head_is_alike_on_every_rank() -> None:
    latent = alone(1, layers=3, block_size=16, head_dim=576, item_bytes=2, sides=1)
    assert latent.block_bytes == 3 * 16 * 576 * 2
    assert runs(1, reader_tp=4, reader_rank=2, granter_tp=1)[0].slabs == 1


def test_offsets_go_beyond_32_bits() -> None:
    large = alone(8, layers=80, block_size=16, head_dim=128, item_bytes=2)
    assert (
        large.offset(100_000, 7)
        == 100_000 * large.block_bytes + 7 * large.groups[0].slab_bytes
        > 1 << 32
    )


def test_impossible_splits_are_refused() -> None:
    with pytest.raises(ValueError, match="do not divide into 3"):
        heads_of(8, 3, 0)
    with pytest.raises(ValueError, match="12 ranks"):
        heads_of(8, 12, 0)
    with pytest.raises(ValueError, match="no rank 4"):
        heads_of(8, 4, 4)
    with pytest.raises(ValueError, match="do not divide into 3"):
        runs(8, 2, 0, granter_tp=3)
    (run,) = runs(8, 1, 0, 1)
    other = alone(8, layers=3, block_size=2, head_dim=4, item_bytes=2)
    with pytest.raises(ValueError, match="differ"):
        region(run, layout(8), 0, other, 0)


@given(splits(), st.sampled_from([1, 2, 3, 4, 5, 8]))
def test_a_draft_group_comes_once_beside_the_target(
    split: tuple[int, int, int], draft_heads: int
) -> None:
    kv_heads, reader_tp, granter_tp = split
    for rank in range(reader_tp):
        mine = heads_of(kv_heads, reader_tp, rank), draft_heads_of(draft_heads, reader_tp, rank)
        reader = with_draft(len(mine[0]), len(mine[1]))
        covered = np.zeros(reader.block_bytes, dtype=int)
        for group, (of, found) in enumerate(((heads_of, runs), (draft_heads_of, draft_runs))):
            heads = (kv_heads, draft_heads)[group]
            for run in found(heads, reader_tp, rank, granter_tp):
                theirs = of(heads, granter_tp, run.granter_rank)
                moved = mine[group][run.reader_slab : run.reader_slab + run.slabs]
                assert list(moved) == list(theirs[run.granter_slab :][: run.slabs])
                granter = with_draft(
                    len(heads_of(kv_heads, granter_tp, run.granter_rank)),
                    len(draft_heads_of(draft_heads, granter_tp, run.granter_rank)),
                )
                part = region(run, granter, 2, reader, 0, group)
                assert granter.offset(2, 0, group) <= part.granter_offset
                assert part.granter_offset + part.length <= granter.offset(3)
                covered[part.reader_offset : part.reader_offset + part.length] += 1
        assert (covered == 1).all()


def test_draft_heads_that_do_not_divide_are_on_every_rank() -> None:
    assert [draft_heads_of(3, 2, rank) for rank in (0, 1)] == [range(3), range(3)]
    assert [draft_heads_of(2, 4, rank) for rank in range(4)] == [range(2)] * 4
    assert [draft_heads_of(4, 2, rank) for rank in (0, 1)] == [range(2), range(2, 4)]
    takers = [draft_runs(3, reader_tp=4, reader_rank=r, granter_tp=2)[0] for r in range(4)]
    assert [run.granter_rank for run in takers] == [0, 1, 0, 1]  # readers take turns
