"""What a process starts with is set apart: it costs no search, and what comes after is found."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from baton.runtime.garbage import set_apart


class Ring:
    """Holds itself, as calls and connections do."""

    def __init__(self) -> None:
        self.ring = self


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    gc.collect()


def test_what_lives_is_looked_through_no_more() -> None:
    ring = Ring()
    watched = weakref.ref(ring)
    set_apart()
    assert gc.get_freeze_count() > 1000
    del ring
    gc.collect()
    assert watched() is not None
    set_apart()  # the next role of the process
    assert watched() is None


def test_what_comes_later_is_found_without_a_word() -> None:
    """Rings that lived through two collections lie where Python looks only at times: in a process
    of so many objects it would need a quarter of them."""
    start = [[number] for number in range(4 * 20_000)]
    set_apart()
    assert gc.get_freeze_count() > len(start)
    left: list[weakref.ref[Ring]] = []
    for _ in range(20):
        rings = [Ring() for _ in range(1000)]
        gc.collect(0)
        gc.collect(1)
        left += [weakref.ref(ring) for ring in rings]
        del rings
        junk = [[number] for number in range(120_000)]
        del junk
    assert sum(ref() is not None for ref in left) < 15_000


def test_a_whole_search_comes_after_some_20_000_objects() -> None:
    set_apart()
    before = gc.get_stats()[2]["collections"]
    kept = [[number] for number in range(30_000)]
    assert len(kept) == 30_000
    assert gc.get_stats()[2]["collections"] > before
