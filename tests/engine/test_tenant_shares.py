"""Whose cached block goes first, by the books of tenants alone."""

from __future__ import annotations

import pytest

from baton.engine.scheduling.tenant_shares import TenantShares


def holding(shares: TenantShares, tenant: bytes, blocks: range, *, cached: bool = True) -> None:
    for block in blocks:
        shares.identified(block, tenant)
        if cached:
            shares.cached(block)


def test_within_their_shares_no_tenant_is_preferred() -> None:
    shares = TenantShares(2)
    assert shares.victim() is None
    holding(shares, b"a", range(2))
    holding(shares, b"b", range(2, 4))
    assert shares.victim() is None
    shares.check(set(range(4)), set(range(4)))


def test_the_oldest_of_the_tenant_most_above_its_share_goes() -> None:
    shares = TenantShares(2)
    holding(shares, b"a", range(3))
    holding(shares, b"b", range(3, 8))
    assert shares.victim() == 3
    for block in (3, 4, 5):
        shares.forgotten(block)
    assert shares.victim() == 0  # b has two left
    shares.forgotten(0)
    assert shares.victim() is None
    shares.check({1, 2, 6, 7}, {1, 2, 6, 7})


def test_a_block_that_is_held_counts_and_does_not_go() -> None:
    shares = TenantShares(2)
    holding(shares, b"a", range(4), cached=False)
    assert shares.victim() is None
    shares.cached(2)
    shares.cached(1)
    assert shares.victim() == 2
    shares.taken(2)
    assert shares.victim() == 1
    shares.cached(2)  # it is the youngest now
    assert shares.victim() == 1
    shares.check(set(range(4)), {1, 2})


def test_a_block_without_identity_belongs_to_no_tenant() -> None:
    shares = TenantShares(0)
    shares.taken(7)
    assert shares.victim() is None
    shares.check(set(), set())


@pytest.mark.parametrize(
    ("identified", "cached"), [({0}, {0, 1}), ({0, 1}, {0}), ({0, 1, 2}, {0, 1})]
)
def test_accounts_that_differ_from_the_pools_are_reported(
    identified: set[int], cached: set[int]
) -> None:
    shares = TenantShares(2)
    holding(shares, b"a", range(2))
    with pytest.raises(RuntimeError, match="differ from those of the pool"):
        shares.check(identified, cached)


def test_a_wrong_count_is_reported() -> None:
    shares = TenantShares(3)  # above which it is by neither count
    holding(shares, b"a", range(2))
    shares.identified(1, b"a")  # again, which no pool does: it is counted twice
    with pytest.raises(RuntimeError, match="tenants hold"):
        shares.check({0, 1}, {0, 1})
