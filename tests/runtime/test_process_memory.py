"""Allocated bytes are exact; start-up objects are frozen, and later cycles are still collected."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from baton.runtime import process_memory
from baton.runtime.process_memory import collect_periodically, freeze_startup_objects

MIB = 1 << 20
ALLOCATE_AND_FREE = """
import ctypes, gc, sys
from baton.runtime import process_memory

size, count = map(int, sys.argv[1:])
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
gc.disable()
before = process_memory.allocated_bytes()
taken = [ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size))) for _ in range(count)]
during = process_memory.allocated_bytes()
for pointer in taken:
    libc.free(pointer)
print(during - before, process_memory.allocated_bytes() - before)
"""


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
    gc.freeze()  # as pytest's process was before


def test_live_objects_are_not_collected_again() -> None:
    ring = Ring()
    watched = weakref.ref(ring)
    freeze_startup_objects()
    assert gc.get_freeze_count() > 1000
    del ring
    gc.collect()
    assert watched() is not None
    freeze_startup_objects()  # the next role of the process
    assert watched() is None


def test_later_cycles_are_collected() -> None:
    """Rings that lived through two collections lie where Python looks only at times: in a process
    of so many objects it would need a quarter of them."""
    start = [[number] for number in range(4 * 20_000)]
    freeze_startup_objects()
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


def test_full_collection_runs_after_20_000_objects() -> None:
    freeze_startup_objects()
    before = gc.get_stats()[2]["collections"]
    kept = [[number] for number in range(30_000)]
    assert len(kept) == 30_000
    assert gc.get_stats()[2]["collections"] > before


async def test_periodic_collection_frees_dead_tuples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_memory, "FULL_COLLECTION_S", 0.05)
    freeze_startup_objects()
    before = sys.getallocatedblocks()
    dead = [tuple(range(length)) for length in range(1, 20) for _ in range(1500)]
    del dead  # kept by Python, for new ones
    assert sys.getallocatedblocks() > before + 15_000
    looking = asyncio.create_task(collect_periodically())
    await asyncio.sleep(0)  # the first search is at once
    assert sys.getallocatedblocks() < before + 1000
    looking.cancel()


async def test_slow_collections_run_less_often(
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

    monkeypatch.setattr(process_memory.gc, "collect", search)
    monkeypatch.setattr(process_memory.asyncio, "sleep", wait)
    with pytest.raises(asyncio.CancelledError):
        await collect_periodically()
    monkeypatch.undo()
    assert len(searches) == 4
    assert waits[:2] == [process_memory.FULL_COLLECTION_S] * 2 and min(waits[2:]) >= 100


@pytest.mark.skipif(not process_memory.HEAP_IS_REPORTED, reason="needs glibc 2.33 or later")
@pytest.mark.parametrize("size", [1000, 64 * MIB])
def test_allocated_bytes_follow_malloc_and_free(own_process: Callable[..., str], size: int) -> None:
    """Small chunks come from the heap, a large one is a mapping of its own."""
    count = max(1, MIB // size)
    during, after = map(int, own_process(ALLOCATE_AND_FREE, size, count).split())
    assert during == pytest.approx(size * count, rel=0.1)
    assert abs(after) < MIB // 20


def test_allocated_bytes_are_0_without_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "HEAP_IS_REPORTED", False)
    assert process_memory.allocated_bytes() == 0
