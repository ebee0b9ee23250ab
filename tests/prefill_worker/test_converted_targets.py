"""Blocks of the prefill pool that converted KV is written to: reserved, offered and freed."""

from __future__ import annotations

import pytest

from baton.kv_transfer.granter import Computed
from baton.prefill_worker.prompts import Prompt
from baton.proto import worker_pb2
from baton.runtime.errors import InvalidRequest
from tests.support.prefill_bench import PrefillBench, events


def converted(prompt: Prompt) -> list[tuple[int, int, int]]:
    """The first index of each offer, its blocks, and the targets that it brings."""
    seen = []
    while not prompt.events.empty():
        event = prompt.events.get_nowait()
        if isinstance(event, Computed):
            seen.append((event.first, len(event.blocks), len(event.targets)))
    return seen


@pytest.mark.parametrize("each", [1, 2])
def test_targets_are_reserved_at_admission_and_come_with_offers(each: int) -> None:
    bench = PrefillBench()
    prompt = bench.submit(list(range(22)), held=1, converted_each=each)
    bench.scheduler.admit()
    assert bench.pool.counts().pinned == 5 * each  # of those that the reader lacks
    assert set(prompt.reserve) <= set(bench.fresh)
    bench.run()
    assert converted(prompt) == [(1, 1, each), (2, 2, 2 * each), (4, 1, each), (5, 1, each)]
    assert not prompt.reserve and len(set(prompt.targets)) == 5 * each
    prompt.end()
    assert bench.pool.counts().pinned == 5 * each  # the granter unpins them
    bench.pool.unpin(prompt.targets)
    assert bench.pool.available == bench.pool.total
    bench.pool.check()


def test_a_prompt_waits_for_its_targets_too() -> None:
    bench = PrefillBench(blocks=15)
    first = bench.submit([1] * 20, converted_each=1)
    second = bench.submit([2] * 20, converted_each=1)
    bench.run()
    assert bench.scheduler.waiting == 1 and not second.reserve
    first.end()
    bench.pool.unpin(first.targets)
    bench.run()
    assert events(second)[-1] == "None"


def test_a_prompt_whose_targets_never_fit_is_refused() -> None:
    bench = PrefillBench(blocks=9)
    said = "needs 5 KV blocks, 5 more for a reader of another KV dtype, and the prefill pool has 9"
    with pytest.raises(InvalidRequest, match=said):
        bench.submit([1] * 20, converted_each=1)
    bench.submit([1] * 20, held=1, converted_each=1)


@pytest.mark.parametrize("steps", [0, 1])
def test_the_end_frees_targets_that_were_not_offered(steps: int) -> None:
    bench = PrefillBench()
    prompt = bench.submit(list(range(22)), converted_each=2)
    bench.scheduler.admit()
    for _ in range(steps):
        bench.step()
    prompt.end()
    assert bench.pool.counts().pinned == len(prompt.targets) == 4 * steps
    bench.pool.unpin(prompt.targets)
    assert bench.pool.available == bench.pool.total


def test_prompt_that_keeps_targets_may_not_fit_a_quarantine() -> None:
    bench = PrefillBench(blocks=20)
    cached = bench.submit([1] * 9)
    bench.run()
    cached.end()
    worker = worker_pb2.Candidate(worker_id="decode-0", boot_id=b"d" * 16)
    source = worker_pb2.Source(worker=worker, blocks=6)
    prompt = bench.submit([1] * 40, converted_each=1, source=source)
    behind = bench.submit([2] * 4)
    assert bench.scheduler.admit() == [prompt] and len(prompt.targets) == 2
    bench.scheduler.quarantine(prompt, prompt.blocks[2:4])
    bench.scheduler.read_ended(prompt, 0)
    assert bench.scheduler.admit() == [behind]
    assert events(prompt)[-1].startswith("Overloaded")
    prompt.end(), behind.end()
    bench.pool.unpin(prompt.targets)
    bench.pool.check()
    assert bench.pool.available == 18
