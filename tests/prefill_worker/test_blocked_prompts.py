"""A prompt that waits for blocks matches cached ones and reads others; it frees all at its end. A
quarantine blocks no prompt for as long as it lasts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.engine.scheduling.blocks import BlockPool, Hold
from baton.prefill_worker.prompts import Prompt
from baton.proto import worker_pb2
from baton.runtime.errors import Overloaded
from tests.support.prefill_bench import PrefillBench, events

REFUSED = ['Overloaded("too much of the worker\'s pool is in quarantine")']


class CountedPool:
    """Counts how many blocks a pool compares with a prompt's tokens."""

    def __init__(self, pool: BlockPool) -> None:
        self.compared = 0
        self._match = pool.match
        pool.match = self.match

    def match(
        self,
        identities: Sequence[bytes],
        tokens: Sequence[int],
        hold: Hold,
        limit: int,
        first: int = 0,
    ) -> list[int]:
        found = self._match(identities, tokens, hold, limit, first)
        self.compared += len(found)
        return found


def blocked_prompt(bench: PrefillBench) -> tuple[Prompt, Prompt]:
    """One that keeps its blocks pinned, and one that waits for them, half of it cached."""
    cached, other = list(range(33)), list(range(100, 140))
    first = bench.submit(cached)
    while bench.step():
        pass
    first.end()
    keeps = bench.submit(other)
    while bench.step():
        pass
    return keeps, bench.submit(cached + list(range(200, 232)))


def test_a_blocked_prompt_is_matched_once_over_all_tries() -> None:
    bench = PrefillBench(blocks=20)
    keeps, waits = blocked_prompt(bench)
    counted = CountedPool(bench.pool)
    for _ in range(10):
        assert bench.scheduler.admit() == []
    assert counted.compared == len(waits.blocks) == 8
    keeps.end()
    assert bench.scheduler.admit() == [waits] and waits.cached == 8
    assert counted.compared == 8


def test_blocked_prompt_matches_what_is_published_while_it_waits() -> None:
    bench = PrefillBench(blocks=20)
    first = bench.submit(list(range(49)))
    waits = bench.submit(list(range(64)))
    bench.scheduler.admit()
    before = len(waits.blocks)
    bench.step()
    bench.scheduler.admit()
    assert len(waits.blocks) > before
    while bench.step():
        pass
    first.end()
    assert waits.cached > before and len(waits.blocks) == 0  # computed, and all pinned by now


@pytest.mark.parametrize("how", ["ended", "stopped"])
def test_blocked_prompt_frees_what_it_matched_when_it_is_over(how: str) -> None:
    bench = PrefillBench(blocks=20)
    keeps, waits = blocked_prompt(bench)
    bench.scheduler.admit()
    if how == "stopped":
        bench.scheduler.stop(Overloaded("over"))
    waits.end()
    keeps.end()
    bench.pool.check()
    assert bench.pool.available == bench.pool.total


@pytest.mark.parametrize("fails", [False, True])
def test_a_source_that_fails_while_a_prompt_waits_is_not_read(fails: bool) -> None:
    bench = PrefillBench(blocks=4)
    first, second = bench.submit([1] * 16), bench.submit([2] * 12)
    worker = worker_pb2.Candidate(worker_id="decode-0", boot_id=b"d" * 16)
    second.source = worker_pb2.Source(worker=worker, blocks=2)
    assert bench.scheduler.admit() == [first]
    if fails:
        bench.failed.add(worker.boot_id)
    first.end()
    assert bench.scheduler.admit() == [second]
    assert second.reading_to == (0 if fails else 2)
    assert bench.scheduler.reading == (0 if fails else 1)


@pytest.mark.parametrize(("tokens", "converted_each"), [(52, 0), (20, 2)])
def test_a_prompt_too_large_beside_a_quarantine_is_refused(
    tokens: int, converted_each: int
) -> None:
    bench = PrefillBench(blocks=20)
    cached = bench.submit([1] * 9)
    bench.run()
    cached.end()
    quarantined = bench.pool.allocate(8, Hold.QUARANTINED)
    large = bench.submit([1] * tokens, converted_each=converted_each)
    small = bench.submit([2] * 12)
    assert bench.scheduler.admit() == [small]
    assert events(large) == REFUSED and bench.scheduler.waiting == 0
    large.end(), small.end()
    bench.pool.release(quarantined, Hold.QUARANTINED)
    bench.pool.check()
    assert bench.pool.available == bench.pool.total


def test_a_prompt_that_fits_beside_a_quarantine_waits_its_turn() -> None:
    bench = PrefillBench(blocks=20)
    bench.pool.allocate(8, Hold.QUARANTINED)
    first, large, small = (bench.submit([n] * tokens) for n, tokens in ((1, 4), (2, 48), (3, 4)))
    assert bench.scheduler.admit() == [first]
    assert events(large) == events(small) == [] and bench.scheduler.waiting == 2
    first.end()
    assert bench.scheduler.admit() == [large]


def test_prompt_whose_read_was_lost_takes_matches_of_the_next() -> None:
    bench = PrefillBench(blocks=20)
    cached = list(range(33))
    before = bench.submit(cached)
    bench.run()
    before.end()
    reads = bench.submit(list(range(100, 148)))
    worker = worker_pb2.Candidate(worker_id="decode-0", boot_id=b"d" * 16)
    reads.source = worker_pb2.Source(worker=worker, blocks=8)
    waits = bench.submit([*cached, *range(200, 232)])
    assert bench.scheduler.admit() == [reads] and len(waits.blocks) == 8
    quarantined = reads.blocks[:2]
    bench.scheduler.quarantine(reads, quarantined)
    bench.scheduler.read_ended(reads, 0)
    assert bench.scheduler.admit() == [reads]
    reads.end()
    assert bench.scheduler.admit() == [waits] and waits.cached > 0
