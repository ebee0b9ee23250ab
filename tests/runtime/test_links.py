"""The in-process link keeps the contract of the `Link` seam."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from baton.runtime.errors import WorkerLost
from baton.runtime.links import MEMORY_LINK_MESSAGES, LinkClosed, MemoryLink, memory_link

LIMIT_S = 30.0


def pair() -> tuple[MemoryLink[int, str], MemoryLink[str, int]]:
    return memory_link()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_messages_arrive_in_order_in_both_directions() -> None:
    near, far = pair()
    for number in range(10):
        await near.send(number)
        await far.send(str(number))
    assert [await far.receive() for _ in range(10)] == list(range(10))
    assert [await near.receive() for _ in range(10)] == [str(n) for n in range(10)]


async def test_receive_waits_for_a_message() -> None:
    near, far = pair()
    waiting = asyncio.create_task(far.receive())
    await settle()
    assert not waiting.done()
    await near.send(7)
    assert await asyncio.wait_for(waiting, LIMIT_S) == 7


async def test_messages_before_a_close_reach_only_the_peer() -> None:
    near, far = pair()
    await near.send(1)
    await far.send("late")
    await near.close()
    await near.close()
    assert await far.receive() == 1
    for end in (far, near):
        with pytest.raises(LinkClosed):
            await end.receive()
    with pytest.raises(LinkClosed):
        await far.send("x")
    with pytest.raises(LinkClosed):
        await near.send(2)


@pytest.mark.parametrize("closer", [0, 1])
async def test_close_by_either_side_wakes_both_receivers(closer: int) -> None:
    ends = pair()
    waiting = [asyncio.create_task(end.receive()) for end in ends]
    await settle()
    await ends[closer].close()
    for task in waiting:
        with pytest.raises(LinkClosed):
            await asyncio.wait_for(task, LIMIT_S)


async def test_a_slow_receiver_holds_the_sender_back() -> None:
    near, far = pair()
    for number in range(MEMORY_LINK_MESSAGES):
        await near.send(number)
    late = asyncio.create_task(near.send(-1))
    await settle()
    assert not late.done()
    assert await far.receive() == 0
    await asyncio.wait_for(late, LIMIT_S)
    rest = [await far.receive() for _ in range(MEMORY_LINK_MESSAGES)]
    assert rest == [*range(1, MEMORY_LINK_MESSAGES), -1]


async def test_close_wakes_a_sender_that_waits_for_room() -> None:
    near, far = pair()
    for number in range(MEMORY_LINK_MESSAGES):
        await near.send(number)
    late = asyncio.create_task(near.send(-1))
    await settle()
    await far.close()
    with pytest.raises(LinkClosed):
        await asyncio.wait_for(late, LIMIT_S)


@pytest.mark.parametrize("turns_before", range(4))
@pytest.mark.parametrize("turns_between", range(4))
async def test_a_cancelled_receive_loses_no_message(turns_before: int, turns_between: int) -> None:
    """Cancel at every distance from the arrival of a message: it is returned once, or left."""
    near, far = pair()
    waiting = asyncio.create_task(far.receive())
    for _ in range(turns_before):
        await asyncio.sleep(0)
    await near.send(1)
    await near.send(2)
    for _ in range(turns_between):
        await asyncio.sleep(0)
    waiting.cancel()
    got: list[int] = []
    with contextlib.suppress(asyncio.CancelledError):
        got.append(await waiting)
    while len(got) < 2:
        got.append(await asyncio.wait_for(far.receive(), LIMIT_S))
    assert got == [1, 2]


async def test_a_closed_link_counts_as_a_lost_worker() -> None:
    assert issubclass(LinkClosed, WorkerLost)
    assert LinkClosed("x").retryable
