"""The worker's end of a link: hello first, heartbeats, silence, one detach."""

from __future__ import annotations

import asyncio

import pytest

from baton.proto import worker_pb2
from baton.runtime.links import LinkClosed, memory_link
from baton.runtime.worker_links import serve_link
from baton.simulation.virtual_time import on_virtual_time, stand_still


class Handler:
    """Remembers what it is told; outputs come from a queue."""

    def __init__(self) -> None:
        self.hellos: list[str] = []
        self.received: list[str] = []
        self.detached = 0
        self.draining = asyncio.Event()
        self.ready: asyncio.Queue[worker_pb2.StepOutputs] = asyncio.Queue()

    def attach(self, hello: worker_pb2.RouterHello) -> tuple[worker_pb2.WorkerWelcome, Handler]:
        self.hellos.append(hello.router_id)
        return worker_pb2.WorkerWelcome(worker_id="w"), self

    def load(self) -> worker_pb2.Load:
        return worker_pb2.Load(running=7, draining=self.draining.is_set())

    def receive(self, message: worker_pb2.RouterMessage) -> None:
        self.received.append(str(message.WhichOneof("kind")))

    async def outputs(self) -> worker_pb2.StepOutputs:
        return await self.ready.get()

    def detach(self) -> None:
        self.detached += 1


HELLO = worker_pb2.RouterMessage(hello=worker_pb2.RouterHello(router_id="r"))
BEAT = worker_pb2.RouterMessage(heartbeat=worker_pb2.Heartbeat())


def start(  # type: ignore[no-untyped-def]
    handler: Handler, silence_s: float = 5.0, heartbeat_s: float = 0.02
):
    near, far = memory_link()
    serving = serve_link(far, handler, heartbeat_s=heartbeat_s, silence_s=silence_s)
    return near, asyncio.create_task(serving)


@on_virtual_time
async def test_welcome_then_load_then_outputs() -> None:
    handler = Handler()
    link, task = start(handler)
    await link.send(HELLO)
    assert (await link.receive()).welcome.worker_id == "w"
    assert (await link.receive()).load.running == 7
    outputs = [worker_pb2.Output(request_id="a", token=1)]
    handler.ready.put_nowait(worker_pb2.StepOutputs(outputs=outputs))
    kinds = [(await link.receive()).WhichOneof("kind") for _ in range(4)]
    assert "outputs" in kinds and "load" in kinds  # a busy stream still carries load
    await link.close()
    await asyncio.wait_for(task, 5)
    assert handler.detached == 1


@on_virtual_time
async def test_a_stream_without_hello_is_closed_and_attaches_nothing() -> None:
    handler = Handler()
    link, task = start(handler)
    await link.send(BEAT)
    await asyncio.wait_for(task, 5)
    with pytest.raises(LinkClosed):
        await link.receive()
    assert handler.hellos == [] and handler.detached == 0


@on_virtual_time
async def test_a_stream_that_says_nothing_is_dropped() -> None:
    handler = Handler()
    _, task = start(handler, silence_s=0.05)
    await asyncio.wait_for(task, 5)
    assert handler.hellos == []


@on_virtual_time
async def test_silence_detaches_once() -> None:
    handler = Handler()
    link, task = start(handler, silence_s=0.2)
    await link.send(HELLO)
    for _ in range(5):
        await link.send(BEAT)
        await asyncio.sleep(0.05)
    assert not task.done()  # heartbeats keep it
    await asyncio.wait_for(task, 5)
    assert handler.detached == 1


@on_virtual_time
async def test_a_stall_of_this_process_is_no_silence_of_the_router() -> None:
    handler = Handler()
    link, task = start(handler, silence_s=0.5)
    await link.send(HELLO)
    await asyncio.sleep(0.05)
    stand_still(0.8)
    for _ in range(4):
        await asyncio.sleep(0.05)
        await link.send(BEAT)
    assert not task.done() and handler.detached == 0
    await link.close()
    await asyncio.wait_for(task, 5)


@on_virtual_time
async def test_heartbeats_are_not_passed_on_and_requests_are() -> None:
    handler = Handler()
    link, task = start(handler)
    await link.send(HELLO)
    await link.send(BEAT)
    await link.send(worker_pb2.RouterMessage(cancel=worker_pb2.Cancel(request_id="a")))
    async with asyncio.timeout(5):
        while not handler.received:
            await asyncio.sleep(0.005)
    assert handler.received == ["cancel"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert handler.detached == 1


@on_virtual_time
async def test_a_drain_is_told_at_once_and_before_what_it_refuses() -> None:
    handler = Handler()
    link, task = start(handler, silence_s=600, heartbeat_s=500)
    await link.send(HELLO)
    assert (await link.receive()).WhichOneof("kind") == "welcome"
    assert not (await link.receive()).load.draining
    handler.draining.set()
    refusal = worker_pb2.Output(request_id="a", end=worker_pb2.FAILED)
    handler.ready.put_nowait(worker_pb2.StepOutputs(outputs=[refusal]))
    async with asyncio.timeout(5):  # no heartbeat is due for minutes
        assert (await link.receive()).load.draining
        assert (await link.receive()).outputs.outputs[0].request_id == "a"
    again = asyncio.create_task(link.receive())
    await asyncio.sleep(0.05)
    assert not again.done()  # once, not for ever
    again.cancel()
    await link.close()
    await asyncio.wait_for(task, 5)


@on_virtual_time
async def test_a_router_that_comes_during_a_drain_is_told_first() -> None:
    handler = Handler()
    handler.draining.set()
    link, task = start(handler)
    await link.send(HELLO)
    assert (await link.receive()).WhichOneof("kind") == "welcome"
    assert (await link.receive()).load.draining
    await link.close()
    await asyncio.wait_for(task, 5)
