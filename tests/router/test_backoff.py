"""Waits between attempts grow, have a longest, and differ between those that wait."""

from __future__ import annotations

import random

from baton.router.fleet.dialer import Backoff


def test_waits_double_up_to_the_longest_and_start_over() -> None:
    backoff = Backoff(0.05, 1.0, random.Random(3))
    for full_s in (0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert full_s / 2 <= backoff.next_s() <= full_s
    backoff.reset()
    assert backoff.next_s() <= 0.05


def test_simultaneous_retries_spread() -> None:
    waits = []
    for seed in range(200):
        backoff = Backoff(0.05, 1.0, random.Random(seed))
        waits.append(sum(backoff.next_s() for _ in range(6)))
    in_tenths = {int(wait_s * 10) for wait_s in waits}
    assert len(in_tenths) > 6 and max(waits) - min(waits) > 0.5


def test_the_same_seed_gives_the_same_waits() -> None:
    one, other = (Backoff(0.05, 1.0, random.Random(b"boot")) for _ in range(2))
    assert [one.next_s() for _ in range(9)] == [other.next_s() for _ in range(9)]
