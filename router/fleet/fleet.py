"""The fleet: every worker that the registry names, each with its link; what they can do now.

The registry is a hint of who exists; a worker is alive while its link is. A worker that the
registry has forgotten is let go once its link is down; its size is remembered for a while. Owns
the links, the index and the circuits. Knows no requests: those are the dispatcher's, which is the
links' Bearer.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from baton.proto import worker_pb2
from baton.router.fleet.circuits import Circuits
from baton.router.fleet.dialer import Dialer
from baton.router.fleet.disconnected_workers import Absent
from baton.router.fleet.kv_compatibility import misfits
from baton.router.fleet.radix_index import Holders, RadixIndex
from baton.router.fleet.registry_watcher import Announced
from baton.router.fleet.roster import Roster
from baton.router.fleet.worker_link import Bearer, WorkerLink
from baton.router.fleet.worker_view import Numbers, Shape, Size, WorkerView
from baton.router.requests.validator import Limits
from baton.runtime import logs, metrics
from baton.runtime.config import RouterConfig
from baton.runtime.identity import chain, root
from baton.runtime.registry import WorkerRecord
from baton.runtime.registry_client import RegistryClient
from baton.runtime.wire import degraded_peers

POLL_S = 0.5
LINK_S = 1.0
UNTOLD = "what the workers hold in their caches is not known yet"

log = logs.get(__name__)


class Fleet:
    """`key` is the cluster's identity key; `limits` those of the model itself; `boot_id`: 16
    random bytes."""

    def __init__(
        self,
        registry: RegistryClient,
        dialer: Dialer,
        config: RouterConfig,
        key: bytes,
        limits: Limits,
        boot_id: bytes | None = None,
    ) -> None:
        self._announced = Announced(registry)
        self._dialer = dialer
        self._config = config
        self._key = key
        self._limits = limits
        self._boot_id = boot_id or secrets.token_bytes(16)
        self._links: dict[str, WorkerLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._absent = Absent(config.handed_back_s)
        self._mixture: dict[Numbers, list[str]] = {}  # as the log was last told
        self._misfits: dict[str, str] = {}  # likewise
        self._rebuilt = False
        self._roster = Roster(config.max_waiting)
        self._changed: dict[str, None] = {}  # workers, since the roster was last asked for
        self._presence: dict[str, tuple[bool, bool, bytes, Size | None]] = {}
        # what follows from presence, and until when; None: look again
        self._passed_over: tuple[frozenset[bytes], int, float] | None = None
        self._away: tuple[list[Size], float] | None = None
        self.index = RadixIndex(config.index_blocks, self._note_change)
        self.circuits = Circuits(random.Random(self._boot_id))

    async def run(self, bearer: Bearer) -> None:
        """Follow the registry until cancelled, then close every link."""
        try:
            while True:
                self._follow(await self._announced.workers(), bearer)
                self.rebuilt()  # though nobody asks: who comes later is not waited for
                self._tell_mixture()
                self._judge()
                self._count_degraded()
                self._tell_misfits()
                self.index.sweep()
                await asyncio.sleep(POLL_S)
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _follow(self, records: Sequence[WorkerRecord], bearer: Bearer) -> None:
        named = {record.worker_id: record for record in records}
        for worker_id, link in list(self._links.items()):
            record = named.get(worker_id)
            task = self._tasks[worker_id]
            if task.done():  # a bug in the link itself; it is told, and the worker linked anew
                log.error("link task ended", worker_id=worker_id, error=repr(task.exception()))
                self._drop(worker_id)
                continue
            forgotten = record is None and not link.up and not link.parked
            if forgotten or (record is not None and _replaced(link, record)):
                self._drop(worker_id)
        for worker_id, record in named.items():
            if worker_id not in self._links:
                self._absent.announced(worker_id, record.role, _now())
                self._away = None
                link = WorkerLink(
                    record,
                    self._dialer,
                    self.index,
                    bearer,
                    self._config,
                    self._boot_id,
                    self._limits.vocab_size,
                    self._note_change,
                )
                self._links[worker_id] = link
                self._tasks[worker_id] = asyncio.create_task(link.run(), name=f"link {worker_id}")

    def _tell_mixture(self) -> None:
        """Say so, once for each such fleet, where decode workers would answer differently."""
        found: dict[Numbers, list[str]] = {}
        for link in self._links.values():
            if link.up and link.welcome is not None and link.record.role == "decode":
                numbers = (link.welcome.model_fingerprint, link.welcome.kv_dtype)
                found.setdefault(numbers, []).append(link.worker_id)
        if len(found) > 1 and found != self._mixture:
            log.warning(
                "decode workers compute different numbers: answers depend on the worker",
                workers={" ".join(numbers): names for numbers, names in found.items()},
                remedy="the same model, settings and kind of machine for all; until then an "
                "answer that has begun goes on among workers of its own kind alone",
            )
        self._mixture = found

    def _judge(self) -> None:
        """Compare the workers of each role by their steps, and forget those that are gone."""
        now_s = _now()
        for role in ("prefill", "decode"):
            links = [e for e in self._links.values() if e.takes_work and e.record.role == role]
            step_ms = {link.boot_id: link.load.step_ms for link in links}
            busy = [link.boot_id for link in links if link.load.running]
            self.circuits.compare(step_ms, busy, now_s)
        self.circuits.keep([link.boot_id for link in self._links.values()])
        for state, count in self.circuits.counts(now_s).items():
            metrics.CIRCUITS.labels(state).set(count)

    def _count_degraded(self) -> None:
        """Show the pairs that placement avoids: those whose both ends are linked."""
        views = self.roster().views()
        linked = {view.boot_id for view in views}
        metrics.DEGRADED_PAIRS.set(sum(len(view.degraded & linked) for view in views))

    def _tell_misfits(self) -> None:
        """Say so, once for each such fleet, where prefill workers cannot be used."""
        found = misfits(self._shapes("prefill"), self._shapes("decode"))
        if found and found != self._misfits:
            log.error(
                "prefill workers whose KV no decode worker can take are not used",
                workers=found,
                remedy="the same model, dtype, pool settings and kind of machine for all",
            )
        self._misfits = found

    def _shapes(self, role: str) -> dict[str, Shape]:
        """Of the linked workers that take work."""
        return {
            link.worker_id: _shape(link.welcome)
            for link in self._links.values()
            if link.takes_work and link.welcome is not None and link.record.role == role
        }

    def _drop(self, worker_id: str) -> None:
        welcome = self._links.pop(worker_id).welcome
        if welcome is not None and welcome.role == "decode":
            self._absent.left(worker_id, _size(welcome), _now())
        self._away = None
        self._note_change(worker_id)
        self._tasks.pop(worker_id).cancel()

    def _note_change(self, worker_id: str) -> None:
        if not self._changed:  # in a turn of its own: no request should wait for all that changed
            asyncio.get_running_loop().call_soon(lambda: self.roster())
        self._changed[worker_id] = None

    def link(self, worker_id: str) -> WorkerLink | None:
        return self._links.get(worker_id)

    def of_boot(self, boot_id: bytes) -> WorkerLink | None:
        return next((link for link in self._links.values() if link.boot_id == boot_id), None)

    def room(self) -> int:
        """How many requests more the lines of the decode workers that take work have room for."""
        return self.roster().room

    def roster(self) -> Roster:
        """The linked workers as they are now; what has changed is looked at again."""
        for worker_id in self._changed:
            link = self._links.get(worker_id)
            self._note_presence(worker_id, link)
            if link is None or not link.up:
                self._roster.remove(worker_id)
            else:
                view = view_of(link, self.index.bit(worker_id))
                if view != self._roster.get(worker_id):
                    self._roster.put(view)
        self._changed.clear()
        return self._roster

    def _note_presence(self, worker_id: str, link: WorkerLink | None) -> None:
        """Look again who is away, and who is passed over, where workers have come or gone."""
        before = self._presence.pop(worker_id, None)
        now = None
        if link is not None:
            now = self._presence[worker_id] = (
                link.up,
                link.refused != "",
                link.boot_id,
                None if link.welcome is None else _size(link.welcome),
            )
        if now != before:
            self._away = self._passed_over = None

    def views(self) -> list[WorkerView]:
        """Every linked worker."""
        return self.roster().views()

    def passed_over(self) -> frozenset[bytes]:
        """The boot ids of linked workers that get nothing now, unless there are no others."""
        self.roster()
        now_s, version = _now(), self.circuits.version
        kept = self._passed_over
        if kept is None or kept[1] != version or now_s >= kept[2]:
            roles = {e.boot_id: e.record.role for e in self._links.values() if e.up}
            found = self.circuits.passed_over(roles, now_s)
            kept = self._passed_over = (found, version, self.circuits.change_s(now_s))
        return kept[0]

    def away(self) -> list[Size]:
        """Of the decode workers that are not linked now and may come back: those that the
        registry names, and those that have left within `router.handed_back_s`. What was refused
        as no worker of this model is none."""
        self.roster()
        now_s, kept = _now(), self._away
        if kept is None or now_s >= kept[1]:
            sizes = self._absent.sizes(now_s)
            for worker_id, link in self._links.items():
                welcome = link.welcome
                if welcome is not None or link.refused:
                    sizes.pop(worker_id, None)
                gone = not (link.up or link.refused)
                if gone and welcome is not None and welcome.role == "decode":
                    sizes[worker_id] = _size(welcome)
            kept = self._away = ([*sizes.values()], self._absent.change_s())
        return kept[0]

    def holders(
        self, tokens: Sequence[int], salt: bytes, known: dict[Shape, list[bytes]]
    ) -> Callable[[Shape], Holders]:
        """Return who holds leading blocks of `tokens`, by the shape of the workers. `known` keeps
        the blocks' identities for the next call with the same tokens and salt."""

        @cache
        def of(shape: Shape) -> Holders:
            if shape not in known:
                parent = root(self._key, shape[0], shape[1], salt=salt)
                known[shape] = chain(self._key, parent, tokens, shape[2])
            return self.index.holders(known[shape])

        return of

    def rebuilt(self) -> bool:
        """Whether the blocks are known of all workers that were there when this router began: it
        would else compute again what they hold. True in any case after `rebuild_s`, and then for
        ever. Who cannot be linked is waited for no longer than LINK_S; where nobody is there,
        nothing is waited for yet."""
        if self._rebuilt or self._announced.since_s is None:
            return self._rebuilt
        waited_s = _now() - self._announced.since_s
        links = [link for link in self._links.values() if link.up or waited_s < LINK_S]
        missing = [link.worker_id for link in links if not self.index.complete(link.worker_id)]
        over = waited_s >= self._config.rebuild_s
        if over or (links and not missing):
            self._rebuilt = True
            seconds, blocks = round(waited_s, 3), len(self.index)
            log.info("index rebuilt", blocks=blocks, seconds=seconds, missing=missing)
        return over or not missing

    def expected_s(self) -> float:
        """Until the end of a request that is placed now, where it ends first; 0 where nobody
        waits, or no decode worker is there."""
        return self.roster().expected_s(_now())

    def limits(self) -> Limits:
        """What the decode workers can take, at most with those that are away; the model's own
        limits while none is linked."""
        own = self._limits.max_context
        kinds = self.roster().kinds("decode")
        contexts = [min(own, kind.size.max_context) for kind in kinds] or [own]
        largest = max(contexts + [min(own, size.max_context) for size in self.away()])
        return replace(self._limits, max_context=largest, common_context=min(contexts))

    @property
    def vocab_size(self) -> int:
        return self._limits.vocab_size

    def linked(self) -> dict[str, int]:
        """How many workers of each role are linked and take work. Requests can be served once
        there is a decode worker; they are prefilled elsewhere once there is a prefill worker.
        One whose KV no decode worker can take does not count."""
        prefill, decode = self._shapes("prefill"), self._shapes("decode")
        return {"prefill": len(prefill) - len(misfits(prefill, decode)), "decode": len(decode)}


def _shape(welcome: worker_pb2.WorkerWelcome) -> Shape:
    return (welcome.model_fingerprint, welcome.kv_dtype, welcome.block_size)


def view_of(link: WorkerLink, bit: int) -> WorkerView:
    """What placement knows of a linked worker; `bit` is the index's."""
    welcome, load = link.welcome, link.load
    assert welcome is not None  # up means welcomed
    return WorkerView(
        worker_id=link.worker_id,
        boot_id=link.boot_id,
        role=welcome.role,
        address=link.record.address,
        shape=_shape(welcome),
        max_context=welcome.max_context,
        running=load.running,
        waiting=load.waiting,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks or welcome.total_blocks,
        promised_blocks=load.promised_blocks,
        queued_tokens=load.queued_tokens,
        placed_tokens=link.placed_tokens,
        placed_requests=link.placed_requests,
        draining=not link.takes_work,
        line=link.line(),
        bit=bit,
        degraded=degraded_peers(load),
    )


def _size(welcome: worker_pb2.WorkerWelcome) -> Size:
    return Size(welcome.block_size, welcome.total_blocks, welcome.max_context)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _replaced(link: WorkerLink, record: WorkerRecord) -> bool:
    """The registry names another boot of the worker than the one that is linked."""
    if record.address != link.record.address:
        return True
    return bytes.fromhex(record.boot_id) != link.boot_id and record.boot_id != link.record.boot_id
