"""The driver of a fleet on a Ray cluster: makes what is missing, replaces what has changed.

    baton fleet ─▶ FleetDriver ─▶ RayFleet ─▶ actors on the nodes ─▶ workers ─▶ registry

It may die, and Ray's head with it, and no worker ends by that: the next driver finds the actors by
name, and an actor that has to be made again is made where its worker runs. It owns no state that
matters: everything is in Ray, on the nodes and in the registry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Protocol

from baton.deploy.host.fleet_end import END_RETRY_S
from baton.deploy.host.fleet_progress import WorkerProgress
from baton.deploy.host.restarts import EARLY_STARTS
from baton.deploy.nodes import fleet_metrics
from baton.deploy.nodes.fleet_metrics import RestartReason
from baton.deploy.nodes.node_choice import Room, chosen_node
from baton.deploy.nodes.node_worker import WorkerReport
from baton.deploy.nodes.worker_order import WorkerOrder
from baton.runtime import logs
from baton.runtime.errors import Unavailable
from baton.runtime.metric_factory import ROLES

LOST_S = 10.0  # without an answer, until a worker's actor counts as lost
TURN_S = 1.0
END_PAUSE_S = 0.5  # between two looks at workers that end: their nodes look as often

log = logs.get(__name__)


class Fleet(Protocol):
    """The actors (ray_fleet.py)."""

    def names(self) -> set[str]: ...

    def nodes(self) -> int: ...

    def rooms(self) -> Mapping[str, Room]: ...

    def make(self, order: WorkerOrder, host: str | None) -> None: ...

    def ask(self) -> dict[str, WorkerReport]: ...

    def end(self, name: str) -> None: ...

    def remove(self, name: str) -> None: ...

    def sweep(self, kept: Collection[str]) -> None: ...


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """The fleet at `at_s` of the driver's clock: Ray's living nodes, the reports of the workers
    that are registered, what each other worker waits for, and the progress of all."""

    at_s: float
    nodes: int = 0
    ready: tuple[WorkerReport, ...] = ()
    waiting: Mapping[str, str] = field(default_factory=dict)
    progress: tuple[WorkerProgress, ...] = ()


@dataclass(slots=True)
class _Known:
    """The last answer of a worker, and when it came."""

    report: WorkerReport | None
    heard_s: float
    lost: bool = False


class FleetDriver:
    """Keeps the actors of `orders`. `hosts` returns where registered workers run, by worker id;
    None if that cannot be read: then an actor is made anywhere, and replaces a worker that runs.
    `pack`: few nodes rather than many. Time is in seconds of `now`, and `pause` lets some pass."""

    def __init__(
        self,
        fleet: Fleet,
        orders: Sequence[WorkerOrder],
        hosts: Callable[[], Mapping[str, str] | None],
        now: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,  # it runs in a thread: no event to wait for
        pack: bool = False,
    ) -> None:
        self._fleet = fleet
        self._orders = {order.worker_id: order for order in orders}
        self._hosts = hosts
        self._hosts_now = cache(hosts)  # read once for all workers of a turn
        self._now = now
        self._pause = pause
        self._pack = pack
        self._known: dict[str, _Known] = {}
        self._registered: dict[str, WorkerReport] = {}  # the last one with a boot, by worker id
        self._summary = FleetSummary(
            self._now(), waiting={name: "Ray has not been asked yet" for name in self._orders}
        )

    def follow(self, orders: Sequence[WorkerOrder]) -> None:
        """Take other orders: the next turns make what is missing, and end what is not in them."""
        self._orders = {order.worker_id: order for order in orders}

    def wanted(self) -> set[str]:
        """Return the ids of the workers of all orders."""
        return set(self._orders)

    def ready(self) -> list[str]:
        """Return the workers that are registered, by the last turn."""
        return sorted(
            name
            for name, known in self._known.items()
            if name in self._orders and known.report is not None
            if known.report.boot_id and not known.lost
        )

    def waiting(self) -> dict[str, str]:
        """Return for each other worker what it waits for."""
        ready = self.ready()
        return {name: self._reason(name) for name in self._orders if name not in ready}

    def summary(self) -> FleetSummary:
        """Return the fleet as the last turn left it. For any thread."""
        return self._summary

    def turn(self) -> None:
        """Compare the fleet with the orders once. Raises Unavailable when Ray does not answer."""
        try:
            nodes = self._fleet.nodes()
            self._turn()
        except Unavailable:
            self._summary = replace(self._summary, nodes=0)
            raise
        ready = tuple(self._registered[name] for name in self.ready())
        progress = tuple(self._progress(name) for name in self._orders)
        self._summary = FleetSummary(self._now(), nodes, ready, self.waiting(), progress)

    def _turn(self) -> None:
        self._hosts_now = cache(self._hosts)
        found = self._fleet.names()
        self._make([order for name, order in self._orders.items() if name not in found])
        for name, report in self._fleet.ask().items():
            self._hear(name, report)
        self._note_lost()
        for name in found - set(self._orders):
            self._end(name)
        self._replace_one()
        self._fleet.sweep(self._orders)

    def _make(self, missing: Sequence[WorkerOrder]) -> None:
        """Make actors: first those whose workers run, there; then the others on chosen nodes."""
        if not missing:
            return
        hosts, rooms = self._hosts_now() or {}, self._fleet.rooms()
        nodes = {name: e.report.node for name, e in self._known.items() if e.report and not e.lost}
        nodes |= {name: host for name, host in hosts.items() if host in rooms}
        for order in sorted(missing, key=lambda each: hosts.get(each.worker_id) not in rooms):
            name = order.worker_id
            host = hosts.get(name)
            if host not in rooms:  # its node is lost, or has not joined this Ray
                nodes.pop(name, None)  # its last node
                mine = [each for each in nodes if each in self._orders]
                placed = [(self._orders[each], nodes[each]) for each in mine]
                host = chosen_node(order, rooms, placed, pack=self._pack)
            if host is not None:
                nodes[name] = host
            self._fleet.make(order, host)
            self._known[name] = _Known(None, self._now())

    def end(self, deadline_s: float) -> list[str]:
        """End all workers, and return those that had not ended at `deadline_s` of `now`; their
        actors are removed all the same. What fails is tried again: while Ray answers until the
        deadline and END_RETRY_S more, otherwise for END_RETRY_S. Raises Unavailable, which names
        the workers that remain."""
        late: set[str] = set()
        left, answered_s = set(self._orders), self._now()
        while True:
            self._hosts_now = cache(self._hosts)
            try:
                left = self._fleet.names()
                answered_s = self._now()
                self._fleet.sweep(())
                if not left:
                    return sorted(late)
                failed = self._try_each(left, self._end)
                if self._now() > deadline_s:
                    late |= left
                    failed = self._try_each(left, self._fleet.remove)
                    left = set(failed)
                    if not left:
                        return sorted(late)
                for name, report in self._fleet.ask().items():
                    self._hear(name, report)
            except Unavailable as error:
                failed = dict.fromkeys(left, str(error))
            overdue = self._now() > deadline_s + END_RETRY_S
            if failed and (overdue or self._now() - answered_s > END_RETRY_S):
                raise _remain(failed)
            self._pause(END_PAUSE_S)

    def _try_each(self, names: Collection[str], act: Callable[[str], None]) -> dict[str, str]:
        """Act on each worker. Return the reasons of those for which that has failed."""
        failed: dict[str, str] = {}
        for name in sorted(names):
            try:
                act(name)
            except Unavailable as error:
                failed[name] = str(error)
        return failed

    def publish_gauges(self) -> None:
        """Set the gauges by the last turn. For any thread."""
        found = self._summary
        nodes = found.nodes if self._now() - found.at_s < LOST_S else 0  # a turn may hang on Ray
        fleet_metrics.RAY_UP.set(nodes > 0)
        fleet_metrics.RAY_NODES.set(nodes)
        for role in ROLES:
            wanted = sum(order.role == role for order in self._orders.values())
            registered = [each for each in found.ready if each.order.role == role]
            adopted = sum(each.adopted for each in registered)
            fleet_metrics.WANTED_WORKERS.labels(role).set(wanted)
            fleet_metrics.REGISTERED_WORKERS.labels(role).set(len(registered))
            fleet_metrics.ADOPTED_WORKERS.labels(role).set(adopted)

    def _hear(self, name: str, report: WorkerReport) -> None:
        known = self._known.setdefault(name, _Known(None, self._now()))
        before, known.report = known.report, report
        if known.lost:
            log.info("worker actor found", worker=name, node=report.node)
        known.heard_s, known.lost = self._now(), False
        if before is None or before.node != report.node:
            log.info("worker placed", worker=name, node=report.node)
        if report.boot_id and (before is None or before.boot_id != report.boot_id):
            where = {"address": report.address, "boot": report.boot_id, "starts": report.starts}
            log.info("worker registered", worker=name, node=report.node, **where)
        if report.boot_id:
            self._count_restart(self._registered.get(name), report)
            self._registered[name] = report
        if report.message and (before is None or before.message != report.message):
            why = {"reason": report.message, "log": report.log}
            log.warning("worker hindered", worker=name, node=report.node, **why)
        if report.progress and (before is None or before.progress != report.progress):
            log.info(
                "worker progress reported", worker=name, node=report.node, progress=report.progress
            )

    @staticmethod
    def _count_restart(before: WorkerReport | None, now: WorkerReport) -> None:
        if before is None or before.boot_id == now.boot_id:
            return
        reason: RestartReason = "ended"
        if before.order != now.order:
            reason = "replaced"
        elif before.node != now.node:
            reason = "moved"
        elif before.starts == now.starts:  # the same process
            reason = "role_changed"
        fleet_metrics.WORKER_RESTARTS.labels(reason).inc()

    def _note_lost(self) -> None:
        for name, known in self._known.items():
            if not known.lost and self._now() - known.heard_s > LOST_S:
                known.lost = True
                log.warning("worker actor lost", worker=name, reason=self._reason(name))

    def _reason(self, name: str) -> str:
        known = self._known.get(name)
        report = known.report if known else None
        order = self._orders.get(name)
        if known is not None and report is not None and not known.lost:
            return report.message or f"{report.progress or report.state} on {report.node}"
        if report is not None:
            return f"its node {report.node} does not answer"
        return f"no node has room for it ({order.needs()})" if order else "no answer"

    def _progress(self, name: str) -> WorkerProgress:
        known = self._known.get(name)
        report = known.report if known else None
        if known is None or report is None:
            lost = known is not None and known.lost
            text = self._reason(name) if lost else "Ray starts its actor"
            return WorkerProgress(name, text=text)
        if known.lost:
            return WorkerProgress(name, report.node, "its node does not answer")
        if report.boot_id:
            return WorkerProgress(name, report.node, "", report.address, report.memory)
        text = report.message or report.progress or report.state
        in_vain = name not in self._registered and report.restarts >= EARLY_STARTS
        given_up = report.order == self._orders[name] and (report.state == "failed" or in_vain)
        return WorkerProgress(name, report.node, text, given_up=given_up, log=report.log)

    def _end(self, name: str) -> None:
        """End a worker, and remove its actor once it has ended, or if it can have none."""
        known = self._known.setdefault(name, _Known(None, self._now()))
        state = known.report.state if known.report is not None else None
        nothing_runs = state == "failed" or (known.lost and self._is_gone(name, known.report))
        if state == "ended" or nothing_runs:
            self._fleet.remove(name)
            self._known.pop(name, None)
            log.info("worker removed", worker=name)
        else:
            self._fleet.end(name)

    def _is_gone(self, name: str, report: WorkerReport | None) -> bool:
        """Return whether a lost actor has nothing to end: it has reported no node, or its node is
        gone, and the registry does not list its worker. Ray would make it again on another node."""
        rooms = self._fleet.rooms()  # empty: which nodes live is not known
        if report is not None and (not rooms or report.node in rooms):
            return False
        hosts = self._hosts_now()
        return hosts is not None and name not in hosts

    def _replace_one(self) -> None:
        """End one worker whose order has changed, and the next turns make it again: one that is not
        ready, or any while all are."""
        changed = [
            name
            for name, order in self._orders.items()
            if (known := self._known.get(name)) is not None
            if known.report is not None and known.report.order != order
        ]
        ready = self.ready()
        ending = [name for name in changed if name not in ready]
        if ending or (changed and len(ready) == len(self._orders)):
            self._end((ending or changed)[0])


def _remain(failed: Mapping[str, str]) -> Unavailable:
    """Return the error for workers that could not be ended, by the reason of each."""
    reason = next(iter(failed.values()), "")
    return Unavailable(
        f"{reason}; {', '.join(sorted(failed))} may serve on: start `baton fleet` again and end it "
        "once Ray answers"
    )
