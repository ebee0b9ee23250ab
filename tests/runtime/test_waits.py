"""Waiting for one future: the waiter hears what became of it, and the future is left as it was."""

from __future__ import annotations

import asyncio

import pytest

from baton.runtime import waits
from tests.support.virtual_time import on_virtual_time


@on_virtual_time
async def test_it_ends_with_the_future_whatever_that_brings() -> None:
    loop = asyncio.get_running_loop()
    for end in ("result", "error", "cancel"):
        future = loop.create_future()
        does = {
            "result": lambda future=future: future.set_result(5),
            "error": lambda future=future: future.set_exception(ValueError("its own")),
            "cancel": future.cancel,
        }[end]
        loop.call_later(0.01, does)
        assert await waits.done_within(future, 10.0)
        assert await waits.done_within(future)  # at once, now that it is done
        if end == "error":
            with pytest.raises(ValueError, match="its own"):
                future.result()


@on_virtual_time
async def test_when_the_time_is_up_the_future_goes_on() -> None:
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    began_s = loop.time()
    assert not await waits.done_within(future, 0.02)
    assert 0.01 < loop.time() - began_s < 5
    assert not await waits.done_within(future, 0.0)
    assert not await waits.done_within(future, -1.0)
    future.set_result(None)
    assert await waits.done_within(future, -1.0)


@on_virtual_time
async def test_a_caller_cancelled_while_waiting_keeps_the_future() -> None:
    future = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(waits.done_within(future, 60.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not future.done()
    future.set_result(1)  # it calls no waiter that has given up
    await asyncio.sleep(0)
    assert future.result() == 1


@on_virtual_time
async def test_the_end_of_the_time_and_the_future_may_come_together() -> None:
    loop = asyncio.get_running_loop()
    for _ in range(20):
        future = loop.create_future()
        loop.call_later(0.001, future.set_result, None)
        assert await waits.done_within(future, 0.001) == future.done()
        await asyncio.sleep(0.002)


@on_virtual_time
async def test_many_may_wait_for_the_same_future() -> None:
    future = asyncio.get_running_loop().create_future()
    patient = [asyncio.create_task(waits.done_within(future)) for _ in range(3)]
    hasty = asyncio.create_task(waits.done_within(future, 0.01))
    assert not await hasty
    future.set_result(None)
    assert await asyncio.gather(*patient) == [True] * 3


@on_virtual_time
async def test_ended_tasks_have_ended_whatever_they_raise() -> None:
    ends: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ends.append("slow")

    async def failing() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ends.append("failing")
            raise ValueError("at its end")

    async def nothing() -> None:
        pass

    tasks = [asyncio.create_task(each) for each in (slow(), failing(), nothing())]
    await asyncio.sleep(0)
    await waits.cancel_all(tasks)
    assert ends == ["failing", "slow"]
    assert [task.done() for task in tasks] == [True] * 3
    assert tasks[0].cancelled()
    assert not tasks[2].cancelled()  # it had ended before
    await waits.cancel_all([])


@on_virtual_time
async def test_a_cancelled_caller_still_sees_its_tasks_ended() -> None:
    ends: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)
            ends.append("slow")

    task = asyncio.create_task(slow())
    await asyncio.sleep(0)
    ending = asyncio.create_task(waits.cancel_all([task]))
    await asyncio.sleep(0.001)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert ends == ["slow"]


@on_virtual_time
async def test_a_task_that_loses_cancellations_is_cancelled_again() -> None:
    lost = []

    async def deaf() -> None:
        while len(lost) < 3:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                lost.append(asyncio.get_running_loop().time())
        await asyncio.sleep(60)

    tasks = [asyncio.create_task(deaf())]
    await asyncio.sleep(0.001)
    begun_s = asyncio.get_running_loop().time()
    await waits.cancel_all(tasks, again_s=0.1)
    assert [round(each - begun_s, 3) for each in lost] == [0.0, 0.1, 0.2]
    assert tasks[0].cancelled()


@on_virtual_time
async def test_the_first_end_of_the_parts_is_the_end_of_all() -> None:
    ended: list[str] = []

    async def lasting(name: str, last_words: Exception | None = None) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(name)
            if last_words is not None:
                raise last_words

    async def fails() -> None:
        await asyncio.sleep(0.001)
        raise ValueError("it broke")

    async def ends() -> None:
        await asyncio.sleep(0.001)

    with pytest.raises(ValueError, match="it broke"):
        await waits.run_until_first_ends(
            lasting("one"), fails(), lasting("two", KeyError("unheard"))
        )
    assert ended == ["one", "two"]
    await waits.run_until_first_ends(lasting("three"), ends())
    with pytest.raises(KeyError, match="heard"):  # nothing else has failed
        await waits.run_until_first_ends(ends(), lasting("four", KeyError("heard")))
    assert ended == ["one", "two", "three", "four"]


@on_virtual_time
async def test_the_parts_end_with_their_runner() -> None:
    ended = asyncio.Event()

    async def lasting() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    running = asyncio.create_task(waits.run_until_first_ends(lasting(), lasting()))
    await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()
