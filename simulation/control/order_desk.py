"""A worker's side of a controller's calls: its report, and the orders to drain or change its role.

    controller ─ Question, RoleOrder, DrainOrder ─▶ boot? term? ─▶ drain ─▶ another process

Stands where a worker's gRPC service stands (deploy/processes/worker_control.py); the terms, the
report's form and the drain are the product's own. Owns the terms that each boot has heard of.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from baton.planner.control.worker_report import counted
from baton.planner.controller_load import WorkerSample
from baton.runtime.errors import Unavailable
from baton.runtime.links import LinkClosed
from baton.runtime.registry import Role
from baton.runtime.worker.order_terms import OrderTerms
from baton.simulation.fleet.rolling_restart import roll
from baton.simulation.fleet.world import WorkerProcess, World
from baton.simulation.virtual.network import Service, SimLink


@dataclass(frozen=True, slots=True)
class Question:
    """A leader names its term, another controller 0."""

    boot_id: str
    term: int


@dataclass(frozen=True, slots=True)
class RoleOrder:
    boot_id: str
    role: Role
    term: int


@dataclass(frozen=True, slots=True)
class DrainOrder:
    boot_id: str


Order: TypeAlias = RoleOrder | DrainOrder


class OrderDesk:
    """The orders to all workers of a world. `accepted` receives each order that a worker carries
    out, just before it begins to, `asked` the term of each question. `homes` are the roles in which
    supervisors start them."""

    def __init__(self, world: World, homes: dict[str, Role]) -> None:
        self.homes = homes
        self.accepted: Callable[[WorkerProcess, Order], None] = lambda process, order: None
        self.asked: Callable[[WorkerProcess, int], None] = lambda process, term: None
        self._world = world
        self._terms: dict[bytes, OrderTerms] = {}  # by boot
        self._obeying: set[bytes] = set()  # boots

    def services(self, process: WorkerProcess) -> dict[str, Service]:
        self._terms[process.boot_id] = OrderTerms()
        return {"control": partial(self._serve, process)}

    async def _serve(self, process: WorkerProcess, link: SimLink) -> None:
        with contextlib.suppress(LinkClosed):  # its caller has left
            call = await link.receive()
            try:
                reply = self.answer(process, call)
            except Unavailable as error:
                await link.send(error)
            else:
                await link.send(reply)
        await link.close()

    def answer(self, process: WorkerProcess, call: Question | Order) -> WorkerSample | None:
        """Raises Unavailable for another boot, and for an order of an earlier term."""
        if call.boot_id != process.record.boot_id:
            raise Unavailable(f"the call names boot {call.boot_id}, the worker has restarted")
        terms = self._terms[process.boot_id]
        if isinstance(call, Question):
            self.asked(process, call.term)
            terms.note(call.term)
            audit = json.loads(json.dumps(process.worker.audit(check=False)))
            not_ready = process.worker.health.not_ready_reason() or ""
            return counted(process.record, audit, not_ready, process.routers.all())
        if isinstance(call, RoleOrder):
            terms.check(call.term)
        self._obey(process, call)
        return None

    def _obey(self, process: WorkerProcess, order: Order) -> None:
        """Begin to drain, once: a worker that ends takes no other role."""
        if process.boot_id in self._obeying or process.worker.draining.is_set():
            return
        self._obeying.add(process.boot_id)
        self.accepted(process, order)
        name = process.machine.name
        role = order.role if isinstance(order, RoleOrder) else self.homes[name]
        self._world.roles[name] = role
        process.machine.spawn(roll(self._world, name), "drain")
