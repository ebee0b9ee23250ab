"""The fleet: a link to every worker that the registry names, and what the workers can do now.

The registry is a hint of which workers exist; a worker is alive while its link is up. A worker
that the registry no longer names is dropped once its link is down; its capacity is remembered for
a while. Owns the links, the index and the circuits. Knows no requests: those belong to the
dispatcher, which is the links' LinkListener.
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
from baton.router.fleet.fleet_reports import FleetReports, kv_formats
from baton.router.fleet.fleet_timing import FleetTiming
from baton.router.fleet.linked_view import view_of
from baton.router.fleet.radix_index import CAPACITY_BLOCKS, Holders, RadixIndex
from baton.router.fleet.recent_prompts import RecentPrefills, RecentPrompts
from baton.router.fleet.registry_watcher import RegistryWatcher
from baton.router.fleet.roster import DisconnectedWorkers, Roster
from baton.router.fleet.slow_start import SlowStart
from baton.router.fleet.state_sharing import StateSharing
from baton.router.fleet.topology import distance
from baton.router.fleet.unplaced_requests import UnplacedRequests
from baton.router.fleet.worker_costs import WorkerCosts
from baton.router.fleet.worker_link import LinkListener, WorkerLink
from baton.router.fleet.worker_view import (
    BlockFormat,
    KvFormat,
    WorkerCapacity,
    WorkerView,
    capacity_of,
    incompatible_prefill_workers,
    kv_format_of,
)
from baton.router.requests.prompt_limits import ContextLimits
from baton.runtime import logs, metric_factory, metrics
from baton.runtime.config import RouterConfig, StepConfig
from baton.runtime.identity import chain, root
from baton.runtime.registry import WorkerRecord
from baton.runtime.registry_client import RegistryClient
from baton.runtime.shared_registry.report_exchange import ReportExchange

REGISTRY_POLL_S = 0.5
REBUILD_LINK_TIMEOUT_S = 1.0
INDEX_NOT_REBUILT = "the blocks in the workers' caches are not known yet: try again soon"

log = logs.get(__name__)


class Fleet:
    """`key` is the cluster's identity key, `limits` are those of the model itself, `boot_id` is 16
    random bytes; `reports` reaches the other routers; `timing` is that of workers' steps."""

    def __init__(
        self,
        registry: RegistryClient,
        dialer: Dialer,
        config: RouterConfig,
        key: bytes,
        limits: ContextLimits,
        *,
        boot_id: bytes | None = None,
        reports: ReportExchange | None = None,
        timing: FleetTiming | None = None,
    ) -> None:
        self._registry_watcher = RegistryWatcher(registry)
        self._dialer = dialer
        self._config = config
        self._key = key
        self._limits = limits
        self._boot_id = boot_id or secrets.token_bytes(16)
        self._links: dict[str, WorkerLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._disconnected = DisconnectedWorkers(config.returned_wait_s)
        self._reports = FleetReports()
        self._rebuilt = False
        self._roster = Roster(config.max_waiting)
        self._changed: dict[str, None] = {}  # workers, since `roster` was last called
        self._presence: dict[str, tuple[bool, bool, bytes, WorkerCapacity | None]] = {}
        # Derived from presence, with the time until which they hold; None: to be computed again.
        self._passed_over: tuple[frozenset[bytes], int, float] | None = None
        self._disconnected_capacities: tuple[list[WorkerCapacity], float] | None = None
        self.index = RadixIndex(CAPACITY_BLOCKS, self._note_change)
        self.circuits = Circuits(random.Random(self._boot_id))
        self.recent_prompts = RecentPrompts()
        self.recent_prefills = RecentPrefills()
        self.slow_start = SlowStart()
        self.unplaced = UnplacedRequests()
        self.timing = timing or FleetTiming(StepConfig())
        self._draws = random.Random(self._boot_id)
        self.sharing = None if reports is None else self._shares_over(reports)

    async def run(self, listener: LinkListener) -> None:
        """Follow the registry until cancelled, then close every link."""
        sharing = None if self.sharing is None else asyncio.create_task(self.sharing.run())
        try:
            while True:
                self._update_links(await self._registry_watcher.workers(), listener)
                self.rebuilt()  # without a request too: workers that come later do not count
                self._compare_workers()
                self.timing.refit(_now())
                self._count_degraded()
                self._reports.report(self._links.values())
                self.index.sweep()
                # A registry in a folder reports no change: it is read again at this period.
                await asyncio.sleep(REGISTRY_POLL_S)
        finally:
            tasks = [*self._tasks.values(), *([] if sharing is None else [sharing])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _shares_over(self, reports: ReportExchange) -> StateSharing:
        return StateSharing(reports, self._boot_id, self.circuits, self._links.values)

    def _update_links(self, records: Sequence[WorkerRecord], listener: LinkListener) -> None:
        named = {record.worker_id: record for record in records}
        for worker_id, link in list(self._links.items()):
            record = named.get(worker_id)
            task = self._tasks[worker_id]
            if task.done():  # a bug in the link itself: log it, and make a new link
                log.error("link task ended", worker_id=worker_id, error=repr(task.exception()))
                self._drop(worker_id)
                continue
            forgotten = record is None and not link.up and not link.parked
            if forgotten or (record is not None and _replaced(link, record)):
                self._drop(worker_id)
        for worker_id, record in named.items():
            if worker_id not in self._links:
                self._disconnected.add_registered(worker_id, record.role, _now())
                self._disconnected_capacities = None
                link = WorkerLink(
                    record,
                    self._dialer,
                    listener,
                    self._config,
                    index=self.index,
                    router_boot_id=self._boot_id,
                    vocab_size=self._limits.vocab_size,
                    unplaced=self.unplaced,
                    changed=self._note_change,
                )
                self._links[worker_id] = link
                self._tasks[worker_id] = asyncio.create_task(link.run(), name=f"link {worker_id}")

    def _compare_workers(self) -> None:
        """Compare the step times of each role's workers; forget the circuits of dropped ones."""
        now_s = _now()
        for role in ("prefill", "decode"):
            links = [e for e in self._links.values() if e.takes_work and e.record.role == role]
            step_ms = {link.boot_id: link.load.step_ms for link in links}
            busy = [link.boot_id for link in links if link.load.running]
            self.circuits.compare_steps(step_ms, busy, now_s)
        self.circuits.forget_others([link.boot_id for link in self._links.values()])
        for state, count in self.circuits.counts(now_s).items():
            metrics.CIRCUITS.labels(state).set(count)

    def _count_degraded(self) -> None:
        """Publish the number of degraded pairs of which both workers are linked."""
        views = self.roster().views()
        linked = {view.boot_id for view in views}
        metrics.DEGRADED_PAIRS.set(sum(len(linked.intersection(view.degraded)) for view in views))

    def publish_gauges(self) -> None:
        """Set the gauges of both fleets from the linked workers' last load reports."""
        ready, starting = self.linked_counts(), self.slow_start.counts(_now())
        for role in metric_factory.ROLES:
            metrics.FLEET_READY.labels(role).set(ready[role])
            metrics.SLOW_STARTS.labels(role).set(starting[role])
            views = [view for view in self.roster().views() if view.role == role]
            blocks = sum(view.total_blocks for view in views)
            free = sum(view.free_blocks for view in views)
            metrics.FLEET_QUEUED_TOKENS.labels(role).set(sum(view.queue_tokens for view in views))
            metrics.FLEET_WAITING.labels(role).set(sum(view.queued_requests for view in views))
            metrics.FLEET_KV_USE.labels(role).set(1 - free / blocks if blocks else 0.0)
        prefills = self.recent_prefills.counts(_now())
        for outcome in metric_factory.PREFILL_OUTCOMES:
            metrics.RECENT_PREFILLS.labels(outcome).set(prefills.get(outcome, 0))
        metrics.FLEET_REQUESTS.set(sum(link.load.open_requests for link in self._links.values()))

    def _drop(self, worker_id: str) -> None:
        hello = self._links.pop(worker_id).worker_hello
        if hello is not None and hello.role == "decode":
            self._disconnected.add_lost(worker_id, capacity_of(hello), _now())
        self._disconnected_capacities = None
        self._note_change(worker_id)
        self._tasks.pop(worker_id).cancel()

    def _note_change(self, worker_id: str) -> None:
        if not self._changed:  # update soon: no request should wait for many changed workers
            asyncio.get_running_loop().call_soon(lambda: self.roster())
        self._changed[worker_id] = None

    @property
    def draws(self) -> random.Random | None:
        """Return the source of draws between equally quick workers if other routers see the same
        fleet, or None if this router is alone."""
        return self._draws if self.sharing is not None and len(self.sharing.others) else None

    def links(self) -> list[WorkerLink]:
        return list(self._links.values())

    def link(self, worker_id: str) -> WorkerLink | None:
        return self._links.get(worker_id)

    def link_of_boot(self, boot_id: bytes) -> WorkerLink | None:
        return next((link for link in self._links.values() if link.boot_id == boot_id), None)

    def room(self) -> int:
        """Return how many more requests may go into the queues of the decode workers now."""
        roster = self.roster()
        limit = self._config.max_waiting
        return roster.room - self.slow_start.withheld_room(roster, limit, _now())

    def deferred(self) -> frozenset[bytes]:
        """Return the boot ids of new workers that have had their share of placements for now."""
        return self.slow_start.deferred(self.roster(), _now())

    def roster(self) -> Roster:
        """Return the linked workers, with all changes applied."""
        for worker_id in self._changed:
            link = self._links.get(worker_id)
            self._update_presence(worker_id, link)
            if link is None or not link.up:
                self._roster.remove(worker_id)
                self.slow_start.forget(worker_id)
                if link is None:  # else it may return as the boot that it was
                    self.timing.forget(worker_id)
            else:
                view = view_of(link, self.index.bit(worker_id), self._costs_of(link))
                self.slow_start.follow(view)
                if view != self._roster.get(worker_id):
                    self._roster.put(view)
        self._changed.clear()
        return self._roster

    def _costs_of(self, link: WorkerLink) -> WorkerCosts:
        """Take the worker's report, and return the costs of work on it."""
        hello = link.worker_hello
        assert hello is not None  # a link is up after its handshake
        self.timing.record_load(link.worker_id, link.boot_id, hello, link.load)
        return self.timing.costs_of(link.worker_id, hello)

    def record_handoff(
        self, link: WorkerLink | None, timeline: worker_pb2.Timeline, granter: bytes
    ) -> None:
        """Take what a timeline of a request on that decode worker says of its handoff from the
        prefill worker of the boot id `granter`."""
        hello = None if link is None else link.worker_hello
        if hello is None:
            return
        apart = 0
        if hello.topology and timeline.HasField("fetch"):
            peer = self.link_of_boot(granter)
            if peer is not None and peer.worker_hello is not None:
                apart = distance(hello.topology, peer.worker_hello.topology)
        self.timing.record_handoff(kv_format_of(hello), timeline, _now(), apart)

    def _update_presence(self, worker_id: str, link: WorkerLink | None) -> None:
        """Invalidate what depends on presence if the worker has come, gone or changed."""
        before = self._presence.pop(worker_id, None)
        now = None
        if link is not None:
            now = self._presence[worker_id] = (
                link.up,
                link.refused_reason is not None,
                link.boot_id,
                None if link.worker_hello is None else capacity_of(link.worker_hello),
            )
        if now != before:
            self._disconnected_capacities = self._passed_over = None

    def views(self) -> list[WorkerView]:
        return self.roster().views()

    def passed_over(self) -> frozenset[bytes]:
        """Return the boot ids of linked workers that get no requests now unless there are no
        others."""
        self.roster()
        now_s, version = _now(), self.circuits.version
        kept = self._passed_over
        if kept is None or kept[1] != version or now_s >= kept[2]:
            roles = {e.boot_id: e.record.role for e in self._links.values() if e.up}
            found = self.circuits.passed_over(roles, now_s)
            kept = self._passed_over = (found, version, self.circuits.next_change_s(now_s))
        return kept[0]

    def disconnected_capacities(self) -> list[WorkerCapacity]:
        """Return the capacities of the decode workers that are not linked now and may come back:
        those that the registry names, and those that have left within `router.returned_wait_s`. A
        worker whose handshake was refused does not count."""
        self.roster()
        now_s, kept = _now(), self._disconnected_capacities
        if kept is None or now_s >= kept[1]:
            capacities = self._disconnected.capacities(now_s)
            for worker_id, link in self._links.items():
                hello, refused = link.worker_hello, link.refused_reason is not None
                if hello is not None or refused:
                    capacities.pop(worker_id, None)
                gone = not (link.up or refused)
                if gone and hello is not None and hello.role == "decode":
                    capacities[worker_id] = capacity_of(hello)
            expiry_s = self._disconnected.next_expiry_s()
            kept = self._disconnected_capacities = ([*capacities.values()], expiry_s)
        return kept[0]

    def holders(
        self, tokens: Sequence[int], salt: bytes, known: dict[BlockFormat, list[bytes]]
    ) -> Callable[[KvFormat], Holders]:
        """Return a function from a KV format to the workers of that format that hold leading blocks
        of `tokens`. `known` keeps the blocks' identities for the next call with the same tokens and
        salt."""

        @cache
        def of(kv_format: KvFormat) -> Holders:
            of_blocks = kv_format.of_blocks
            if of_blocks not in known:
                parent = root(self._key, kv_format.fingerprint, kv_format.dtype, salt=salt)
                known[of_blocks] = chain(self._key, parent, tokens, kv_format.block_size)
            return self.index.holders(known[of_blocks])

        return of

    def rebuilt(self) -> bool:
        """Return whether the blocks of all workers that were registered when this router started
        are known; placed earlier, requests would compute again what workers hold. Always true
        after `rebuild_s`. A worker that cannot be linked is waited for no longer than
        REBUILD_LINK_TIMEOUT_S. Without workers the answer is true, and may change."""
        if self._rebuilt or self._registry_watcher.first_read_s is None:
            return self._rebuilt
        waited_s = _now() - self._registry_watcher.first_read_s
        links = [
            link for link in self._links.values() if link.up or waited_s < REBUILD_LINK_TIMEOUT_S
        ]
        missing = [link.worker_id for link in links if not self.index.complete(link.worker_id)]
        over = waited_s >= self._config.rebuild_s
        if over or (links and not missing):
            self._rebuilt = True
            seconds, blocks = round(waited_s, 3), len(self.index)
            log.info("index rebuilt", blocks=blocks, seconds=seconds, missing=missing)
        return over or not missing

    def expected_s(self) -> float:
        """Return the time to the end of a request that is placed now, on the worker where it ends
        first; 0 if no request waits, or there is no decode worker."""
        return self.roster().expected_s(_now())

    def limits(self) -> ContextLimits:
        """Return what the decode workers can take, including those that may come back; the
        model's own limits while none is linked."""
        own = self._limits.max_context
        groups = self.roster().groups("decode")
        contexts = [min(own, group.capacity.max_context) for group in groups] or [own]
        largest = max(
            contexts
            + [min(own, capacity.max_context) for capacity in self.disconnected_capacities()]
        )
        return replace(self._limits, max_context=largest, common_context=min(contexts))

    @property
    def vocab_size(self) -> int:
        return self._limits.vocab_size

    def linked_counts(self) -> dict[str, int]:
        """Return how many workers of each role are linked and take work. Requests can be served
        once there is a decode worker; prefill workers take over the prompts once there is one. A
        prefill worker whose KV no decode worker can take does not count."""
        links = self._links.values()
        prefill, decode = kv_formats(links, "prefill"), kv_formats(links, "decode")
        unused = incompatible_prefill_workers(prefill, decode)
        return {"prefill": len(prefill) - len(unused), "decode": len(decode)}


def _now() -> float:
    return asyncio.get_running_loop().time()


def _replaced(link: WorkerLink, record: WorkerRecord) -> bool:
    """Return whether the registry names another boot of the worker than the linked one. An entry
    takes no link down that is up: a worker that has ended takes its link with it."""
    if link.up and not link.quiet:
        return False
    if record.address != link.record.address:
        return True
    return bytes.fromhex(record.boot_id) != link.boot_id and record.boot_id != link.record.boot_id
