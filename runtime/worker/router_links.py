"""The worker's end of a router link: hello, heartbeats, silence, and the messages of each side.

    router ── hello ──▶ attach ──▶ hello
           ── submit, cancel, settled ──▶ Session.receive
           ◀── outputs of a step ── Session.outputs      ◀── load, every heartbeat, and as soon
                                                             as a step makes the worker red, or
                                                             is overdue by `hang_s`

Knows nothing of requests: a `LinkHandler` (the decode or the prefill worker) does. A link that
breaks or falls silent is reported once, by `Session.detach`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.proto import worker_pb2
from baton.runtime import logs, waits
from baton.runtime.links import LINK_PROTOCOL_VERSION, Link, LinkClosed
from baton.runtime.silence import Silence

log = logs.get(__name__)

LinkToRouter = Link[worker_pb2.WorkerMessage, worker_pb2.RouterMessage]


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

    def attach(self, hello: worker_pb2.RouterHello) -> tuple[worker_pb2.WorkerHello, Session]: ...

    def load(self) -> worker_pb2.Load: ...

    def red_in_s(self) -> float:
        """Return the time until the running step makes the worker red; at most 0 if it has,
        infinite if no step runs."""
        ...


@dataclass(frozen=True, slots=True)
class _Beat:
    heartbeat_s: float
    hang_s: float

    def pause_s(self, load: worker_pb2.Load, red_in_s: float) -> float:
        """Return the seconds from this load to the next heartbeat or, if it comes sooner, to the
        moment that makes the worker red, or its step a hang."""
        hang_in_s = self.hang_s - load.overdue_ms / 1000 if load.overdue_ms else 0.0
        return min(in_s for in_s in (self.heartbeat_s, red_in_s, hang_in_s) if in_s > 0)


async def serve_link(
    link: LinkToRouter,
    handler: LinkHandler,
    *,
    heartbeat_s: float,
    silence_s: float,
    hang_s: float,
    attached: Callable[[worker_pb2.RouterHello], None] = lambda hello: None,
    on_heartbeat: Callable[[worker_pb2.Heartbeat], None] = lambda beat: None,
) -> None:
    """Serve one stream until it breaks, falls silent, or this task is cancelled. `hang_s`: so
    long overdue, the worker is left by the router. `attached` is called with an accepted hello,
    `on_heartbeat` with each heartbeat."""
    try:
        async with asyncio.timeout(silence_s):
            first = await link.receive()
    except (LinkClosed, TimeoutError):
        return
    if first.WhichOneof("kind") != "hello":
        log.warning("router refused", reason="its first message is not a hello")
        await link.close()
        return
    if first.hello.protocol_version != LINK_PROTOCOL_VERSION:
        await _refuse_version(link, first.hello)
        return
    answer, session = handler.attach(first.hello)
    attached(first.hello)
    try:
        await link.send(worker_pb2.WorkerMessage(hello=answer))
        beat = _Beat(heartbeat_s, hang_s)
        await _converse(link, session, handler, beat, silence_s, on_heartbeat)
    except (LinkClosed, TimeoutError) as error:
        log.info("router link ended", router=first.hello.router_id, reason=str(error) or "silence")
    finally:
        session.detach()
        await link.close()


async def _refuse_version(link: LinkToRouter, hello: worker_pb2.RouterHello) -> None:
    """The router reads the same from a hello that holds nothing but the version."""
    log.error(
        "router refused",
        router=hello.router_id,
        reason=f"protocol_version is {hello.protocol_version}, this worker's is "
        f"{LINK_PROTOCOL_VERSION}",
        remedy="start routers and workers with the same version of Baton",
    )
    answer = worker_pb2.WorkerHello(protocol_version=LINK_PROTOCOL_VERSION)
    with contextlib.suppress(LinkClosed):
        await link.send(worker_pb2.WorkerMessage(hello=answer))
    await link.close()


async def _converse(
    link: LinkToRouter,
    session: Session,
    handler: LinkHandler,
    beat: _Beat,
    silence_s: float,
    on_heartbeat: Callable[[worker_pb2.Heartbeat], None],
) -> None:
    sending = asyncio.Lock()  # a stream takes one message at a time
    silence = Silence(silence_s)
    await waits.run_until_first_ends(
        _receive(link, session, silence, on_heartbeat),
        _watch(silence, beat.heartbeat_s),
        _send_outputs(link, session, sending),
        _send_load(link, handler, beat, sending),
    )


async def _receive(
    link: LinkToRouter,
    session: Session,
    silence: Silence,
    on_heartbeat: Callable[[worker_pb2.Heartbeat], None],
) -> None:
    while True:
        message = await link.receive()  # bounded by _watch
        silence.record_message()
        if message.WhichOneof("kind") == "heartbeat":
            on_heartbeat(message.heartbeat)
        else:
            session.receive(message)


async def _watch(silence: Silence, pause_s: float) -> None:
    while silence.left_s() > 0:
        await silence.sleep(pause_s)
    raise TimeoutError


async def _send_outputs(link: LinkToRouter, session: Session, sending: asyncio.Lock) -> None:
    """Send outputs as soon as there are any."""
    while True:
        message = worker_pb2.WorkerMessage(outputs=await session.outputs())
        async with sending:
            await link.send(message)


async def _send_load(
    link: LinkToRouter, handler: LinkHandler, beat: _Beat, sending: asyncio.Lock
) -> None:
    """Send the load at each heartbeat, whatever else is sent, and at once when the worker begins
    to hang or to drain, before it refuses requests that are still placed on it."""
    drain_sent = False
    while True:
        async with sending:
            drain_sent = drain_sent or handler.draining.is_set()
            # as of the load: a worker that turns red during the send reports it next
            load, now_s = handler.load(), asyncio.get_running_loop().time()
            next_s = now_s + beat.pause_s(load, handler.red_in_s())
            await link.send(worker_pb2.WorkerMessage(load=load))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(next_s):
                await (_for_ever() if drain_sent else handler.draining.wait())


async def _for_ever() -> None:
    await asyncio.Event().wait()
