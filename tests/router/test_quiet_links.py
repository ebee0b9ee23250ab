"""A link on which no word comes, or words of a worker that hangs."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from baton.proto import worker_pb2


def load() -> worker_pb2.WorkerMessage:
    return worker_pb2.WorkerMessage(load=worker_pb2.Load(free_blocks=3))


async def test_a_hang_is_told_once_and_ends(link_scene: Any, eventually: Any) -> None:
    made = link_scene()
    far = await made.accept()
    for overdue_ms, hung, told in ((1999, False, 0), (2000, True, 1), (2600, True, 1)):
        load = worker_pb2.Load(overdue_ms=overdue_ms)
        await far.send(worker_pb2.WorkerMessage(load=load))
        await eventually(lambda wanted=overdue_ms: made.link.load.overdue_ms == wanted)
        assert (made.link.hung, made.link.takes_work, made.notes.hangs) == (hung, not hung, told)
    await far.send(worker_pb2.WorkerMessage(load=worker_pb2.Load()))
    await eventually(lambda: made.link.takes_work)
    assert made.link.up and made.notes.losses == []


async def test_after_a_silence_there_is_no_grace(link_scene: Any, eventually: Any) -> None:
    made = link_scene(link_heartbeat_s=0.1, link_silence_s=0.15, link_grace_s=60.0)
    await made.accept()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await eventually(lambda: made.notes.losses)
    assert made.notes.losses[0] == (None, "decode-0 has been silent too long")
    assert loop.time() - began_s < 5.0 and not made.link.up


async def test_silence_is_a_break(link_scene: Any, eventually: Any) -> None:
    made = link_scene(link_silence_s=0.2, link_grace_s=0.05)
    await made.accept()
    await eventually(lambda: made.notes.losses)


async def test_a_stall_of_this_process_is_no_silence_of_the_worker(link_scene: Any) -> None:
    made = link_scene(link_heartbeat_s=0.05, link_silence_s=0.5, link_grace_s=60.0)
    far = await made.accept()
    await made.next(far, "heartbeat")
    time.sleep(0.8)  # noqa: ASYNC251  nobody in this process can speak, nor hear
    for _ in range(8):
        await asyncio.sleep(0.05)
        await far.send(worker_pb2.WorkerMessage(load=worker_pb2.Load(free_blocks=3)))
    assert made.link.up and made.link.load.free_blocks == 3 and not made.notes.losses


async def test_a_quiet_worker_takes_nothing_new_and_keeps_its_link(
    link_scene: Any, eventually: Any
) -> None:
    made = link_scene(link_heartbeat_s=0.05, link_silence_s=1.0, link_grace_s=60.0)
    far = await made.accept()
    assert made.link.takes_work
    began_s = asyncio.get_running_loop().time()
    await eventually(lambda: not made.link.takes_work)
    assert 0.59 <= asyncio.get_running_loop().time() - began_s < 0.9
    assert made.link.up and made.notes.losses == []
    await far.send(load())
    await eventually(lambda: made.link.takes_work)
    await eventually(lambda: made.notes.losses)  # now it is silent for as long as that takes
    assert asyncio.get_running_loop().time() - began_s > 1.5


async def test_one_heartbeat_that_is_late_makes_nobody_quiet(link_scene: Any) -> None:
    made = link_scene(link_heartbeat_s=0.4, link_silence_s=1.0, link_grace_s=60.0)
    far = await made.accept()
    for _ in range(2):
        await asyncio.sleep(0.65)  # more than the share, less than two heartbeats
        assert made.link.takes_work
        await far.send(load())
        await asyncio.sleep(0.01)


async def test_a_stall_of_this_process_makes_nobody_quiet(link_scene: Any) -> None:
    made = link_scene(link_heartbeat_s=0.05, link_silence_s=1.0, link_grace_s=60.0)
    far = await made.accept()
    await made.next(far, "heartbeat")
    time.sleep(0.8)  # noqa: ASYNC251  nobody in this process can speak, nor hear
    for _ in range(8):
        assert made.link.takes_work
        await asyncio.sleep(0.05)
        await far.send(load())
