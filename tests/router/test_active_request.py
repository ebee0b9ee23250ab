"""A request's buffer: what a slow client leaves unread, and its one end."""

from __future__ import annotations

import asyncio

import pytest

import baton.router.dispatch.active_request as generation_module
from baton.proto import worker_pb2
from baton.router.dispatch.active_request import ActiveRequest, OutputToken
from baton.router.requests.validated_request import ValidatedRequest
from baton.runtime.errors import Cancelled, WorkerLost
from baton.simulation.virtual.virtual_time import on_virtual_time
from tests.support.dispatch_scene import DispatchScene, output


@on_virtual_time
async def test_a_full_buffer_ends_the_request_after_what_was_accepted() -> None:
    scene = DispatchScene()
    generation = await scene.start(max_tokens=200)
    scene.give(*(output(index, index) for index in range(8 * 16)))
    scene.give(output(8 * 16, 8 * 16))
    assert len(await generation.next()) == 8 * 16
    with pytest.raises(Cancelled, match="too slowly"):
        await generation.next()
    assert scene.link().cancels() == [("r", 1)]


@on_virtual_time
async def test_what_a_worker_kept_may_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the buffer holds, before the client had a turn; then it must be taken in time."""
    monkeypatch.setattr(generation_module, "FULL_BUFFER_S", 0.05)
    scene = DispatchScene()
    generation = await scene.start(max_tokens=200)
    scene.give(*(output(index, index) for index in range(100)))
    assert [each.token for each in await generation.next()] == list(range(100))
    scene.give(*(output(index, index) for index in range(100, 117)))
    await asyncio.sleep(0.06)
    scene.give(output(117, 117))
    assert generation.over
    with pytest.raises(Cancelled, match="too slowly"):
        while True:
            await generation.next()


@on_virtual_time
async def test_outputs_are_taken_whole_and_clients_then_get_a_turn() -> None:
    """In the midst of a message nobody could take anything: far more than eight buffers wait."""
    scene = DispatchScene()
    generation = await scene.start(max_tokens=500)
    assert scene.give(*(output(index, index) for index in range(15))) is False
    assert scene.give(*(output(index, index) for index in range(15, 300))) is True
    assert len(await generation.next()) == 300
    assert scene.give(output(300, 300)) is False
    assert not generation.over


@on_virtual_time
async def test_alternatives_weigh_as_much_as_tokens() -> None:
    request = ValidatedRequest((5,), worker_pb2.Sampling(), max_tokens=1000)
    generation = ActiveRequest("r", request, 64, asyncio.get_running_loop().time() + 50)
    heavy = OutputToken(0, 3, -1.0, tuple((token, -2.0) for token in range(20)))
    taken = 0
    while not generation.too_slow():
        generation.put(heavy)
        taken += 1
    assert 8 * 64 / 21 <= taken <= 8 * 64 / 21 + 1  # of tokens alone: 512
    assert len(await generation.next()) == taken
    assert not generation.too_slow()  # the buffer is empty again
    generation.put(heavy)
    assert len(await generation.next()) == 1


@on_virtual_time
async def test_an_end_without_a_token_has_room_in_a_full_buffer() -> None:
    scene = DispatchScene()
    generation = await scene.start(max_tokens=200)
    scene.give(*(output(index, index) for index in range(8 * 16)))
    assert generation.too_slow()
    scene.give(output(8 * 16, None, end=worker_pb2.LENGTH))
    assert (await generation.next())[-1].finish == "length"


@on_virtual_time
async def test_only_the_first_end_counts() -> None:
    request = ValidatedRequest((5,), worker_pb2.Sampling(), max_tokens=1)
    generation = ActiveRequest("r", request, 4, asyncio.get_running_loop().time() + 50)
    generation.put(OutputToken(0, 3))
    generation.end(WorkerLost("first"))
    generation.end()
    assert [each.token for each in await generation.next()] == [3]
    with pytest.raises(WorkerLost, match="first"):
        await generation.next()
