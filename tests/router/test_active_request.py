"""A request's buffer: what a slow client leaves unread, and its one end."""

from __future__ import annotations

import asyncio

import pytest

import baton.router.dispatch.active_request as active_request_module
from baton.proto import worker_pb2
from baton.router.dispatch.active_request import ActiveRequest, OutputToken
from baton.router.requests.validated_request import ValidatedRequest
from baton.runtime.errors import Cancelled, WorkerLost
from tests.support.dispatch_scene import DispatchScene, output
from tests.support.virtual_time import on_virtual_time


@on_virtual_time
async def test_a_full_buffer_ends_the_request_after_what_was_accepted() -> None:
    scene = DispatchScene()
    active_request = await scene.start(max_tokens=200)
    scene.give(*(output(index, index) for index in range(8 * 16)))
    scene.give(output(8 * 16, 8 * 16))
    assert len(await active_request.next()) == 8 * 16
    with pytest.raises(Cancelled, match="too slowly"):
        await active_request.next()
    assert scene.link().cancels() == [("r", 1)]


@on_virtual_time
async def test_what_a_worker_kept_may_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the buffer holds, before the client had a turn; then it must be taken in time."""
    monkeypatch.setattr(active_request_module, "FULL_BUFFER_S", 0.05)
    scene = DispatchScene()
    active_request = await scene.start(max_tokens=200)
    scene.give(*(output(index, index) for index in range(100)))
    assert [each.token for each in await active_request.next()] == list(range(100))
    scene.give(*(output(index, index) for index in range(100, 117)))
    await asyncio.sleep(0.06)
    scene.give(output(117, 117))
    assert active_request.over
    with pytest.raises(Cancelled, match="too slowly"):
        while True:
            await active_request.next()


@on_virtual_time
async def test_outputs_are_taken_whole_and_clients_then_get_a_turn() -> None:
    """In the midst of a message no reader could take anything: far more than eight buffers wait."""
    scene = DispatchScene()
    active_request = await scene.start(max_tokens=500)
    assert scene.give(*(output(index, index) for index in range(15))) is False
    assert scene.give(*(output(index, index) for index in range(15, 300))) is True
    assert len(await active_request.next()) == 300
    assert scene.give(output(300, 300)) is False
    assert not active_request.over


@on_virtual_time
async def test_alternatives_weigh_as_much_as_tokens() -> None:
    request = ValidatedRequest((5,), worker_pb2.Sampling(), max_tokens=1000)
    active_request = ActiveRequest("r", request, 64, asyncio.get_running_loop().time() + 50)
    heavy = OutputToken(0, 3, -1.0, tuple((token, -2.0) for token in range(20)))
    taken = 0
    while not active_request.too_slow():
        active_request.put(heavy)
        taken += 1
    assert 8 * 64 / 21 <= taken <= 8 * 64 / 21 + 1  # of tokens alone: 512
    assert len(await active_request.next()) == taken
    assert not active_request.too_slow()  # the buffer is empty again
    active_request.put(heavy)
    assert len(await active_request.next()) == 1


@on_virtual_time
async def test_an_end_without_a_token_has_room_in_a_full_buffer() -> None:
    scene = DispatchScene()
    active_request = await scene.start(max_tokens=200)
    scene.give(*(output(index, index) for index in range(8 * 16)))
    assert active_request.too_slow()
    scene.give(output(8 * 16, None, end=worker_pb2.LENGTH))
    assert (await active_request.next())[-1].finish == "length"


@on_virtual_time
async def test_only_the_first_end_counts() -> None:
    request = ValidatedRequest((5,), worker_pb2.Sampling(), max_tokens=1)
    active_request = ActiveRequest("r", request, 4, asyncio.get_running_loop().time() + 50)
    active_request.put(OutputToken(0, 3))
    active_request.end(WorkerLost("first"))
    active_request.end()
    assert [each.token for each in await active_request.next()] == [3]
    with pytest.raises(WorkerLost, match="first"):
        await active_request.next()
