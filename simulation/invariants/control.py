"""Whether the controllers keep what they promise, whatever befalls them.

    a call with effect   by the controller whose lease the server has
    an order             leaves its role a worker; no other worker is amid a step; its worker was
                         not asked in a later term
    a worker is removed  only if it has ended, or if its boot or the one before had an order to
                         drain: a drained worker may be there again before the number falls
    at every moment      each role has a worker, unless a fault has killed one of it that is not
                         there again
    at rest              the number is within its bounds, and no step is under way

Looks at orders as workers accept them, and at the number as it changes; changes nothing.
"""

from __future__ import annotations

from typing import Any

from baton.planner.control.leadership import TERM_S
from baton.runtime.registry import Role
from baton.simulation.control.controlled_fleet import LabControllers
from baton.simulation.control.controller_host import ControllerHost
from baton.simulation.control.order_desk import Order, RoleOrder
from baton.simulation.fleet.scenario import Fault
from baton.simulation.fleet.shared_membership import PREFIX
from baton.simulation.fleet.world import DRIFT, WorkerProcess, World

LOOK_EVERY_S = 0.1
LINK_S = 2.0  # until a router has a link to a worker that is there
LEADER_KEY = f"{PREFIX}:controller".encode()
ROLES: tuple[Role, Role] = ("prefill", "decode")


class ControlRules:
    """`breaches` gets a line for each. `orders` counts those that workers accepted."""

    def __init__(self, world: World, fleet: LabControllers, breaches: list[str]) -> None:
        self.orders = 0
        self._world = world
        self._fleet = fleet
        self._breaches = breaches
        self._amid: dict[str, bytes] = {}  # workers with an order, and the boot that had it
        self._drained: set[bytes] = set()  # boots with an order to drain
        self._killed: set[tuple[str, Role]] = set()  # by faults, and not there again (`_short`)
        self._empty: set[Role] = set()  # roles whose breach is reported
        self._asked_terms: dict[bytes, int] = {}  # by boot, the highest
        self._lost_s = float("-inf")  # when the server may have lost the lease
        self._undecoded_s: list[float] = []  # when a fault had left no decode worker
        fleet.acting = self._acting
        fleet.desk.accepted = self._accepted
        fleet.desk.asked = self._asked
        fleet.pool.removing = self._removing
        fleet.struck_worker = self._struck_worker
        world.loop.call_world(LOOK_EVERY_S, self._look)

    def struck(self, fault: Fault) -> None:
        """Record a fault before it strikes."""
        if fault.kind == "redis":  # the server may lose the lease, or not be reached
            self._lost_s = self._world.loop.world_s + fault.for_s

    def unsettled(self, lasting: bool) -> list[str]:
        """Return what keeps the fleet from being at rest; a fault does while one is `lasting`."""
        plan, asked, world = self._fleet.plan, self._fleet.pool.count().asked, self._world
        found = [] if plan.least <= asked <= plan.most else [f"{asked} workers are asked for"]
        found += ["a fault lasts"] if lasting else []
        found += [f"{name} is amid a step" for name in self._steps()]
        found += [f"{name} starts" for name in sorted(self._fleet.pool.starting)]
        ended = [n for n, e in world.workers.items() if not e.machine.alive]
        found += [f"{name} has ended" for name in ended]
        return found + [f"no {role} worker is there" for role in ROLES if not self._of(role)]

    def excuse(self, since_s: float, until_s: float) -> bool:
        """Return whether a fault had left no decode worker for a part of this time."""
        return any(since_s - LINK_S <= at_s <= until_s for at_s in self._undecoded_s)

    # -- what is looked at ------------------------------------------------------------------------

    def _acting(self, controller: ControllerHost, what: str) -> None:
        world = self._world
        assert world.shared is not None
        if world.loop.world_s - self._lost_s < TERM_S * (1 + DRIFT):
            return  # the holder may not know yet that the server has lost its lease
        leadership: Any = controller.leadership
        holder, ends_s = world.shared.server.values.get(LEADER_KEY, (b"", 0.0))
        if holder != leadership._value.encode() or ends_s <= world.loop.world_s:
            self._breach(f"{controller.machine.name} sends {what} after its lease has ended")

    def _accepted(self, process: WorkerProcess, order: Order) -> None:
        name, what = process.machine.name, _described(order)
        self.orders += 1
        if others := [each for each in self._steps() if each != name]:
            self._breach(f"{name} {what} while {', '.join(others)} is amid another step")
        left = [each for each in self._of(process.role) if each != name]
        if not left and process.role not in self._short():
            self._breach(f"{name} {what}, the last {process.role} worker")
        if isinstance(order, RoleOrder):  # that to drain has no term
            asked = self._asked_terms.get(process.boot_id, 0)
            if order.term < asked:
                self._breach(f"{name} {what} in term {order.term}, and was asked in {asked}")
        else:
            self._drained.add(process.boot_id)
        self._amid[name] = process.boot_id
        self._fleet.ordered(process)

    def _asked(self, process: WorkerProcess, term: int) -> None:
        boot_id = process.boot_id
        self._asked_terms[boot_id] = max(term, self._asked_terms.get(boot_id, 0))

    def _removing(self, name: str) -> None:
        process = self._world.workers.get(name)
        if process is not None and process.machine.alive:
            boots = [b for b, each in self._world.boots.items() if each.machine.name == name]
            if self._drained.isdisjoint(boots[-2:]):
                self._breach(f"{name} is removed, and had no order to drain")
        if others := [each for each in self._steps() if each != name]:
            self._breach(f"{name} is removed while {', '.join(others)} is amid another step")

    def _struck_worker(self, name: str) -> None:
        self._killed.add((name, self._world.workers[name].role))

    def _look(self) -> None:
        """Report a role that is empty without a fault, once."""
        world, short = self._world, self._short()
        for role in ROLES:
            if self._of(role):
                continue
            if role not in short and role not in self._empty:
                self._empty.add(role)
                self._breach(f"no {role} worker is left at {world.loop.world_s:.1f} s")
            if role in short and role == "decode":
                self._undecoded_s.append(world.loop.world_s)
        world.loop.call_world(world.loop.world_s + LOOK_EVERY_S, self._look)

    # -- the fleet as it is -----------------------------------------------------------------------

    def _steps(self) -> list[str]:
        """Return the workers whose step is not over: the next boot is not there yet."""
        workers = self._world.workers
        for name, boot_id in list(self._amid.items()):
            process = workers.get(name)
            if process is None or (process.boot_id != boot_id and process.machine.alive):
                del self._amid[name]
        return sorted(self._amid)

    def _short(self) -> set[Role]:
        """Return the roles of which a fault has killed a worker that is not there again, or that
        have no worker since: it may have come back in another role."""
        workers = self._world.workers
        for name, role in list(self._killed):
            process = workers.get(name)
            if (process is None or process.machine.alive) and self._of(role):
                self._killed.discard((name, role))
        return {role for _, role in self._killed}

    def _of(self, role: Role) -> list[str]:
        """Return the workers of a role that take requests."""
        amid = self._steps()
        return [
            name
            for name, process in self._world.workers.items()
            if process.role == role
            and process.machine.alive
            and name not in amid
            and not process.worker.draining.is_set()
        ]

    def _breach(self, what: str) -> None:
        self._breaches.append(f"the controllers: {what}")


def _described(order: Order) -> str:
    if isinstance(order, RoleOrder):
        return f"is made a {order.role} worker"
    return "is drained"
