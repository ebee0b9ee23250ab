"""A router that connects again: what it names continues, and what it does not name ends."""

from __future__ import annotations

import asyncio

import pytest

from baton.proto import worker_pb2
from baton.runtime.links import LinkClosed
from tests.support.session_scene import Work, asked, hello, indices, resume, submit
from tests.support.virtual_time import on_virtual_time


async def test_a_reconnect_continues_at_the_named_index() -> None:
    work = Work()
    first, _ = work.sessions.attach(hello())
    first.receive(submit("a"))
    for index in range(3):
        work.token("a", index)
    assert await indices(first) == [0, 1, 2]
    first.detach()
    work.token("a", 3)  # parked, and still going on
    second, lost = work.sessions.attach(hello(resume("a", 2)))
    work.token("a", 4)
    assert lost == []
    assert await indices(second) == [2, 3, 4]
    assert work.cancelled == []


async def test_a_reconnect_receives_a_missed_end() -> None:
    work = Work()
    first, _ = work.sessions.attach(hello())
    first.receive(submit("a"))
    work.token("a", 0, end=worker_pb2.LENGTH)
    first.detach()
    second, lost = work.sessions.attach(hello(resume("a", 1)))
    outputs = await second.outputs()
    assert lost == [] and [o.end for o in outputs.outputs] == [worker_pb2.LENGTH]


async def test_a_reconnect_cancels_unnamed_and_loses_unknown_requests() -> None:
    work = Work()
    first, _ = work.sessions.attach(hello())
    first.receive(submit("a"))
    first.receive(submit("b"))
    first.detach()
    _, lost = work.sessions.attach(hello(resume("b", 0), resume("c", 0), resume("b2", 0)))
    assert work.cancelled == [("a", 1)]
    assert sorted(lost) == ["b2", "c"]


async def test_choices_that_a_reconnect_does_not_name_are_cancelled() -> None:
    work = Work()
    first, _ = work.sessions.attach(hello())
    first.receive(submit("a", choices=3))
    first.detach()
    assert work.sessions.attach(hello(resume("a", 0)))[1] == []
    assert work.cancelled == [("a", 1, [1, 2])]


@on_virtual_time
async def test_the_grace_period_ends_unclaimed_requests() -> None:
    work = Work()
    session, _ = work.sessions.attach(hello())
    session.receive(submit("a"))
    session.detach()
    await asyncio.sleep(0.04)
    assert work.sessions.count == 1
    await asyncio.sleep(0.02)
    assert work.sessions.count == 0 and work.cancelled == [("a", 1)]
    _, lost = work.sessions.attach(hello(resume("a", 0)))
    assert lost == ["a"]


@on_virtual_time
async def test_a_router_that_came_back_in_time_keeps_its_requests() -> None:
    work = Work()
    first, _ = work.sessions.attach(hello())
    first.receive(submit("a"))
    first.detach()
    work.sessions.attach(hello(resume("a", 0)))
    await asyncio.sleep(0.15)  # three graces
    assert work.cancelled == [] and work.sessions.count == 1


async def test_a_new_stream_takes_over_from_one_that_still_looks_open() -> None:
    work = Work()
    first, _ = work.sessions.attach(hello())
    first.receive(submit("a"))
    waiting = asyncio.create_task(first.outputs())
    await asyncio.sleep(0)
    second, _ = work.sessions.attach(hello(resume("a", 0)))
    with pytest.raises(LinkClosed, match="taken over"):
        await waiting
    first.receive(submit("b"))  # what the old stream still brings is not ours
    assert ("b", 1) not in work.emit
    first.detach()  # nor does its end park anything
    work.token("a", 0)
    assert await indices(second) == [0]


@on_virtual_time
async def test_a_second_break_has_a_grace_of_its_own() -> None:
    work = Work()
    first, _ = work.sessions.attach(hello())
    first.receive(submit("a"))
    first.detach()
    await asyncio.sleep(0.03)
    second, _ = work.sessions.attach(hello(resume("a", 0)))
    second.detach()
    await asyncio.sleep(0.04)
    assert work.sessions.count == 1
    await asyncio.sleep(0.02)
    assert work.sessions.count == 0 and work.cancelled == [("a", 1)]


async def test_a_stream_replaced_while_it_sends_ends_at_its_next_wait() -> None:
    work = Work()
    first, _ = work.sessions.attach(hello())
    work.sessions.attach(hello())
    with pytest.raises(LinkClosed, match="taken over"):
        await asyncio.wait_for(first.outputs(), 1)


async def test_a_reconnect_resends_the_candidates_of_its_requests() -> None:
    work = Work()
    first, _ = work.sessions.attach(hello())
    for name in ("a", "b", "c"):
        first.receive(submit(name))
    work.asked("a", b"one")
    assert await asked(first) == [("a", b"one", False)]
    first.detach()
    work.asked("b", b"two")
    second, _ = work.sessions.attach(hello(resume("a", 0), resume("b", 0)))
    assert await asked(second) == [("a", b"one", False), ("b", b"two", False)]
    second.detach()
    third, _ = work.sessions.attach(hello(resume("b", 0)))
    assert await asked(third) == [("b", b"two", False)]
