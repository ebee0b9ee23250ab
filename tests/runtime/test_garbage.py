"""What a process starts with is set apart: it costs no search, and what comes after is found."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import weakref
from collections.abc import Iterator

import pytest

from baton.runtime import garbage
from baton.runtime.garbage import look_often, set_apart


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


async def test_dead_tuples_are_given_back_though_nothing_else_is_to_be_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(garbage, "LOOK_S", 0.05)
    set_apart()
    before = sys.getallocatedblocks()
    dead = [tuple(range(length)) for length in range(1, 20) for _ in range(1500)]
    del dead  # kept by Python, for new ones
    assert sys.getallocatedblocks() > before + 15_000
    looking = asyncio.create_task(look_often())
    await asyncio.sleep(0)  # the first search is at once
    assert sys.getallocatedblocks() < before + 1000
    looking.cancel()


async def test_searches_come_again_and_more_rarely_where_they_take_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searches: list[float] = []
    waits: list[float] = []

    def search() -> None:
        searches.append(time.perf_counter())
        while len(searches) > 2 and time.perf_counter() < searches[-1] + 0.1:
            pass

    async def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 4:
            raise asyncio.CancelledError

    monkeypatch.setattr(garbage.gc, "collect", search)
    monkeypatch.setattr(garbage.asyncio, "sleep", wait)
    with pytest.raises(asyncio.CancelledError):
        await look_often()
    monkeypatch.undo()
    assert len(searches) == 4
    assert waits[:2] == [garbage.LOOK_S] * 2 and min(waits[2:]) >= 100
