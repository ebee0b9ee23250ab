"""The router's link to one worker: kept alive, its outputs passed on, its loss reported.

    connecting ─▶ up ─▶ parked ─▶ up ...       parked: the link broke; for `link_grace_s` its
                   │       └────▶ connecting   requests wait for its return (resume by index)
                   ├─(another boot id)─▶ up    everything of the old boot is void at once
                   ├─▶ hung ─▶ up              its event loop runs, but no step ends: no new work
                   └─▶ quiet ─▶ up             no message for QUIET_SHARE of a silence: no new work

Knows messages and time, no requests: those belong to the LinkListener, which receives outputs and
losses, and names the requests that it still waits for. Both ends send heartbeats; silence ends a
link. All state is owned by the task that runs `run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Protocol

from baton.proto import worker_pb2
from baton.router.fleet.block_watcher import BlockWatcher
from baton.router.fleet.dialer import Backoff, Connection, Dialer, HandshakeLimit, RouterLink
from baton.router.fleet.radix_index import RadixIndex
from baton.router.fleet.unplaced_requests import UnplacedRequests
from baton.router.fleet.wait_estimator import WaitEstimator
from baton.router.fleet.worker_view import BOOT_ID_BYTES, ViewField, handshake_fault
from baton.runtime import logs, metrics, waits
from baton.runtime.config import RouterConfig
from baton.runtime.errors import Overloaded
from baton.runtime.links import LINK_PROTOCOL_VERSION, LinkClosed
from baton.runtime.registry import WorkerRecord
from baton.runtime.silence import Silence

CONNECT_DELAY_S = (0.05, 1.0)  # first and longest wait between attempts to connect
QUIET_SHARE = 0.6  # of the silence that ends a link: a worker that may be frozen gets no new work
QUIET_HEARTBEATS = 2  # at least: a single heartbeat may be late
STABLE_LINK_S = 1.0  # a link that was up for so long resets the delay
FLUSH_TIMEOUT_S = 0.5  # for a worker to read what is queued when its link ends

log = logs.get(__name__)


class LinkListener(Protocol):
    """The owner of the requests that travel on links: the dispatcher."""

    def take(self, link: WorkerLink, outputs: worker_pb2.StepOutputs) -> bool:
        """Accept outputs. Return whether a client's buffer is full, so that clients should get a
        turn of the event loop before more is read."""
        ...

    def pending(self, link: WorkerLink) -> list[worker_pb2.Resume]:
        """Return the requests that still wait for outputs from this link."""
        ...

    def lost(self, link: WorkerLink, request_ids: Iterable[str] | None, reason: str) -> None:
        """Migrate or fail requests that the worker no longer has; None: all of its requests."""
        ...

    def hung(self, link: WorkerLink) -> None:
        """Migrate the requests that wait for a worker that answers and computes nothing."""
        ...


class WorkerLink:
    """`quiet`: no message has come for long. `boot_id` and `worker_hello` are those of the last
    handshake, `refused_reason` is the fault of one that failed. `joined_s` is when the link came
    up, unless it resumed. What was sent since the last load report: `placed_requests` with
    `placed_tokens`, which are computed in `placed_us`. `changed` is called after each change."""

    boot_id = ViewField[bytes]()
    worker_hello = ViewField[worker_pb2.WorkerHello | None]()
    load = ViewField[worker_pb2.Load]()
    up = ViewField[bool]()
    hung = ViewField[bool]()
    quiet = ViewField[bool]()
    refused_reason = ViewField[str | None]()
    placed_tokens = ViewField[int]()
    placed_requests = ViewField[int]()
    placed_us = ViewField[int]()
    hinted = ViewField[tuple[int, int]]()

    def __init__(
        self,
        record: WorkerRecord,
        dialer: Dialer,
        listener: LinkListener,
        config: RouterConfig,
        *,
        index: RadixIndex,
        router_boot_id: bytes,
        vocab_size: int,
        unplaced: UnplacedRequests,
        changed: Callable[[str], None] = lambda worker_id: None,
    ) -> None:
        self.record = record
        self._changed = changed
        self.boot_id = bytes.fromhex(record.boot_id)
        self.worker_hello = None
        self.load = worker_pb2.Load()
        self.up = False
        self.parked = self.hung = self.quiet = False
        self.refused_reason = None
        self.placed_tokens = self.placed_requests = self.placed_us = 0
        self.hinted = (0, 0)
        self._wait_estimator = WaitEstimator()
        self._dialer = dialer
        self._index = index
        self._block_watcher = BlockWatcher(record.worker_id, index)
        self._listener = listener
        self._config = config
        self._router_boot_id = router_boot_id
        # Of this link alone: by an old record's address another one may reach the same process.
        name = record.worker_id.encode()
        self._session_id = blake2b(name, key=router_boot_id, digest_size=BOOT_ID_BYTES).digest()
        self._vocab_size, self._unplaced = vocab_size, unplaced
        self._outbox: asyncio.Queue[worker_pb2.RouterMessage] = asyncio.Queue(
            config.link_queue  # full: the worker has stopped reading
        )
        self._settled: list[str] = []
        self._accepted: dict[str, worker_pb2.Resume] = {}  # by request id, only the last one
        self._resumed: list[worker_pb2.Resume] = []  # in the last hello
        self._up_since_s = self.joined_s = 0.0
        self._silent = False  # how the last link ended
        self._was_up = False
        self._unlinked_reason: str | None = None  # as it was last logged
        self._handshake = HandshakeLimit(config.link_silence_s)

    @property
    def worker_id(self) -> str:
        return self.record.worker_id

    @property
    def takes_work(self) -> bool:
        unhealthy = self.hung or self.quiet or self.load.not_ready_reason
        return self.up and not (unhealthy or self.load.draining)

    def expected_end(self) -> tuple[float, float] | None:
        """Same as `WaitEstimator.expected_end`."""
        return self._wait_estimator.expected_end(self.placed_requests)

    def note_change(self) -> None:
        self._changed(self.worker_id)

    def note_draining(self) -> None:
        """Give the worker no new work until its next load report allows it."""
        self.load.draining = True
        self.note_change()

    def send(self, message: worker_pb2.RouterMessage) -> None:
        """Queue a message. Raises LinkClosed if the link is down, Overloaded if it is stuck."""
        if not self.up:
            raise LinkClosed(f"the link to {self.worker_id} is down")
        try:
            # Settled requests go first: a later attempt may have the same request id.
            self._flush_settled()
            self._outbox.put_nowait(message)
        except asyncio.QueueFull as error:
            raise Overloaded(f"{self.worker_id} does not read its link") from error

    def settle(self, request_id: str) -> None:
        """Let the worker forget a request whose end was received, with the next heartbeat."""
        self._settled.append(request_id)

    def confirm(self, accepted: worker_pb2.Resume) -> None:
        """Let the worker forget all outputs before these indices, with the next heartbeat."""
        self._accepted[accepted.request_id] = accepted

    def _flush_settled(self) -> None:
        if self._settled or self._accepted:
            settled = worker_pb2.Settled(
                request_ids=self._settled, accepted=self._accepted.values()
            )
            self._outbox.put_nowait(worker_pb2.RouterMessage(settled=settled))
            self._settled, self._accepted = [], {}

    async def run(self) -> None:
        """Keep the link until cancelled. In the end all of its requests are reported as lost."""
        backoff = Backoff(*CONNECT_DELAY_S, random.Random(self._router_boot_id + self.boot_id))
        parked_until = 0.0
        clock = asyncio.get_running_loop().time
        try:
            while True:
                connection = self._dialer.connect(self.record.address)
                try:
                    await self._serve(connection, parked_until)
                except (LinkClosed, TimeoutError) as error:
                    reason = str(error) or "silence"
                finally:
                    was_up, self.up = self._was_up, False
                    await connection.close()
                if was_up:
                    self._note_break(reason)
                    parked_until = clock() + self._grace_s()
                    self.parked = True
                    if clock() - self._up_since_s >= STABLE_LINK_S:
                        backoff.reset()
                else:
                    self._note_unlinked(reason)
                pause_s = backoff.next_s()
                if self.parked and clock() + pause_s >= parked_until:
                    await asyncio.sleep(max(0.0, parked_until - clock()))  # it may come back
                    self._give_up(reason)
                await asyncio.sleep(pause_s)  # each attempt waits longer
        finally:
            self.up = False
            self._give_up("the router dropped the worker")

    def _note_break(self, reason: str) -> None:
        metrics.LINKS.labels(self.record.role).dec()
        self._was_up = False
        if self.load.draining:
            log.info("drained worker disconnected", worker_id=self.worker_id)
            return
        metrics.LINK_BREAKS.inc()
        log.warning("link lost", worker_id=self.worker_id, reason=reason)

    def _note_unlinked(self, reason: str) -> None:
        """Log once why there is no link, unless a refusal or a drain was logged."""
        known = self.refused_reason or self.load.draining or reason == self._unlinked_reason
        if not known:
            fields = {"address": self.record.address, "reason": reason}
            log.warning("worker not linked", worker_id=self.worker_id, **fields)
        self._unlinked_reason = reason
        if reason == "silence":
            self._handshake.note_late()

    def _grace_s(self) -> float:
        """Return how long a lost link may come back. That of a draining worker does not, and a
        silence was a grace period already."""
        return 0.0 if self.load.draining or self._silent else self._config.link_grace_s

    def _give_up(self, reason: str) -> None:
        self.parked = False
        if self._was_up:  # cancelled while up
            metrics.LINKS.labels(self.record.role).dec()
            self._was_up = False
        self._index.remove(self.worker_id)
        self._listener.lost(self, None, reason)

    async def _serve(self, connection: Connection, parked_until: float) -> None:
        """Run one link from the handshake to its end. Raises LinkClosed or TimeoutError."""
        config, clock = self._config, asyncio.get_running_loop().time
        left_s = parked_until - clock() if self.parked else None
        link = connection.link()
        try:
            async with asyncio.timeout(self._handshake.within_s(left_s)):
                await link.send(worker_pb2.RouterMessage(hello=self._router_hello()))
                first = await link.receive()
            if first.WhichOneof("kind") != "hello":
                raise LinkClosed(f"the first message of {self.worker_id} was no hello")
            self._accept_hello(first.hello)
            silence = Silence(config.link_silence_s)
            await waits.run_until_first_ends(
                self._receive(link, silence),
                self._write(link),
                self._send_heartbeats(silence),
                self._block_watcher.run(connection, self.boot_id),
            )
        finally:
            self.up = False
            if self._silent:  # migrate its requests at once: closing waits for the worker
                self._listener.lost(self, None, f"{self.worker_id} has been silent too long")
            else:
                await self._flush(link)
            await link.close()

    async def _flush(self, link: RouterLink) -> None:
        """Send what is queued. A router that stops cancels its requests and then its links, and a
        worker that gets no cancel computes for `link_grace_s` what no client receives."""
        with contextlib.suppress(LinkClosed, TimeoutError):
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                while not self._outbox.empty():
                    await link.send(self._outbox.get_nowait())

    def _router_hello(self) -> worker_pb2.RouterHello:
        while not self._outbox.empty():
            self._outbox.get_nowait()  # of the lost link; `pending` names what still counts
        self._resumed = self._listener.pending(self)
        return worker_pb2.RouterHello(
            router_id=self._router_boot_id.hex(),
            boot_id=self._session_id,
            resume=self._resumed,
            protocol_version=LINK_PROTOCOL_VERSION,
        )

    def _accept_hello(self, hello: worker_pb2.WorkerHello) -> None:
        """Link the worker under the boot that its handshake proves, whichever boot the record
        names: what was known of the named one is void. Raises LinkClosed for a hello that cannot
        be true, and for another worker or role: the fleet makes another link as soon as the
        registry names the change."""
        self._check(hello)
        if hello.worker_id != self.worker_id:
            self._give_up("another worker is at its address")
            raise LinkClosed(f"{hello.worker_id} is at the address of {self.worker_id}")
        if hello.role != self.record.role:
            self._give_up("the worker has taken on another role")
            raise LinkClosed(f"{self.worker_id} is a {hello.role} worker now")
        if hello.boot_id != self.boot_id:
            self._index.remove(self.worker_id)
            self._listener.lost(self, None, "the worker was restarted")
            self.boot_id, self.parked = hello.boot_id, False
        self.worker_hello = hello
        self._handshake.reset()
        self._wait_estimator = WaitEstimator()
        self.load = worker_pb2.Load(free_blocks=hello.total_blocks, total_blocks=hello.total_blocks)
        self._up_since_s = asyncio.get_running_loop().time()
        self.joined_s = self.joined_s if self.parked else self._up_since_s
        self.parked = self.hung = self.quiet = self._silent = False
        self.up, self._was_up, self._unlinked_reason = True, True, None
        metrics.LINKS.labels(self.record.role).inc()
        log.info("worker linked", worker_id=self.worker_id, role=self.record.role)
        if hello.unknown_requests:
            unknown = list(hello.unknown_requests)
            self._listener.lost(self, unknown, "the worker no longer has the request")
        self._cancel_unwanted()

    def _check(self, hello: worker_pb2.WorkerHello) -> None:
        """Raises LinkClosed for a fault, which is logged once."""
        fault = handshake_fault(hello, self._vocab_size)
        if fault is not None and fault != self.refused_reason:
            remedy = "start it with this router's model and version"
            log.error("worker refused", worker_id=self.worker_id, reason=fault, remedy=remedy)
        self.refused_reason = fault
        if fault is not None:
            raise LinkClosed(f"the hello of {self.worker_id} is not valid: {fault}")

    def _cancel_unwanted(self) -> None:
        """Cancel what the hello resumed and has ended since: while the link was down, the worker
        could not receive that. Raises LinkClosed if the queue is full."""
        wanted = {(each.request_id, each.attempt): each for each in self._listener.pending(self)}
        for resume in self._resumed:
            cancel = worker_pb2.Cancel(request_id=resume.request_id, attempt=resume.attempt)
            still = wanted.get((resume.request_id, resume.attempt))
            if still is None:
                self._enqueue(worker_pb2.RouterMessage(cancel=cancel))
                self.settle(resume.request_id)
            elif gone := {each.choice for each in resume.next} - {e.choice for e in still.next}:
                cancel.choices.extend(sorted(gone))
                self._enqueue(worker_pb2.RouterMessage(cancel=cancel))
        self._resumed = []

    def _enqueue(self, message: worker_pb2.RouterMessage) -> None:
        """Queue a message. Raises LinkClosed if the worker does not read its link."""
        try:
            self._flush_settled()
            self._outbox.put_nowait(message)
        except asyncio.QueueFull as error:
            raise LinkClosed(f"{self.worker_id} does not read its link") from error

    async def _receive(self, link: RouterLink, silence: Silence) -> None:
        while True:
            message = await link.receive()  # bounded by _send_heartbeats
            silence.record_message()
            self.quiet = False
            kind = message.WhichOneof("kind")
            if kind == "outputs":
                if self._listener.take(self, message.outputs):
                    await asyncio.sleep(0)
            elif kind == "load":
                self._take_load(message.load)

    def _take_load(self, load: worker_pb2.Load) -> None:
        if load.not_ready_reason and not self.load.not_ready_reason:
            reason = load.not_ready_reason
            log.warning("worker not ready", worker_id=self.worker_id, reason=reason)
        self.load = load
        self._wait_estimator.report(load, asyncio.get_running_loop().time())
        self.placed_tokens = self.placed_requests = self.placed_us = 0
        before, self.hung = self.hung, load.overdue_ms >= self._config.hang_s * 1000
        if self.hung and not before:
            log.warning("worker hung", worker_id=self.worker_id, overdue_ms=load.overdue_ms)
            metrics.HANGS.labels(self.record.role).inc()
            self._listener.hung(self)
        elif before and not self.hung:
            log.info("worker recovered", worker_id=self.worker_id)

    async def _write(self, link: RouterLink) -> None:
        while True:
            message = await self._outbox.get()  # bounded by the heartbeats
            async with asyncio.timeout(self._config.link_silence_s):
                await link.send(message)

    async def _send_heartbeats(self, silence: Silence) -> None:
        beat_s = self._config.link_heartbeat_s
        quiet_s = max(QUIET_SHARE * self._config.link_silence_s, QUIET_HEARTBEATS * beat_s)
        while True:
            if silence.left_s() <= 0:
                self._silent = True
                raise LinkClosed(f"{self.worker_id} has been silent too long")
            to_quiet_s = quiet_s - silence.so_far_s()
            if to_quiet_s <= 0 and not self.quiet:
                log.warning("worker silent", worker_id=self.worker_id, seconds=quiet_s)
            self.quiet = to_quiet_s <= 0
            self._enqueue(self._unplaced.heartbeat())
            await silence.sleep(beat_s if self.quiet else min(beat_s, to_quiet_s))
