"""The line of requests that wait for a move: which is called, when, and what the wait costs."""

from __future__ import annotations

import asyncio

import pytest

from baton.router.dispatch.retry_budget import HOLD_S, RetryBudget, RetryPermit
from baton.router.dispatch.retry_policy import MigrationQueue
from baton.runtime.errors import Overloaded
from baton.simulation.virtual import virtual_loop
from tests.support.router_books import is_timed, permits_under_way, waiting_turns
from tests.support.virtual_time import on_virtual_time


class Counted(RetryBudget):
    """Counts how often it is asked."""

    asked = 0

    def take(self, active: int, now_s: float, *, short: bool = False) -> RetryPermit | None:
        self.asked += 1
        return super().take(active, now_s, short=short)


class Served:
    """Turns of a budget of `floor` moves, or a fifth of `count`; which were called, in order."""

    def __init__(self, floor: int, count: int = 0) -> None:
        self.budget = Counted(0.2, floor)
        self.count = count
        self.turns = MigrationQueue(self.budget, lambda: self.count)
        self.moves: dict[str, RetryPermit] = {}

    def ask(self, name: str, *, short: bool = False) -> asyncio.Task[None]:
        async def wait() -> None:
            self.moves[name] = await self.turns.take(short=short)

        return asyncio.create_task(wait())

    def waiting(self) -> int:
        return waiting_turns(self.turns)


async def pass_turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@on_virtual_time
async def test_a_move_that_is_free_is_had_at_once() -> None:
    served = Served(1)
    move = await served.turns.take(short=False)
    assert isinstance(move, RetryPermit) and not served.waiting()
    assert not is_timed(served.turns)  # no migration waits: the queue needs no timer


@on_virtual_time
async def test_the_end_of_a_move_calls_the_next_in_order() -> None:
    served = Served(1)
    tasks = [served.ask(name) for name in ("a", "b", "c")]
    await pass_turns()
    assert list(served.moves) == ["a"]
    served.turns.release(served.moves["a"])
    await pass_turns()
    assert list(served.moves) == ["a", "b"]
    served.turns.release(served.moves["b"])
    await asyncio.gather(*tasks)
    assert list(served.moves) == ["a", "b", "c"] and not served.waiting()


@on_virtual_time
async def test_a_later_request_does_not_go_first() -> None:
    served = Served(1)
    first, second = served.ask("first"), served.ask("second")
    await pass_turns()
    served.turns.release(served.moves["first"])  # the place is second's, though it has not run yet
    third = served.ask("third")
    await pass_turns()
    assert list(served.moves) == ["first", "second"]
    third.cancel()
    await asyncio.gather(first, second, third, return_exceptions=True)


@on_virtual_time
async def test_failed_migrations_refuse_all_waiting_requests() -> None:
    served = Served(2)
    moving = [served.ask(name) for name in ("a", "b")]
    await pass_turns()
    waiting = [served.ask(f"w{number}") for number in range(5)]
    await pass_turns()
    served.turns.failed(served.moves["a"], short=False)
    await pass_turns()
    assert not any(task.done() for task in waiting)  # the other one may still get on
    served.turns.failed(served.moves["b"], short=False)
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(error, Overloaded) for error in errors) and not served.waiting()
    await asyncio.gather(*moving)
    with pytest.raises(Overloaded):
        await served.turns.take(short=False)


@on_virtual_time
async def test_what_lacks_memory_has_a_line_of_its_own() -> None:
    served = Served(1)
    await served.ask("a")
    tasks = [served.ask("short", short=True), served.ask("other")]
    await pass_turns()
    served.turns.failed(served.moves["a"], short=True)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(tasks[0].exception(), Overloaded)
    assert list(served.moves) == ["a", "other"]


@pytest.mark.parametrize("when", ["waiting", "called"])
@on_virtual_time
async def test_a_leaving_request_takes_no_retry(when: str) -> None:
    served = Served(1)
    await served.ask("a")
    leaves, stays = served.ask("leaves"), served.ask("stays")
    await pass_turns()
    if when == "waiting":
        leaves.cancel()
        served.turns.release(served.moves["a"])
    else:
        served.turns.release(served.moves["a"])
        leaves.cancel()  # it was called, and has not run since
    await asyncio.gather(leaves, return_exceptions=True)
    async with asyncio.timeout(1):
        await stays
    assert leaves.cancelled() and list(served.moves) == ["a", "stays"]
    assert permits_under_way(served.budget) == [served.moves["stays"]]


@on_virtual_time
async def test_more_that_is_served_makes_room() -> None:
    served = Served(1, count=5)
    await served.ask("a")
    task = served.ask("b")
    await pass_turns()
    served.count = 10
    served.turns.recheck()
    async with asyncio.timeout(1):
        await task


def test_an_expiry_in_the_budget_wakes_the_next_waiter() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        served = Served(2)
        begun_s = loop.time()
        await served.ask("slow")
        await asyncio.sleep(1)
        await served.ask("failing")
        served.turns.failed(served.moves["failing"], short=False)
        after: dict[str, float] = {}
        for name in ("b", "c"):
            await served.ask(name)
            after[name] = loop.time() - begun_s
        assert after == pytest.approx({"b": HOLD_S, "c": HOLD_S + 1}, abs=0.001)

    virtual_loop.run(story())


def test_a_thousand_waiters_do_nothing_until_something_ends() -> None:
    """Not twenty times a second each."""

    async def story() -> None:
        served = Served(10)
        tasks = [served.ask(f"r{number}") for number in range(1000)]
        await asyncio.sleep(0.1)
        assert len(served.moves) == 10
        asked = served.budget.asked
        await asyncio.sleep(HOLD_S / 2)
        assert served.budget.asked == asked
        for name in [*served.moves][:5]:
            served.turns.release(served.moves[name])
        await asyncio.sleep(0.1)
        assert len(served.moves) == 15 and served.budget.asked <= asked + 10
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not served.waiting()

    virtual_loop.run(story())
