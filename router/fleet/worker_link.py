"""One worker as the router sees it: its link kept alive, its outputs passed on, its death told.

    connecting ─▶ up ─▶ parked ─▶ up ...       parked: the link broke; for `link_grace_s` its
                   │       └────▶ connecting   requests wait for it to come back (resume by index)
                   ├─(another boot id)─▶ up    everything of the old boot is void at once
                   ├─▶ hung ─▶ up              its loop lives, but no step ends: nothing new there
                   └─▶ quiet ─▶ up             no word for QUIET_SHARE of a silence: likewise

Knows messages and time, no requests: those are the Bearer's, which is told of outputs and of
losses and answers what it still waits for. Both ends heartbeat; silence ends a link. All state
is owned by the task that runs `run`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Protocol

from baton.proto import worker_pb2
from baton.router.fleet.backoff import Backoff
from baton.router.fleet.dialer import Connection, Dialer, RouterLink
from baton.router.fleet.observed import Observed
from baton.router.fleet.radix_index import RadixIndex, snapshot_slices
from baton.router.fleet.wait_estimator import Pace
from baton.router.fleet.worker_handshake import BOOT_ID_BYTES, fault
from baton.runtime import logs, metrics, waits
from baton.runtime.config import RouterConfig
from baton.runtime.errors import Overloaded
from baton.runtime.links import LINK_PROTOCOL_VERSION, LinkClosed
from baton.runtime.registry import WorkerRecord
from baton.runtime.silence import Silence

WATCH_RETRY_S = 0.5
RETRY_S = (0.05, 1.0)  # first and longest wait between attempts to connect
QUIET_SHARE = 0.6  # of the silence that ends a link: what may be frozen takes no new work
QUIET_BEATS = 2  # but a single heartbeat may be late
STEADY_S = 1.0  # a link that was up for so long does not flap

log = logs.get(__name__)


class Bearer(Protocol):
    """Who bears the requests that travel on links: the dispatcher."""

    def take(self, link: WorkerLink, outputs: worker_pb2.StepOutputs) -> bool:
        """Whether clients should have a turn before more is read: a buffer of theirs is full."""
        ...

    def pending(self, link: WorkerLink) -> list[worker_pb2.Resume]: ...

    def lost(self, link: WorkerLink, request_ids: Iterable[str] | None, reason: str) -> None:
        """These requests are not on the worker any more; None: none of its requests is."""
        ...

    def hung(self, link: WorkerLink) -> None:
        """The worker answers, and computes nothing: what waits for it goes elsewhere."""
        ...


class WorkerLink:
    """`up` is true while the link is; `quiet`: for long nothing has come on it; `boot_id` and
    `welcome` are those of the last welcome; `refused`: why the last one was not taken, if so.
    `placed_tokens` and `placed_requests` count what was sent since the last load report.
    `vocab_size` is that of the router's model. `changed` hears of every change of what placement
    knows of the worker."""

    boot_id = Observed[bytes]()
    welcome = Observed[worker_pb2.WorkerWelcome | None]()
    load = Observed[worker_pb2.Load]()
    up = Observed[bool]()
    hung = Observed[bool]()
    quiet = Observed[bool]()
    refused = Observed[str]()
    placed_tokens = Observed[int]()
    placed_requests = Observed[int]()

    def __init__(
        self,
        record: WorkerRecord,
        dialer: Dialer,
        index: RadixIndex,
        bearer: Bearer,
        config: RouterConfig,
        router_boot_id: bytes,
        vocab_size: int,
        changed: Callable[[str], None] = lambda worker_id: None,
    ) -> None:
        self.record = record
        self._changed = changed
        self.boot_id = bytes.fromhex(record.boot_id)
        self.welcome = None
        self.load = worker_pb2.Load()
        self.up = False
        self.parked = False
        self.hung = False
        self.quiet = False
        self.refused = ""
        self.placed_tokens = 0
        self.placed_requests = 0
        self._pace = Pace()
        self._dialer = dialer
        self._index = index
        self._bearer = bearer
        self._config = config
        self._router_boot_id = router_boot_id
        # of this link alone: another one may lead to the same process, by an old record's address
        name = record.worker_id.encode()
        self._session_id = blake2b(name, key=router_boot_id, digest_size=BOOT_ID_BYTES).digest()
        self._vocab_size = vocab_size
        self._outbox: asyncio.Queue[worker_pb2.RouterMessage] = asyncio.Queue(
            config.link_queue  # if they pile up, the worker has stopped reading
        )
        self._settled: list[str] = []
        self._accepted: dict[str, worker_pb2.Resume] = {}  # by request id, the last word alone
        self._named: list[worker_pb2.Resume] = []  # in the last hello
        self._up_s = 0.0  # since then
        self._silent = False  # how the last link ended
        self._was_up = False

    @property
    def worker_id(self) -> str:
        return self.record.worker_id

    @property
    def takes_work(self) -> bool:
        ill = self.hung or self.quiet or self.load.trouble
        return self.up and not (ill or self.load.draining)

    def line(self) -> tuple[float, float] | None:
        """See `Pace.line`."""
        return self._pace.line(self.placed_requests)

    def note_change(self) -> None:
        self._changed(self.worker_id)

    def note_draining(self) -> None:
        """It takes nothing new, until its next report says otherwise."""
        self.load.draining = True
        self.note_change()

    def send(self, message: worker_pb2.RouterMessage) -> None:
        """Queue a message. Raises LinkClosed if the link is down, Overloaded if it is stuck."""
        if not self.up:
            raise LinkClosed(f"the link to {self.worker_id} is down")
        try:
            # what is settled goes first: a later attempt may have the same request id
            self._flush_settled()
            self._outbox.put_nowait(message)
        except asyncio.QueueFull as error:
            raise Overloaded(f"{self.worker_id} does not read its link") from error

    def settle(self, request_id: str) -> None:
        """The end of this request was seen: the worker may forget it, with the next heartbeat."""
        self._settled.append(request_id)

    def confirm(self, accepted: worker_pb2.Resume) -> None:
        """All before these indices was accepted: the worker may forget that, with the next
        heartbeat."""
        self._accepted[accepted.request_id] = accepted

    def _flush_settled(self) -> None:
        if self._settled or self._accepted:
            settled = worker_pb2.Settled(
                request_ids=self._settled, accepted=self._accepted.values()
            )
            self._outbox.put_nowait(worker_pb2.RouterMessage(settled=settled))
            self._settled, self._accepted = [], {}

    async def run(self) -> None:
        """Keep the link until cancelled. Everything on it is lost at the end."""
        backoff = Backoff(*RETRY_S, random.Random(self._router_boot_id + self.boot_id))
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
                    if clock() - self._up_s >= STEADY_S:
                        backoff.reset()
                pause_s = backoff.next_s()
                if self.parked and clock() + pause_s >= parked_until:
                    await asyncio.sleep(max(0.0, parked_until - clock()))
                    self._give_up(reason)
                await asyncio.sleep(pause_s)
        finally:
            self.up = False
            self._give_up("the router let the worker go")

    def _note_break(self, reason: str) -> None:
        metrics.LINKS.labels(self.record.role).dec()
        self._was_up = False
        if self.load.draining:
            log.info("a drained worker has left", worker_id=self.worker_id)
            return
        metrics.LINK_BREAKS.inc()
        log.warning("link broken", worker_id=self.worker_id, reason=reason)

    def _grace_s(self) -> float:
        """How long a broken link may come back: one that drains does not, and a silence was
        a grace already."""
        return 0.0 if self.load.draining or self._silent else self._config.link_grace_s

    def _give_up(self, reason: str) -> None:
        self.parked = False
        if self._was_up:  # cancelled while up
            metrics.LINKS.labels(self.record.role).dec()
            self._was_up = False
        self._index.remove(self.worker_id)
        self._bearer.lost(self, None, reason)

    async def _serve(self, connection: Connection, parked_until: float) -> None:
        """One link from hello to its end. Raises LinkClosed or TimeoutError."""
        config, clock = self._config, asyncio.get_running_loop().time
        patience_s = config.link_silence_s
        if self.parked:
            patience_s = max(0.01, min(patience_s, parked_until - clock()))
        link = connection.link()
        try:
            async with asyncio.timeout(patience_s):
                await link.send(worker_pb2.RouterMessage(hello=self._hello()))
                first = await link.receive()
            if first.WhichOneof("kind") != "welcome":
                raise LinkClosed(f"{self.worker_id} did not begin with a welcome")
            self._welcomed(first.welcome)
            silence = Silence(config.link_silence_s)
            await waits.first_end(
                self._receive(link, silence),
                self._write(link),
                self._beat(silence),
                self._watch(connection),
            )
        finally:
            self.up = False
            if self._silent:  # the silence was its requests' grace, and closing waits for a word
                self._bearer.lost(self, None, f"{self.worker_id} has been silent too long")
            await link.close()

    def _hello(self) -> worker_pb2.RouterHello:
        while not self._outbox.empty():
            self._outbox.get_nowait()  # of the broken link; `pending` tells what still counts
        self._named = self._bearer.pending(self)
        return worker_pb2.RouterHello(
            router_id=self._router_boot_id.hex(),
            boot_id=self._session_id,
            resume=self._named,
            protocol_version=LINK_PROTOCOL_VERSION,
        )

    def _welcomed(self, welcome: worker_pb2.WorkerWelcome) -> None:
        """Raises LinkClosed for a welcome that cannot be true, and for another worker, or one of
        another role: the link is the record's, and the fleet makes another one as soon as the
        registry tells of the change."""
        self._check(welcome)
        if welcome.worker_id != self.worker_id:
            self._give_up("another worker is at its address")
            raise LinkClosed(f"{welcome.worker_id} is at the address of {self.worker_id}")
        if welcome.role != self.record.role:
            self._give_up("the worker has taken on another role")
            raise LinkClosed(f"{self.worker_id} is a {welcome.role} worker by now")
        if welcome.boot_id != self.boot_id:
            self._index.remove(self.worker_id)
            self._bearer.lost(self, None, "the worker was started anew")
            self.boot_id = welcome.boot_id
        self.welcome = welcome
        self._pace = Pace()
        self.load = worker_pb2.Load(
            free_blocks=welcome.total_blocks, total_blocks=welcome.total_blocks
        )
        self._up_s = asyncio.get_running_loop().time()
        self.parked = self.hung = self.quiet = self._silent = False
        self.up = self._was_up = True
        metrics.LINKS.labels(self.record.role).inc()
        log.info("link up", worker_id=self.worker_id, role=self.record.role)
        if welcome.lost:
            self._bearer.lost(self, list(welcome.lost), "the worker does not hold it any more")
        self._cancel_unwanted()

    def _check(self, welcome: worker_pb2.WorkerWelcome) -> None:
        """Raises LinkClosed; the log is told once of each fault."""
        found = fault(welcome, self._vocab_size)
        if found and found != self.refused:
            log.error(
                "worker refused: its welcome cannot be true",
                worker_id=self.worker_id,
                why=found,
                remedy="start it with this router's model and version",
            )
        self.refused = found
        if found:
            raise LinkClosed(f"the welcome of {self.worker_id} cannot be true: {found}")

    def _cancel_unwanted(self) -> None:
        """What the hello named and has ended since: while the link was down, nobody could tell
        the worker. Raises LinkClosed if there is too much of it."""
        wanted = {(each.request_id, each.attempt): each for each in self._bearer.pending(self)}
        for resume in self._named:
            cancel = worker_pb2.Cancel(request_id=resume.request_id, attempt=resume.attempt)
            still = wanted.get((resume.request_id, resume.attempt))
            if still is None:
                self._enqueue(worker_pb2.RouterMessage(cancel=cancel))
                self.settle(resume.request_id)
            elif gone := {each.choice for each in resume.next} - {e.choice for e in still.next}:
                cancel.choices.extend(sorted(gone))
                self._enqueue(worker_pb2.RouterMessage(cancel=cancel))
        self._named = []

    def _enqueue(self, message: worker_pb2.RouterMessage) -> None:
        """As `send`, but who does not read loses the link."""
        try:
            self._flush_settled()
            self._outbox.put_nowait(message)
        except asyncio.QueueFull as error:
            raise LinkClosed(f"{self.worker_id} does not read its link") from error

    async def _receive(self, link: RouterLink, silence: Silence) -> None:
        while True:
            message = await link.receive()  # bounded by _beat, which watches the silence
            silence.heard()
            self.quiet = False
            kind = message.WhichOneof("kind")
            if kind == "outputs":
                if self._bearer.take(self, message.outputs):
                    await asyncio.sleep(0)
            elif kind == "load":
                self._take_load(message.load)

    def _take_load(self, load: worker_pb2.Load) -> None:
        if load.trouble and not self.load.trouble:
            log.warning("worker is not ready", worker_id=self.worker_id, why=load.trouble)
        self.load = load
        self._pace.report(load, asyncio.get_running_loop().time())
        self.placed_tokens = self.placed_requests = 0
        before, self.hung = self.hung, load.overdue_ms >= self._config.hang_s * 1000
        if self.hung and not before:
            log.warning("worker hangs", worker_id=self.worker_id, overdue_ms=load.overdue_ms)
            metrics.HANGS.labels(self.record.role).inc()
            self._bearer.hung(self)
        elif before and not self.hung:
            log.info("worker computes again", worker_id=self.worker_id)

    async def _write(self, link: RouterLink) -> None:
        while True:
            message = await self._outbox.get()  # wakes for heartbeats at the latest
            async with asyncio.timeout(self._config.link_silence_s):
                await link.send(message)

    async def _beat(self, silence: Silence) -> None:
        config = self._config
        quiet_s = max(QUIET_SHARE * config.link_silence_s, QUIET_BEATS * config.link_heartbeat_s)
        while True:
            if silence.left_s() <= 0:
                self._silent = True
                raise LinkClosed(f"{self.worker_id} has been silent too long")
            to_quiet_s = quiet_s - silence.so_far_s()
            if to_quiet_s <= 0 and not self.quiet:
                log.warning("worker is quiet", worker_id=self.worker_id, seconds=quiet_s)
            self.quiet = to_quiet_s <= 0
            self._enqueue(worker_pb2.RouterMessage(heartbeat=worker_pb2.Heartbeat()))
            pause_s = config.link_heartbeat_s
            await silence.sleep(pause_s if self.quiet else min(pause_s, to_quiet_s))

    async def _watch(self, connection: Connection) -> None:
        """Feed the index while the link is up; a gap or a broken stream begins anew."""
        while True:
            try:
                async for events in connection.watch_blocks():
                    if events.boot_id != self.boot_id:
                        raise LinkClosed("block events of another boot")
                    if not await self._apply(events):
                        log.warning("gap in block events", worker_id=self.worker_id)
                        break
            except LinkClosed:
                log.info("block events ended", worker_id=self.worker_id)
            self._index.remove(self.worker_id)
            await asyncio.sleep(WATCH_RETRY_S)

    async def _apply(self, events: worker_pb2.BlockEvents) -> bool:
        """Into the index; a large part of a snapshot in slices, between which tokens pass."""
        parts = snapshot_slices(events)
        for part in parts:
            if not self._index.apply(self.worker_id, part):
                return False
            if len(parts) > 1:
                await asyncio.sleep(0)
        return True
