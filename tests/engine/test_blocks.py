"""The block pool: a model-based test drives it at random against a plain oracle."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from baton.engine.scheduling.blocks import BlockPool, Hold
from baton.runtime.errors import OutOfBlocks
from baton.runtime.identity import chain, root
from tests.support.pool_books import PoolBooks, books_of

SIZE = 4
ROOT = root(b"key", "model", "float32")


def identities(tokens: list[int]) -> list[bytes]:
    return chain(b"key", ROOT, tokens, SIZE)


def fill(pool: BlockPool, tokens: list[int], tenant: bytes = b"") -> list[int]:
    """Compute a sequence's full blocks and publish them."""
    names = identities(tokens)
    blocks = pool.match(names, tokens, Hold.USED, limit=len(names))
    try:
        fresh = pool.allocate(len(names) - len(blocks), Hold.USED)
    except OutOfBlocks:
        pool.release(blocks, Hold.USED)
        raise
    for index, block in enumerate(fresh, start=len(blocks)):
        pool.identify(block, names[index], tokens[index * SIZE : (index + 1) * SIZE], tenant)
    return blocks + fresh


def test_a_block_is_asked_for_each_of_its_holds() -> None:
    pool = BlockPool(2, SIZE)
    (block,) = pool.allocate(1, Hold.USED)
    pool.hold([block], Hold.PINNED)
    held = [hold for hold in Hold if pool.is_held(block, hold)]
    assert held == [Hold.USED, Hold.PINNED]
    assert pool.counts().pinned == 1 and pool.counts().used == 0  # the largest counts
    pool.release([block], Hold.PINNED)
    assert not pool.is_held(block, Hold.PINNED) and pool.counts().used == 1


def test_allocation_takes_from_free_then_from_the_oldest_cached() -> None:
    pool = BlockPool(4, SIZE)
    first = fill(pool, [1] * 8)
    second = fill(pool, [2] * 8)
    pool.release(first, Hold.USED)
    pool.release(second, Hold.USED)
    assert pool.counts().cached == 4
    taken = pool.allocate(2, Hold.USED)
    assert sorted(taken) == sorted(first)  # the least recently used prefix went
    assert pool.held_prefix(identities([2] * 8)) == 2
    pool.check()


def test_eviction_shortens_a_prefix_from_its_tail() -> None:
    pool = BlockPool(3, SIZE)
    tokens = list(range(12))
    pool.release(fill(pool, tokens), Hold.USED)
    pool.allocate(1, Hold.USED)
    assert pool.held_prefix(identities(tokens)) == 2


def test_too_large_an_allocation_changes_nothing() -> None:
    pool = BlockPool(3, SIZE)
    pool.release(fill(pool, list(range(8))), Hold.USED)
    before = pool.counts()
    with pytest.raises(OutOfBlocks, match="4 blocks requested, 3 available"):
        pool.allocate(4, Hold.USED)
    assert pool.counts() == before


def test_a_match_compares_tokens_so_that_a_collision_is_a_miss() -> None:
    pool = BlockPool(2, SIZE)
    tokens = [1, 2, 3, 4]
    fill(pool, tokens)
    names = identities(tokens)
    assert pool.match(names, [1, 2, 3, 5], Hold.USED, limit=1) == []
    assert len(pool.match(names, tokens, Hold.USED, limit=1)) == 1


def test_the_limit_keeps_the_last_token_to_be_computed() -> None:
    pool = BlockPool(4, SIZE)
    tokens = list(range(8))
    fill(pool, tokens)
    assert len(pool.match(identities(tokens), tokens, Hold.USED, limit=1)) == 1


def test_a_second_block_of_the_same_identity_stays_unpublished() -> None:
    pool = BlockPool(2, SIZE)
    tokens = [7] * 4
    one = fill(pool, tokens)
    two = pool.allocate(1, Hold.USED)
    pool.identify(two[0], identities(tokens)[0], tokens)
    assert pool.identity_of(two[0]) is None
    pool.release(two, Hold.USED)
    pool.release(one, Hold.USED)
    counts = pool.counts()
    assert (counts.free, counts.cached) == (1, 1)
    pool.check()


def test_pins_are_counted_so_readers_share_a_prefix() -> None:
    pool = BlockPool(2, SIZE)
    blocks = fill(pool, list(range(8)))
    pool.hold(blocks, Hold.PINNED)
    pool.hold(blocks, Hold.PINNED)
    pool.release(blocks, Hold.USED)
    pool.release(blocks, Hold.PINNED)
    assert pool.available == 0
    assert pool.counts().pinned == 2
    pool.release(blocks, Hold.PINNED)
    assert pool.available == 2


def test_quarantined_blocks_are_not_given_away() -> None:
    pool = BlockPool(2, SIZE)
    blocks = pool.allocate(2, Hold.LEASED)
    pool.convert(blocks[:1], Hold.LEASED, Hold.QUARANTINED)
    pool.release(blocks[1:], Hold.LEASED)
    counts = pool.counts()
    assert (counts.quarantined, counts.free) == (1, 1)
    with pytest.raises(OutOfBlocks):
        pool.allocate(2, Hold.USED)
    pool.release(blocks[:1], Hold.QUARANTINED)
    assert pool.available == 2


def test_a_release_too_many_is_an_error() -> None:
    pool = BlockPool(1, SIZE)
    blocks = pool.allocate(1, Hold.USED)
    pool.release(blocks, Hold.USED)
    with pytest.raises(RuntimeError, match="no hold USED"):
        pool.release(blocks, Hold.USED)


def test_only_an_unshared_unpublished_block_is_writable() -> None:
    pool = BlockPool(2, SIZE)
    blocks = pool.allocate(2, Hold.USED)
    assert pool.writable(blocks[0])
    pool.hold(blocks[:1], Hold.PINNED)
    assert not pool.writable(blocks[0])
    pool.identify(blocks[1], identities([1] * 4)[0], [1] * 4)
    assert not pool.writable(blocks[1])


def test_events_tell_the_last_change_of_each_identity() -> None:
    pool = BlockPool(1, SIZE)
    first, second = identities([1] * 4)[0], identities([2] * 4)[0]
    pool.release(fill(pool, [1] * 4), Hold.USED)
    assert pool.drain_events() == ([first], [])
    pool.release(fill(pool, [2] * 4), Hold.USED)
    assert pool.drain_events() == ([second], [first])
    pool.release(fill(pool, [1] * 4), Hold.USED)
    pool.release(fill(pool, [2] * 4), Hold.USED)
    stored, removed = pool.drain_events()
    assert stored == [second] and removed == [first]
    assert pool.drain_events() == ([], [])


@pytest.mark.parametrize("seed", range(20))
def test_random_use_keeps_the_books_balanced(seed: int) -> None:
    """With and without shares of tenants; whose a prefix is, its first token says."""
    rng = random.Random(seed)
    pool = BlockPool(24, SIZE, tenant_share=rng.choice([1.0, 0.1, 0.5]))
    held: list[tuple[list[int], Hold]] = []
    mirror: set[bytes] = set()  # what a listener to the events believes
    for _ in range(400):
        act = rng.random()
        if act < 0.5:
            tokens = [rng.randrange(2) for _ in range(SIZE * rng.randrange(1, 5))]
            try:
                held.append((fill(pool, tokens, bytes(tokens[:1])), Hold.USED))
            except OutOfBlocks:
                for blocks, hold in held:
                    pool.release(blocks, hold)
                held.clear()
        elif act < 0.6 and pool.available >= 2:
            held.append((pool.allocate(2, Hold.LEASED), Hold.LEASED))
        elif act < 0.65 and held:
            pool.unpublish(held[0][0])
        elif held:
            blocks, hold = held.pop(rng.randrange(len(held)))
            if rng.random() < 0.3:
                pool.convert(blocks, hold, Hold.PINNED)
                held.append((blocks, Hold.PINNED))
            else:
                pool.release(blocks, hold)
        pool.check()
        stored, removed = pool.drain_events()
        mirror.difference_update(removed)
        mirror.update(stored)
        assert mirror == set(pool.identities())
        counts = pool.counts()
        assert counts.total == sum(
            (counts.free, counts.cached, counts.used, counts.leased, counts.pinned)
        )
    for blocks, hold in held:
        pool.release(blocks, hold)
    assert pool.available == pool.total


def cached(pool: BlockPool, tokens: list[int], tenant: bytes) -> None:
    pool.release(fill(pool, tokens, tenant), Hold.USED)


def test_a_tenant_above_its_share_loses_its_own_prefixes_first() -> None:
    pool = BlockPool(8, SIZE, tenant_share=0.5)
    cached(pool, [1] * 8, b"small")  # the oldest of all
    for token in range(2, 8):
        cached(pool, [token] * 8, b"flood")
        pool.check()
    assert pool.held_prefix(identities([1] * 8)) == 2
    assert pool.held_prefix(identities([7] * 8)) == 2  # and the flood has the rest, newest first
    assert sum(pool.held_prefix(identities([token] * 8)) for token in range(2, 8)) == 6


def test_without_shares_a_flood_evicts_all_tenants() -> None:
    pool = BlockPool(8, SIZE)
    cached(pool, [1] * 8, b"small")
    for token in range(2, 8):
        cached(pool, [token] * 8, b"flood")
    assert pool.held_prefix(identities([1] * 8)) == 0


def test_a_tenant_alone_has_the_whole_pool() -> None:
    pool = BlockPool(8, SIZE, tenant_share=0.25)
    for token in range(4):
        cached(pool, [token] * 8, b"one")
    assert pool.counts().cached == 8
    taken = pool.allocate(8, Hold.USED)  # and its share keeps no block from anybody
    assert len(taken) == 8
    pool.check()


def test_what_runs_counts_for_its_tenant_too() -> None:
    """Its cached prefixes go before another's, however few of them there are."""
    pool = BlockPool(8, SIZE, tenant_share=0.5)
    cached(pool, [1] * 8, b"small")
    running = fill(pool, [2] * 16, b"large")
    cached(pool, [3] * 8, b"large")
    pool.allocate(2, Hold.USED)
    assert pool.held_prefix(identities([1] * 8)) == 2
    assert pool.held_prefix(identities([3] * 8)) == 0
    pool.allocate(2, Hold.USED)  # it has none left: now the oldest of all goes
    assert pool.held_prefix(identities([1] * 8)) == 0
    pool.release(running, Hold.USED)
    pool.check()


@pytest.mark.parametrize(
    ("cook", "says"),
    [
        (lambda its, held, cached: setattr(its.blocks[held], "hold", -1), "held, cached, free"),
        (lambda its, held, cached: setattr(its.blocks[held], "hold", 1), "the largest 1"),
        (lambda its, held, cached: its.blocks[held].holds.__setitem__(0, 0), "has holds"),
        (lambda its, held, cached: its.blocks[7].holds.__setitem__(2, -1), "has holds"),
        (lambda its, held, cached: its.blocks[7].holds.__setitem__(2, 1), "has holds"),
        (lambda its, held, cached: setattr(its.blocks[7], "identity", b"x" * 16), "is free"),
        (lambda its, held, cached: setattr(its.blocks[cached], "identity", None), "is cached"),
        (lambda its, held, cached: its.free.append(its.free[0]), "twice in the free list"),
        (lambda its, held, cached: its.by_hold.__setitem__(0, 5), "by hold"),
        (lambda its, held, cached: its.free.remove(7), "held, cached, free"),
    ],
)
def test_books_that_do_not_balance_are_found(
    cook: Callable[[PoolBooks, int, int], None], says: str
) -> None:
    pool = BlockPool(8, SIZE)
    cached(pool, [1] * SIZE, b"")
    books = books_of(pool)
    (kept,) = books.evictable
    (held,) = pool.allocate(1, Hold.USED)
    assert 7 not in (kept, held)
    pool.check()
    cook(books, held, kept)
    with pytest.raises(RuntimeError, match=says):
        pool.check()
