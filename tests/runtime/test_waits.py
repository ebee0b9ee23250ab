"""Waiting for one future: it is told what became of it, and the future is left as it was."""

from __future__ import annotations

import asyncio

import pytest

from baton.runtime import waits


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
        assert await waits.over(future, 10.0)
        assert await waits.over(future)  # at once, now that it is done
        if end == "error":
            with pytest.raises(ValueError, match="its own"):
                future.result()


async def test_when_the_time_is_up_the_future_goes_on() -> None:
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    began_s = loop.time()
    assert not await waits.over(future, 0.02)
    assert 0.01 < loop.time() - began_s < 5
    assert not await waits.over(future, 0.0)
    assert not await waits.over(future, -1.0)
    future.set_result(None)
    assert await waits.over(future, -1.0)


async def test_who_is_cancelled_while_it_waits_leaves_the_future_alone() -> None:
    future = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(waits.over(future, 60.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not future.done()
    future.set_result(1)  # nobody is called for whom it would be too late
    await asyncio.sleep(0)
    assert future.result() == 1


async def test_the_end_of_the_time_and_the_future_may_come_together() -> None:
    loop = asyncio.get_running_loop()
    for _ in range(20):
        future = loop.create_future()
        loop.call_later(0.001, future.set_result, None)
        assert await waits.over(future, 0.001) == future.done()
        await asyncio.sleep(0.002)


async def test_many_may_wait_for_the_same_future() -> None:
    future = asyncio.get_running_loop().create_future()
    patient = [asyncio.create_task(waits.over(future)) for _ in range(3)]
    hasty = asyncio.create_task(waits.over(future, 0.01))
    assert not await hasty
    future.set_result(None)
    assert await asyncio.gather(*patient) == [True] * 3
