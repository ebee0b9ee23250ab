"""The reader's stream and lease: one task sends, one receives, and a third closes in order.

The session knows no blocks: it passes messages to the handoff's reader, which owns it. Calls on the
link are never cancelled while the stream is needed, because gRPC would end it: leaving sets a
flag, and a task of the session sends `closed` after the last READ has settled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from baton.kv_transfer.lease import ReaderLease
from baton.proto import handoff_pb2
from baton.runtime import waits
from baton.runtime.config import HandoffConfig
from baton.runtime.errors import HandoffError, LeaseLost, by_code
from baton.runtime.links import Link, LinkClosed

ReaderLink = Link[handoff_pb2.ReaderMessage, handoff_pb2.GranterMessage]

CLOSE_TIMEOUT_S = 0.5  # for the granter to end the stream after `closed`


class ReaderSession:
    """The stream of one handoff. After the opening, `on_message` gets every message except
    `opened`, `acknowledged` and `failed`; `on_failure` gets the errors that end the handoff,
    possibly several."""

    def __init__(
        self,
        link: ReaderLink,
        config: HandoffConfig,
        on_message: Callable[[handoff_pb2.GranterMessage], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._link = link
        self._lease_s = config.lease_s
        self._lease = ReaderLease(config.lease_s)
        self._on_message = on_message
        self._on_failure = on_failure
        self._leaving = False
        self._awake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._speaker: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._give_up_at = 0.0  # the alarm's time
        self.opened_at: float | None = None

    def start(self, opening: handoff_pb2.OpenHandoff) -> None:
        """Open the handoff; the opening is the lease's first renewal."""
        now = _now()
        self._lease.renewal(now)
        self._give_up_at = now + self._lease_s
        self._alarm = asyncio.get_running_loop().call_at(self._give_up_at, self._watch_lease)
        self._speaker = asyncio.create_task(self._speak(opening))
        self._listener = asyncio.create_task(self._listen())

    def trusted(self) -> bool:
        """Return whether bytes that have landed by now may be used (I2, I3)."""
        return self._lease.trusted(_now())

    def leave(self, unsettled: Sequence[asyncio.Future[None]]) -> asyncio.Task[None]:
        """End the session after the fetch. `closed` waits for `unsettled`, the READs that may still
        land, and is never sent if the lease ends first. Returns the task of the stream's end."""
        self._leaving = True
        self._wake_speaker()
        if self._alarm is not None:
            self._alarm.cancel()
        self._closing = asyncio.create_task(self._close(list(unsettled)))
        return self._closing

    async def finished(self) -> None:
        """Wait for the stream's end, bounded by the lease and CLOSE_TIMEOUT_S. Ends a stream that
        was never used: its granter would wait for the opening."""
        await waits.done_within(self._closing or self.leave([]))

    async def _speak(self, opening: handoff_pb2.OpenHandoff) -> None:
        try:
            await self._link.send(handoff_pb2.ReaderMessage(open=opening))
            while not self._leaving:
                now = _now()
                if self._lease.due(now):
                    renew = handoff_pb2.Renew(n=self._lease.renewal(now))
                    await self._link.send(handoff_pb2.ReaderMessage(renew=renew))
                else:
                    self._awake = asyncio.get_running_loop().create_future()
                    await waits.done_within(self._awake, self._lease.due_at - now)
        except LinkClosed as error:
            self._on_failure(error)

    def _wake_speaker(self) -> None:
        """End its wait for the next renewal: this falls due earlier, or the session ends."""
        if not self._awake.done():
            self._awake.set_result(None)

    async def _listen(self) -> None:
        while True:
            try:
                message = await self._link.receive()
            except LinkClosed as error:
                self._on_failure(error)
                return
            if not self._leaving:
                try:
                    self._take(message)
                except Exception as error:  # invalid message, or a failed callback
                    self._on_failure(error)

    def _take(self, message: handoff_pb2.GranterMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "failed":
            raise by_code(message.failed.code, message.failed.detail)
        if kind == "opened":
            self._take_opened(message.opened)
        elif self.opened_at is None or kind is None:
            raise HandoffError(f"the granter began with {kind or 'an unknown message'}")
        elif kind == "acknowledged":
            if self._lease.acknowledged(message.acknowledged.n):
                self._set_alarm()
        else:
            self._on_message(message)

    def _take_opened(self, opened: handoff_pb2.Opened) -> None:
        if self.opened_at is not None or opened.lease_ms == 0:
            raise HandoffError("the granter opened twice, or with a lease of 0")
        self.opened_at = _now()
        due_at = self._lease.due_at
        self._lease.shorten(opened.lease_ms / 1000)
        if self._lease.due_at < due_at:
            self._wake_speaker()
        self._lease.acknowledged(0)
        self._set_alarm()

    def _set_alarm(self) -> None:
        until = self._lease.trusted_until
        if until is None or self._alarm is None:
            return
        self._give_up_at = until
        if until < self._alarm.when():  # an earlier alarm is set again when it fires
            self._alarm.cancel()
            self._alarm = asyncio.get_running_loop().call_at(until, self._watch_lease)

    def _watch_lease(self) -> None:
        if _now() < self._give_up_at:  # renewed, or a clock tick early
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_at(self._give_up_at, self._watch_lease)
        elif self.opened_at is None:
            self._on_failure(LeaseLost(f"no answer to the opening in {self._lease_s:g} s"))
        else:
            self._on_failure(LeaseLost("the lease ran out: the granter is dead, paused or cut off"))

    async def _close(self, unsettled: list[asyncio.Future[None]]) -> None:
        """Send `closed` if all READs settle in time, wait for the granter to end the stream, and
        end it."""
        until = self._lease.trusted_until or self._give_up_at
        tasks = [task for task in (self._speaker, self._listener) if task is not None]
        try:
            if self._speaker is not None and self._listener is not None:
                waited: list[asyncio.Future[None]] = [self._speaker, *unsettled]
                until = until if until > _now() else _now() + CLOSE_TIMEOUT_S
                for future in waited:
                    await waits.done_within(future, until - _now())
                if all(future.done() for future in waited) and not self._listener.done():
                    await self._send_closed()
                    await waits.done_within(self._listener, CLOSE_TIMEOUT_S)
        finally:
            await waits.cancel_all(tasks)
            await self._link.close()
            del self._on_message, self._on_failure  # bound methods of the session's owner

    async def _send_closed(self) -> None:
        """Send `closed`. If it cannot be sent in time, the granter's lease ends the handoff."""
        with contextlib.suppress(LinkClosed, TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._link.send(handoff_pb2.ReaderMessage(closed=handoff_pb2.Closed()))


def _now() -> float:
    return asyncio.get_running_loop().time()
