"""Which text is next: short ones first, none waits for ever, and tenants alternate."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from baton.router.text.encode_queue import CHARS_PER_SECOND, LONG_TEXT_CHARS, EncodeJob, EncodeQueue
from baton.runtime.errors import Overloaded


def job(chars: int = 100, arrival_s: float = 0.0, tenant: bytes = b"a") -> EncodeJob:
    return EncodeJob(chars, arrival_s, list, cast(asyncio.Future[list[int]], None), tenant)


def order(queue: EncodeQueue, jobs: list[EncodeJob]) -> list[int]:
    """The places of `jobs` in the order in which one thread after the other takes them."""
    taken = []
    while (found := queue.next()) is not None:
        taken.append(jobs.index(found))
        queue.ended(found)
    return taken


def filled(queue: EncodeQueue, *jobs: EncodeJob) -> list[EncodeJob]:
    for one in jobs:
        assert queue.put(one) is None
    return [*jobs]


def test_short_text_passes_long_one() -> None:
    queue = EncodeQueue(10, 1)
    assert order(queue, filled(queue, job(8 << 20), job(5000), job(100))) == [2, 1, 0]


def test_long_text_is_passed_until_its_age_counts() -> None:
    queue = EncodeQueue(10, 1)
    jobs = filled(queue, job(4 * CHARS_PER_SECOND), job(100, 3.9), job(100, 4.1))
    assert order(queue, jobs) == [1, 0, 2]


def test_tenants_alternate_however_many_texts_one_has() -> None:
    queue = EncodeQueue(20, 1)
    jobs = filled(queue, *(job() for _ in range(4)), job(tenant=b"b"), job(tenant=b"c"))
    assert order(queue, jobs) == [0, 4, 5, 1, 2, 3]


def test_turns_cost_a_tenant_the_characters_they_take() -> None:
    queue = EncodeQueue(20, 1)
    jobs = filled(queue, job(5000), job(5000), *(job(1000, tenant=b"b") for _ in range(6)))
    assert order(queue, jobs) == [2, 0, 3, 4, 5, 6, 7, 1]


def test_tenant_that_waits_for_nothing_saves_no_turns() -> None:
    queue = EncodeQueue(20, 1)
    filled(queue, *(job() for _ in range(8)))
    for _ in range(4):
        found = queue.next()
        assert found is not None
        queue.ended(found)
    late = filled(queue, *(job(tenant=b"b") for _ in range(3)))
    taken = []
    while (found := queue.next()) is not None:
        taken.append(found in late)
        queue.ended(found)
    assert taken == [True, False, True, False, True, False, False]


def test_one_thread_is_kept_from_long_texts() -> None:
    queue = EncodeQueue(10, 2)
    long, _, short = filled(
        queue, job(LONG_TEXT_CHARS + 1), job(LONG_TEXT_CHARS + 1), job(arrival_s=9.0)
    )
    assert [queue.next() for _ in range(3)] == [long, short, None]
    alone = EncodeQueue(10, 1)
    assert order(alone, filled(alone, job(LONG_TEXT_CHARS + 1), job(LONG_TEXT_CHARS + 1))) == [0, 1]


def test_two_long_texts_never_run_at_once() -> None:
    queue = EncodeQueue(10, 2)
    first, second = filled(queue, job(LONG_TEXT_CHARS + 1), job(LONG_TEXT_CHARS + 1, tenant=b"b"))
    assert queue.next() is first and queue.next() is None
    short = filled(queue, job(arrival_s=50.0))[0]
    assert queue.next() is short
    queue.ended(first)
    assert queue.next() is second


def test_a_full_queue_refuses_the_tenant_with_most_in_it() -> None:
    queue = EncodeQueue(4, 1)
    jobs = filled(queue, job(), job(9000), job(50), job())
    with pytest.raises(Overloaded):
        queue.put(job())
    assert queue.put(job(tenant=b"b")) is jobs[1]  # due last
    assert queue.put(job(tenant=b"b")) is jobs[3]
    with pytest.raises(Overloaded):
        queue.put(job(tenant=b"b"))  # as many as the other


def test_texts_with_a_thread_count() -> None:
    queue = EncodeQueue(2, 2)
    filled(queue, job(), job())
    first = queue.next()
    assert first is not None and queue.next() is not None
    with pytest.raises(Overloaded):
        queue.put(job(tenant=b"b"))
    queue.ended(first)
    filled(queue, job(tenant=b"b"))


def test_discarded_text_is_not_next_and_makes_room() -> None:
    queue = EncodeQueue(2, 1)
    first, second = filled(queue, job(), job())
    queue.discard(first)
    queue.discard(first)
    assert order(queue, [first, second, *filled(queue, job(tenant=b"b"))]) == [1, 2]
