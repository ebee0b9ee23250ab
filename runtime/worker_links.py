"""The worker's end of a router link: hello, heartbeats, silence, and who sends what.

    router ── hello ──▶ attach ──▶ welcome
           ── submit, cancel, settled ──▶ Session.receive
           ◀── outputs of a step ── Session.outputs      ◀── load, every heartbeat

Knows nothing of requests: a `LinkHandler` (the decode or the prefill worker) does. A link that
breaks or falls silent is reported once, by `Session.detach`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Protocol

from baton.proto import worker_pb2
from baton.runtime import logs
from baton.runtime.links import Link, LinkClosed

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
    link: WorkerLink, handler: LinkHandler, *, heartbeat_s: float, silence_s: float
) -> None:
    """Serve one stream until it breaks, falls silent, or this task is cancelled."""
    try:
        first = await asyncio.wait_for(link.receive(), silence_s)
    except (LinkClosed, TimeoutError):
        return
    if first.WhichOneof("kind") != "hello":
        log.warning("a router's first message is not a hello; the link is closed")
        await link.close()
        return
    welcome, session = handler.attach(first.hello)
    try:
        await link.send(worker_pb2.WorkerMessage(welcome=welcome))
        await _converse(link, session, handler, heartbeat_s, silence_s)
    except (LinkClosed, TimeoutError) as error:
        log.info("router link ended", router=first.hello.router_id, reason=str(error) or "silence")
    finally:
        session.detach()
        await link.close()


async def _converse(
    link: WorkerLink, session: Session, handler: LinkHandler, heartbeat_s: float, silence_s: float
) -> None:
    tasks = [
        asyncio.create_task(_receive(link, session, silence_s)),
        asyncio.create_task(_send(link, session, handler, heartbeat_s)),
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError, LinkClosed, TimeoutError):
                await task


async def _receive(link: WorkerLink, session: Session, silence_s: float) -> None:
    while True:
        message = await asyncio.wait_for(link.receive(), silence_s)
        if message.WhichOneof("kind") != "heartbeat":
            session.receive(message)


async def _send(
    link: WorkerLink, session: Session, handler: LinkHandler, heartbeat_s: float
) -> None:
    """Outputs as soon as there are any; load at each heartbeat, whatever else is sent, and at
    once when the worker begins to drain: before it refuses what is still placed on it."""
    loop = asyncio.get_running_loop()
    next_load = loop.time()
    waiting = asyncio.create_task(session.outputs())
    draining = asyncio.create_task(handler.draining.wait())
    told = False
    try:
        while True:
            watched: set[asyncio.Task[Any]] = {waiting} if told else {waiting, draining}
            patience_s = max(0.0, next_load - loop.time())
            await asyncio.wait(watched, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if loop.time() >= next_load or (draining.done() and not told):
                told = draining.done()
                await link.send(worker_pb2.WorkerMessage(load=handler.load()))
                next_load = loop.time() + heartbeat_s
            if waiting.done():
                outputs = waiting.result()
                waiting = asyncio.create_task(session.outputs())
                await link.send(worker_pb2.WorkerMessage(outputs=outputs))
    finally:
        waiting.cancel()
        draining.cancel()
