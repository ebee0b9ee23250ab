"""The worker's end of a router link: hello, heartbeats, silence, and who sends what.

    router ── hello ──▶ attach ──▶ welcome
           ── submit, cancel, settled ──▶ Session.receive
           ◀── outputs of a step ── Session.outputs      ◀── load, every heartbeat, and as soon
                                                             as the worker is overdue by `hang_s`

Knows nothing of requests: a `LinkHandler` (the decode or the prefill worker) does. A link that
breaks or falls silent is reported once, by `Session.detach`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from baton.proto import worker_pb2
from baton.runtime import logs, waits
from baton.runtime.links import Link, LinkClosed
from baton.runtime.silence import Silence

log = logs.get(__name__)

WorkerLink = Link[worker_pb2.WorkerMessage, worker_pb2.RouterMessage]


class Session(Protocol):
    """One router's requests on this worker, as long as one stream lasts."""

    def receive(self, message: worker_pb2.RouterMessage) -> None:
        """Act on submit, cancel or settled. Never blocks; a bad message fails its request."""
        ...

    async def outputs(self) -> worker_pb2.StepOutputs:
        """Wait for outputs and take all there are. Raises LinkClosed once another stream of
        the same router has taken over."""
        ...

    def detach(self) -> None:
        """The stream has ended: requests are parked until the router comes back."""
        ...


class LinkHandler(Protocol):
    draining: asyncio.Event  # set once, when the worker takes nothing new any more

    def attach(self, hello: worker_pb2.RouterHello) -> tuple[worker_pb2.WorkerWelcome, Session]: ...

    def load(self) -> worker_pb2.Load: ...


async def serve_link(
    link: WorkerLink, handler: LinkHandler, *, heartbeat_s: float, silence_s: float, hang_s: float
) -> None:
    """Serve one stream until it breaks, falls silent, or this task is cancelled. `hang_s`: so
    long overdue, the worker is left by the router."""
    try:
        async with asyncio.timeout(silence_s):
            first = await link.receive()
    except (LinkClosed, TimeoutError):
        return
    if first.WhichOneof("kind") != "hello":
        log.warning("a router's first message is not a hello; the link is closed")
        await link.close()
        return
    welcome, session = handler.attach(first.hello)
    try:
        await link.send(worker_pb2.WorkerMessage(welcome=welcome))
        await _converse(link, session, handler, _Beat(heartbeat_s, hang_s), silence_s)
    except (LinkClosed, TimeoutError) as error:
        log.info("router link ended", router=first.hello.router_id, reason=str(error) or "silence")
    finally:
        session.detach()
        await link.close()


class _Beat:
    """When the next load is told, and for how long the worker says that it is overdue: while its
    process stood still, so did its device, for all that anybody knows. As with `Silence`, a sleep
    that was late shows it; one that was late by less than a heartbeat is a busy machine's."""

    def __init__(self, heartbeat_s: float, hang_s: float) -> None:
        self.heartbeat_s = heartbeat_s
        self._hang_ms = 1000 * hang_s
        self._now_s = asyncio.get_running_loop().time
        self._next_s = self._now_s()
        self._overdue_ms = 0  # as the worker said last
        self._stood_ms = 0.0  # while it was overdue with this step

    def corrected(self, load: worker_pb2.Load) -> worker_pb2.Load:
        """What is to be told now."""
        if load.overdue_ms < self._overdue_ms or not load.overdue_ms:
            self._stood_ms = 0.0  # this is another step
        self._overdue_ms = load.overdue_ms
        late_s = self._now_s() - self._next_s
        if late_s > self.heartbeat_s and load.overdue_ms:
            self._stood_ms += 1000 * late_s
        load.overdue_ms = max(0, load.overdue_ms - round(self._stood_ms))
        return load

    def pause_s(self, load: worker_pb2.Load) -> float:
        """After this load: to the next heartbeat, or to the moment that makes it a hang."""
        left_ms = self._hang_ms - load.overdue_ms
        to_hang_s = left_ms / 1000 if load.overdue_ms and left_ms > 0 else self.heartbeat_s
        pause_s = min(self.heartbeat_s, to_hang_s)
        self._next_s = self._now_s() + pause_s
        return pause_s


async def _converse(
    link: WorkerLink, session: Session, handler: LinkHandler, beat: _Beat, silence_s: float
) -> None:
    sending = asyncio.Lock()  # a stream takes one message at a time
    silence = Silence(silence_s)
    await waits.first_end(
        _receive(link, session, silence),
        _watch(silence, beat.heartbeat_s),
        _send_outputs(link, session, sending),
        _send_load(link, handler, beat, sending),
    )


async def _receive(link: WorkerLink, session: Session, silence: Silence) -> None:
    while True:
        message = await link.receive()  # bounded by _watch
        silence.heard()
        if message.WhichOneof("kind") != "heartbeat":
            session.receive(message)


async def _watch(silence: Silence, pause_s: float) -> None:
    while silence.left_s() > 0:
        await silence.sleep(pause_s)
    raise TimeoutError


async def _send_outputs(link: WorkerLink, session: Session, sending: asyncio.Lock) -> None:
    """As soon as there are any."""
    while True:
        message = worker_pb2.WorkerMessage(outputs=await session.outputs())
        async with sending:
            await link.send(message)


async def _send_load(
    link: WorkerLink, handler: LinkHandler, beat: _Beat, sending: asyncio.Lock
) -> None:
    """At each heartbeat, whatever else is sent, and at once when the worker begins to drain
    (before it refuses what is still placed on it) or to hang."""
    told = False
    while True:
        async with sending:
            told = told or handler.draining.is_set()
            load = beat.corrected(handler.load())
            await link.send(worker_pb2.WorkerMessage(load=load))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(beat.pause_s(load)):
                await (_for_ever() if told else handler.draining.wait())


async def _for_ever() -> None:
    await asyncio.Event().wait()
