"""The line of requests that wait for a worker: which is tried, when, and what the wait costs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Protocol, cast

import pytest

from baton.router.dispatch.attempt import Attempt
from baton.router.dispatch.placement_queue import (
    AT_ONCE,
    RETRY_S,
    STOPPING,
    TOKENS_AT_ONCE,
    PlacementQueue,
)
from baton.router.dispatch.submitter import Submitter
from baton.router.fleet.unplaced_requests import UnplacedRequests
from baton.router.fleet.worker_link import WorkerLink
from baton.runtime.errors import (
    BatonError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from tests.support.virtual_time import on_virtual_time

NO_WORKER = Unavailable("no worker is there")
LINK = object()  # of the worker that took an attempt


class Named(Protocol):
    name: str


@dataclass
class Fakes:
    """A placer that takes those that there is `space` for, once it is `known`; else `error`."""

    error: BatonError = NO_WORKER
    space: int = 0
    looks: int = 0
    tried: list[str] = field(default_factory=list)
    placed: list[str] = field(default_factory=list)
    refuses: set[str] = field(default_factory=set)
    unplaced: UnplacedRequests = field(default_factory=UnplacedRequests)

    def room(self) -> int:
        self.looks += 1
        return self.space

    def try_place(self, waiting_attempt: Named) -> object:
        self.tried.append(waiting_attempt.name)
        if not self.space or waiting_attempt.name in self.refuses:
            raise self.error
        self.space -= 1
        self.placed.append(waiting_attempt.name)
        return LINK


def waiting_attempt(
    name: str, within_s: float = 60.0, attempt: int = 1, length: int = 9
) -> Attempt:
    deadline_s = asyncio.get_running_loop().time() + within_s
    active_request = SimpleNamespace(over=False, error=None, deadline_s=deadline_s)
    made = SimpleNamespace(name=name, active_request=active_request, attempt=attempt, length=length)
    return cast(Attempt, made)


def line_of(fakes: Fakes) -> PlacementQueue:
    return PlacementQueue(cast(Submitter, fakes), fakes.unplaced)


async def wait_all(tasks: list[asyncio.Task[WorkerLink]]) -> None:
    async with asyncio.timeout(10):
        await asyncio.gather(*tasks)


@on_virtual_time
async def test_requests_are_tried_in_order_once_there_is_room() -> None:
    fakes = Fakes()
    line = line_of(fakes)
    names = [f"r{number}" for number in range(3 * AT_ONCE)]
    tasks = [asyncio.create_task(line.place(waiting_attempt(name), 60)) for name in names]
    await asyncio.sleep(5 * RETRY_S)
    assert fakes.tried == names and not fakes.placed  # each once, as it came
    assert fakes.looks <= 6  # one timer for all
    fakes.space = 2 * AT_ONCE
    await asyncio.sleep(3 * RETRY_S)
    assert fakes.placed == names[: 2 * AT_ONCE] == fakes.tried[len(names) :]
    fakes.space = AT_ONCE
    await wait_all(tasks)
    assert fakes.placed == names
    looks = fakes.looks
    await asyncio.sleep(2 * RETRY_S)
    assert fakes.looks <= looks + 1  # no request waits: the queue looks for no room


@pytest.mark.parametrize(
    ("length", "count", "at_once"),
    [
        (9, 64, AT_ONCE),
        (TOKENS_AT_ONCE // 3, 6, 3),
        (TOKENS_AT_ONCE - 1, 6, 1),
        (10 * TOKENS_AT_ONCE, 6, 1),
    ],
)
@on_virtual_time
async def test_few_requests_are_tried_in_one_turn_of_the_loop(
    length: int, count: int, at_once: int
) -> None:
    fakes = Fakes()
    line = line_of(fakes)
    names = [str(number) for number in range(count)]
    waiting = [waiting_attempt(name, length=length) for name in names]
    tasks = [asyncio.create_task(line.place(each, 60)) for each in waiting]
    await asyncio.sleep(0)
    fakes.space = 1000
    most, before = 0, 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        most, before = max(most, len(fakes.placed) - before), len(fakes.placed)
    assert most == at_once and fakes.placed == names


@on_virtual_time
async def test_a_request_no_worker_takes_keeps_no_other_waiting() -> None:
    fakes = Fakes(refuses={f"stuck{number}" for number in range(AT_ONCE)})
    line = line_of(fakes)
    stuck = [asyncio.create_task(line.place(waiting_attempt(name), 60)) for name in fakes.refuses]
    other = asyncio.create_task(line.place(waiting_attempt("other"), 60))
    await asyncio.sleep(0)
    fakes.space = 1
    await wait_all([other])
    fakes.space = 1
    tried = len(fakes.tried)
    await asyncio.sleep(4 * RETRY_S)
    assert len(fakes.tried) - tried <= 5 * AT_ONCE  # nor are they asked more often than before
    fakes.refuses.clear()
    fakes.space = AT_ONCE
    await wait_all(stuck)


@on_virtual_time
async def test_every_wait_has_its_end() -> None:
    line = line_of(Fakes())
    with pytest.raises(Unavailable, match="no worker is there"):
        await line.place(waiting_attempt("r"), 0.1)
    with pytest.raises(Unavailable, match=r"returned the request, and in 0\.1 s no other"):
        await line.place(waiting_attempt("r"), 0.1, returned=True)
    with pytest.raises(DeadlineExceeded, match="no worker is there"):
        await line.place(waiting_attempt("r", within_s=0.1), 60)


@pytest.mark.parametrize(
    "error", [InvalidRequest("too long"), Overloaded("full")], ids=["invalid", "full"]
)
@on_virtual_time
async def test_a_lasting_refusal_is_raised_at_once(error: BatonError) -> None:
    fakes = Fakes(error)
    with pytest.raises(type(error)):
        await line_of(fakes).place(waiting_attempt("r"), 60)
    assert len(fakes.tried) == 1


@pytest.mark.parametrize(
    "error", [InvalidRequest("too long"), Overloaded("full")], ids=["too small", "full"]
)
@on_virtual_time
async def test_a_begun_request_waits_for_a_full_or_too_small_fleet(
    error: BatonError,
) -> None:
    """A worker that could hold it was there, and is being restarted."""
    fakes = Fakes(error)
    task = asyncio.create_task(line_of(fakes).place(waiting_attempt("r", attempt=2), 60))
    await asyncio.sleep(2 * RETRY_S)
    fakes.space = 1
    await wait_all([task])


@on_virtual_time
async def test_new_requests_leave_the_room_to_retries_that_wait() -> None:
    fakes = Fakes(Overloaded("full"))
    line = line_of(fakes)
    retries = [waiting_attempt(f"retry{number}", attempt=2) for number in range(2)]
    tasks = [asyncio.create_task(line.place(each, 60)) for each in retries]
    await asyncio.sleep(0)
    fakes.space = 2
    with pytest.raises(Overloaded, match="for requests that lost theirs") as refused:
        await line.place(waiting_attempt("new"), 60)
    assert refused.value.retry_after_s and fakes.unplaced.refused == 1
    assert "new" not in fakes.tried
    fakes.space = 3  # one more than retries
    assert await line.place(waiting_attempt("new"), 60) is LINK
    await wait_all(tasks)
    fakes.space = 1  # no retry waits any more
    assert await line.place(waiting_attempt("last"), 60) is LINK


@on_virtual_time
async def test_new_requests_wait_beside_retries_where_no_worker_is() -> None:
    fakes = Fakes()
    line = line_of(fakes)
    names = [waiting_attempt("retry", attempt=2), waiting_attempt("new")]
    tasks = [asyncio.create_task(line.place(each, 60)) for each in names]
    await asyncio.sleep(2 * RETRY_S)
    fakes.space = 2
    await wait_all(tasks)
    assert fakes.placed == ["retry", "new"]


@on_virtual_time
async def test_a_begun_request_is_not_reported_as_invalid() -> None:
    line = line_of(Fakes(InvalidRequest("too long")))
    with pytest.raises(Unavailable, match="no worker that could hold this request is left"):
        await line.place(waiting_attempt("r", attempt=2), 0.1)


@on_virtual_time
async def test_a_woken_request_checks_whether_it_may_wait_longer() -> None:
    line = line_of(Fakes())
    one, two = waiting_attempt("one"), waiting_attempt("two")
    tasks = [asyncio.create_task(line.place(each, 60)) for each in (one, two)]
    await asyncio.sleep(0)
    one.active_request.over = True
    line.wake()
    await asyncio.sleep(0.01)
    assert tasks[0].done() and not tasks[1].done()
    with pytest.raises(Unavailable, match=STOPPING):
        await tasks[0]
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    assert len(line) == 0


@on_virtual_time
async def test_what_no_worker_has_is_counted() -> None:
    fakes = Fakes()
    line = line_of(fakes)
    tasks = [asyncio.create_task(line.place(waiting_attempt(name), 60)) for name in ("a", "b")]
    await asyncio.sleep(2 * RETRY_S)
    assert fakes.unplaced.waiting == 2
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    assert fakes.unplaced.waiting == 1
    fakes.space = 1
    await wait_all(tasks[1:])
    assert (fakes.unplaced.waiting, fakes.unplaced.refused) == (0, 0)


@pytest.mark.parametrize(("error", "counted"), [(Overloaded("full"), 1), (InvalidRequest("x"), 0)])
@on_virtual_time
async def test_refusals_for_want_of_room_are_counted(error: BatonError, counted: int) -> None:
    fakes = Fakes(error)
    with pytest.raises(type(error)):
        await line_of(fakes).place(waiting_attempt("r"), 60)
    assert fakes.unplaced.refused == counted
