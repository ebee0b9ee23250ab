"""The worker's end of a link: hello first, heartbeats, silence, one detach."""

from __future__ import annotations

import asyncio
import math

import pytest
import structlog

from baton.proto import worker_pb2
from baton.runtime.links import LINK_PROTOCOL_VERSION, Link, LinkClosed, memory_link
from baton.runtime.worker.router_links import serve_link
from tests.support.virtual_time import on_virtual_time, stand_still


class Handler:
    """Remembers its calls; outputs come from a queue."""

    def __init__(self, red_after_s: float = math.inf) -> None:
        self.red_after_s = red_after_s  # when the step should have been over
        self.hellos: list[str] = []
        self.received: list[str] = []
        self.detached = 0
        self.due_s: float | None = None  # when the running step should have been over
        self.draining = asyncio.Event()
        self.ready: asyncio.Queue[worker_pb2.StepOutputs] = asyncio.Queue()

    def attach(self, hello: worker_pb2.RouterHello) -> tuple[worker_pb2.WorkerHello, Handler]:
        self.hellos.append(hello.router_id)
        return worker_pb2.WorkerHello(worker_id="w"), self

    def load(self) -> worker_pb2.Load:
        overdue_s = 0.0 if self.due_s is None else now_s() - self.due_s
        overdue_ms = max(0, int(1000 * overdue_s))
        return worker_pb2.Load(running=7, draining=self.draining.is_set(), overdue_ms=overdue_ms)

    def red_in_s(self) -> float:
        return math.inf if self.due_s is None else self.due_s + self.red_after_s - now_s()

    def receive(self, message: worker_pb2.RouterMessage) -> None:
        self.received.append(str(message.WhichOneof("kind")))

    async def outputs(self) -> worker_pb2.StepOutputs:
        return await self.ready.get()

    def detach(self) -> None:
        self.detached += 1


HELLO = worker_pb2.RouterMessage(
    hello=worker_pb2.RouterHello(router_id="r", protocol_version=LINK_PROTOCOL_VERSION)
)
BEAT = worker_pb2.RouterMessage(heartbeat=worker_pb2.Heartbeat())


def start(
    handler: Handler, silence_s: float = 5.0, heartbeat_s: float = 0.02, hang_s: float = 60.0
):
    near, far = memory_link()
    serving = serve_link(far, handler, heartbeat_s=heartbeat_s, silence_s=silence_s, hang_s=hang_s)
    return near, asyncio.create_task(serving)


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def overdue(
    link: Link[worker_pb2.RouterMessage, worker_pb2.WorkerMessage],
    task: asyncio.Task[None],
    loads: int,
) -> list[int]:
    """What so many loads tell; the link is closed then."""
    reported = []
    while len(reported) < loads:
        message = await link.receive()
        if message.WhichOneof("kind") == "load":
            reported.append(message.load.overdue_ms)
    await link.close()
    await asyncio.wait_for(task, 5)
    return reported


@on_virtual_time
async def test_hello_then_load_then_outputs() -> None:
    handler = Handler()
    link, task = start(handler)
    await link.send(HELLO)
    assert (await link.receive()).hello.worker_id == "w"
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
async def test_router_of_another_protocol_version_is_refused_by_name() -> None:
    handler = Handler()
    link, task = start(handler)
    await link.send(worker_pb2.RouterMessage(hello=worker_pb2.RouterHello(protocol_version=99)))
    with structlog.testing.capture_logs() as logs:
        answer = (await link.receive()).hello
        await asyncio.wait_for(task, 5)
    assert answer == worker_pb2.WorkerHello(protocol_version=LINK_PROTOCOL_VERSION)
    assert handler.hellos == [] and handler.detached == 0
    refused = [entry for entry in logs if entry["event"] == "router refused"]
    assert "protocol_version is 99, this worker's is 1" in refused[0]["reason"]


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
async def test_a_drain_is_reported_before_its_refusals() -> None:
    handler = Handler()
    link, task = start(handler, silence_s=600, heartbeat_s=500)
    await link.send(HELLO)
    assert (await link.receive()).WhichOneof("kind") == "hello"
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
async def test_a_router_that_connects_during_a_drain_learns_it_first() -> None:
    handler = Handler()
    handler.draining.set()
    link, task = start(handler)
    await link.send(HELLO)
    assert (await link.receive()).WhichOneof("kind") == "hello"
    assert (await link.receive()).load.draining
    await link.close()
    await asyncio.wait_for(task, 5)


async def beside_a_step(
    due_in_s: float, *, heartbeat_s: float, hang_s: float, red_after_s: float = math.inf
):
    """The router's end of a link whose worker has a step that is due then, and what serves it."""
    handler = Handler(red_after_s)
    link, task = start(handler, silence_s=600, heartbeat_s=heartbeat_s, hang_s=hang_s)
    handler.due_s = now_s() + due_in_s
    await link.send(HELLO)
    return link, task


@on_virtual_time
async def test_a_hang_is_reported_as_soon_as_it_is_one() -> None:
    """Between two heartbeats, once; then with every heartbeat."""
    link, task = await beside_a_step(-0.0503, heartbeat_s=0.2, hang_s=0.35)
    assert await overdue(link, task, 5) == [50, 250, 350, 550, 750]


@on_virtual_time
async def test_a_change_before_a_heartbeat_is_sent_with_it() -> None:
    link, task = await beside_a_step(-0.0603, heartbeat_s=0.1, hang_s=0.05)
    assert await overdue(link, task, 3) == [60, 160, 260]


@on_virtual_time
async def test_the_moment_that_turns_the_worker_red_is_reported() -> None:
    """It is red 0.13 s after its step is overdue, which it is not yet with the first load; then
    there are heartbeats, and the moment of the hang."""
    link, task = await beside_a_step(0.0303, heartbeat_s=0.2, hang_s=0.35, red_after_s=0.13)
    assert await overdue(link, task, 5) == [0, 130, 330, 350, 550]


@on_virtual_time
async def test_a_change_to_red_during_a_load_report_is_sent_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The router's end was slow to take the load; no heartbeat is due for minutes."""
    handler = Handler(red_after_s=0.13)
    near, far = memory_link()
    send = far.send

    async def slowly(message: worker_pb2.WorkerMessage) -> None:
        await send(message)
        await asyncio.sleep(0.2)

    monkeypatch.setattr(far, "send", slowly)
    serving = serve_link(far, handler, heartbeat_s=500, silence_s=600, hang_s=60)
    task = asyncio.create_task(serving)
    await near.send(HELLO)
    await near.receive()
    handler.due_s = now_s() + 0.1503  # so it is red while the first load is sent, from 0.2 to 0.4
    async with asyncio.timeout(5):
        assert await overdue(near, task, 2) == [49, 249]
