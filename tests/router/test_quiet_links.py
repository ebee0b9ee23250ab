"""A link on which no word comes, or words of a worker that hangs."""

from __future__ import annotations

import asyncio

import pytest

from baton.proto import worker_pb2
from tests.support.link_scene import LinkScene
from tests.support.virtual_time import on_virtual_time, stand_still
from tests.support.waiting import eventually


def load() -> worker_pb2.WorkerMessage:
    return worker_pb2.WorkerMessage(load=worker_pb2.Load(free_blocks=3))


def now_s() -> float:
    return asyncio.get_running_loop().time()


@on_virtual_time
async def test_a_hang_is_reported_once_and_ends() -> None:
    made = LinkScene()
    far = await made.accept()
    for overdue_ms, hung, reported in ((1499, False, 0), (1500, True, 1), (2100, True, 1)):
        load = worker_pb2.Load(overdue_ms=overdue_ms)
        await far.send(worker_pb2.WorkerMessage(load=load))
        await eventually(lambda wanted=overdue_ms: made.link.load.overdue_ms == wanted)
        assert (made.link.hung, made.link.takes_work, made.notes.hangs) == (
            hung,
            not hung,
            reported,
        )
    await far.send(worker_pb2.WorkerMessage(load=worker_pb2.Load()))
    await eventually(lambda: made.link.takes_work)
    assert made.link.up and made.notes.losses == []


@on_virtual_time
async def test_after_a_silence_there_is_no_grace() -> None:
    made = LinkScene(link_heartbeat_s=0.1, link_silence_s=0.15, link_grace_s=60.0)
    await made.accept()
    began_s = now_s()
    await eventually(lambda: made.notes.losses)
    assert made.notes.losses[0] == (None, "decode-0 has been silent too long")
    assert 0.14 < now_s() - began_s < 0.2 and not made.link.up
    await asyncio.sleep(0.1)
    assert not made.link.parked


@on_virtual_time
async def test_silence_is_a_break() -> None:
    made = LinkScene(link_silence_s=0.2, link_grace_s=0.05)
    await made.accept()
    await eventually(lambda: made.notes.losses)


@pytest.mark.parametrize("silence_s", [0.5, 1.0])
@on_virtual_time
async def test_a_stall_of_this_process_makes_no_worker_silent_or_quiet(silence_s: float) -> None:
    made = LinkScene(link_heartbeat_s=0.05, link_silence_s=silence_s, link_grace_s=60.0)
    far = await made.accept()
    await made.next(far, "heartbeat")
    stand_still(0.8)
    for _ in range(8):
        assert made.link.takes_work
        await asyncio.sleep(0.05)
        await far.send(load())
    assert made.link.up and made.link.load.free_blocks == 3 and not made.notes.losses


@on_virtual_time
async def test_a_quiet_worker_takes_nothing_new_and_keeps_its_link() -> None:
    made = LinkScene(link_heartbeat_s=0.05, link_silence_s=1.0, link_grace_s=60.0)
    far = await made.accept()
    assert made.link.takes_work
    began_s = now_s()
    await eventually(lambda: not made.link.takes_work)
    assert 0.59 <= now_s() - began_s < 0.63
    assert made.link.up and made.notes.losses == []
    await far.send(load())
    await eventually(lambda: made.link.takes_work)
    again_s = now_s()
    await eventually(lambda: made.notes.losses)  # now it is silent for as long as that takes
    assert 0.97 < now_s() - again_s < 1.03


@on_virtual_time
async def test_one_late_heartbeat_makes_no_link_quiet() -> None:
    made = LinkScene(link_heartbeat_s=0.4, link_silence_s=1.0, link_grace_s=60.0)
    far = await made.accept()
    for _ in range(2):
        await asyncio.sleep(0.75)  # more than the share, less than two heartbeats
        assert made.link.takes_work
        await far.send(load())
        await asyncio.sleep(0.01)
