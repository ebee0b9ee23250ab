"""Sums of blocks: the kernel is its reference, and no wrong block keeps its sum."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv_transfer.checksum import SlabGroup, block_seed, partial_tag, reference
from baton.kv_transfer.checksum_numba import checksums, warm_up

SLABS = 4
WIDTH = 4 * 8 * 6  # bytes of a block


def some_pool(seed: int = 0, blocks: int = 8, width: int = WIDTH) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (blocks, width), dtype=np.uint8)


def one(pool: np.ndarray, block: int = 0, seed: int = 5) -> list[int]:
    return [int(value) for value in checksums(pool, [block], [seed], SLABS)[0]]


@settings(max_examples=50)
@given(
    st.integers(0, 2**32),
    st.integers(1, 5),
    st.integers(1, 40),
    st.lists(st.integers(0, 7), max_size=6),
    st.integers(0, 2**64 - 1),
)
def test_the_kernel_agrees_with_the_definition(
    seed: int, slabs: int, words: int, blocks: list[int], key: int
) -> None:
    pool = some_pool(seed, width=slabs * words * 8)
    seeds = [(key + i) % 2**64 for i in range(len(blocks))]
    assert np.array_equal(
        checksums(pool, blocks, seeds, slabs), reference(pool, blocks, seeds, slabs)
    )


def test_the_definition_stands_still() -> None:
    """A changed algorithm needs another name, or two versions would disagree at run time."""
    pool = np.arange(64, dtype=np.uint8).reshape(1, 64)
    assert [int(v) for v in reference(pool, [0], [1], 2)[0]] == GOLDEN


GOLDEN = [2478473541828733431, 7124955132999822752]


def test_every_flipped_bit_changes_exactly_its_slabs_sum() -> None:
    pool = some_pool()
    before = one(pool)
    for bit in range(WIDTH * 8):
        pool[0, bit // 8] ^= 1 << (bit % 8)
        after = one(pool)
        slab = bit // 8 // (WIDTH // SLABS)
        assert [i for i in range(SLABS) if before[i] != after[i]] == [slab], bit
        pool[0, bit // 8] ^= 1 << (bit % 8)


def test_every_flipped_bit_of_zeros_and_ones_is_seen_too() -> None:
    for fill in (0, 255):
        pool = np.full((1, WIDTH), fill, dtype=np.uint8)
        before = one(pool)
        for bit in range(WIDTH * 8):
            pool[0, bit // 8] ^= 1 << (bit % 8)
            assert one(pool) != before
            pool[0, bit // 8] ^= 1 << (bit % 8)


@given(st.integers(0, 23), st.integers(0, 23))
def test_swapped_words_change_the_sum(first: int, second: int) -> None:
    pool = some_pool()
    before = one(pool)
    words = pool.view(np.uint64)
    swapped = words[0, first] != words[0, second]
    words[0, [first, second]] = words[0, [second, first]]
    assert (one(pool) != before) == swapped


def test_swapped_slabs_change_both_sums() -> None:
    pool = some_pool()
    before = one(pool)
    slabs = pool[0].reshape(SLABS, -1)
    slabs[[0, 2]] = slabs[[2, 0]]
    after = one(pool)
    assert [i for i in range(SLABS) if before[i] != after[i]] == [0, 2]


def test_the_right_bytes_of_a_wrong_block_do_not_pass() -> None:
    pool = some_pool()
    pool[1] = pool[0]
    seeds = [block_seed(b"boot", block, b"identity") for block in (0, 1)]
    here, there = checksums(pool, [0, 1], seeds, SLABS)
    assert not (here == there).any()


def test_seeds_differ_in_every_part() -> None:
    seeds = {
        block_seed(b"boot", 1, b"tag"),
        block_seed(b"boo", 1, b"ttag"),  # the border between parts counts
        block_seed(b"boot", 2, b"tag"),
        block_seed(b"boot", 1, b"tag2"),
        block_seed(b"boot", 1, partial_tag(b"h" * 16, 3)),
        block_seed(b"boot", 1, partial_tag(b"h" * 16, 4)),
        block_seed(b"boot", 1, partial_tag(b"i" * 16, 3)),
    }
    assert len(seeds) == 7 and all(0 <= seed < 2**64 for seed in seeds)


def test_a_torn_block_is_seen() -> None:
    """The first half new, the second old: what a READ during a write would bring."""
    new, old = some_pool(1), some_pool(2)
    torn = new.copy()
    torn[0, WIDTH // 2 :] = old[0, WIDTH // 2 :]
    assert one(torn) != one(new) and one(torn) != one(old)


def test_sums_look_random_even_of_zeros() -> None:
    pool = np.zeros((64, WIDTH), dtype=np.uint8)
    sums = checksums(pool, list(range(64)), list(range(64)), SLABS)[:, 0]
    bits = (sums[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert len(set(sums.tolist())) == 64 and 0.45 < bits.mean() < 0.55


def test_what_is_no_block_or_no_slab_is_refused() -> None:
    pool = some_pool()
    for block in (-1, 8):
        with pytest.raises(IndexError):
            checksums(pool, [block], [0], SLABS)
    with pytest.raises(ValueError, match="8-byte words"):
        checksums(pool, [0], [0], 5)
    assert checksums(pool, [], [], SLABS).shape == (0, SLABS)
    warm_up()


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 9), st.integers(1, 3))
def test_a_draft_group_has_sums_of_its_own(seed: int, slabs: int, words: int, heads: int) -> None:
    own, draft = slabs * words * 8, SlabGroup(heads, 8 * (words + 3))
    pool = some_pool(seed, width=own + heads * draft.slab_bytes)
    blocks, seeds = [3, 0, 7], [5, 6, 7]
    sums = checksums(pool, blocks, seeds, slabs, draft)
    assert sums.shape == (3, slabs + heads)
    assert np.array_equal(sums, reference(pool, blocks, seeds, slabs, draft))
    target = np.ascontiguousarray(pool[:, :own])
    assert np.array_equal(sums[:, :slabs], checksums(target, blocks, seeds, slabs))
    beside = np.ascontiguousarray(pool[:, own:])
    assert np.array_equal(sums[:, slabs:], checksums(beside, blocks, seeds, heads))


@pytest.mark.parametrize(
    ("slabs", "draft"),
    [(4, SlabGroup(1, 12)), (4, SlabGroup(0, 8)), (5, SlabGroup(1, 8)), (1, SlabGroup(3, 64))],
)
def test_groups_that_do_not_fill_a_block_are_refused(slabs: int, draft: SlabGroup) -> None:
    with pytest.raises(ValueError, match=f"{slabs} slabs of 8-byte words and {draft.slabs} of"):
        checksums(some_pool(), [0], [0], slabs, draft)


@pytest.mark.parametrize("home", ["/dev/null/none", ""])
def test_checksums_are_compiled_where_no_folder_can_be_written(home: str, tmp_path: Path) -> None:
    """Without HOME, the user is one that the system does not know. Nothing is written into the
    working folder, nor read from it."""
    code = """if True:
        import os, pwd
        def unknown(user): raise KeyError(user)
        pwd.getpwuid = unknown
        from baton.kv_transfer.checksum_numba import warm_up
        warm_up()
        """
    # else numba writes beside the module, where this test's user may write
    kept = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserWideCacheLocator"}
    left = {"HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"}
    environment = {key: value for key, value in os.environ.items() if key not in left} | kept
    if home:
        environment["HOME"] = home
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
