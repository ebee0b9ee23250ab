"""A controller's process on a simulated machine: the product's loops, on simulated connections.

    RedisLeadership ─ SimulatedRedis    RoleLoop, SizeLoop    reports, orders ─ streams ─▶ OrderDesk
    ControllerMemory ────────┘                └─ PoolConnection ─▶ SimulatedPool

Made as deploy/control/controller_process.py makes it. Owns its connections.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from baton.planner.change_history import RoleStep
from baton.planner.control import leadership, order_rules
from baton.planner.control.controller_memory import ControllerMemory
from baton.planner.control.role_loop import RoleLoop
from baton.planner.control.size_loop import SizeLoop
from baton.planner.control.worker_report import ANSWER_TIMEOUT_S
from baton.planner.controller import RoleController
from baton.planner.controller_forecast import ServiceGoals
from baton.planner.controller_load import FleetSample, WorkerSample
from baton.planner.fleet_size import SizeBounds, SizeController
from baton.runtime import waits
from baton.runtime.errors import Unavailable
from baton.runtime.links import LinkClosed
from baton.runtime.registry import WorkerRecord
from baton.runtime.registry_client import ANSWER_S, RegistryUnavailable
from baton.simulation.control.order_desk import DrainOrder, Order, Question, RoleOrder
from baton.simulation.control.simulated_pool import PoolConnection, SimulatedPool
from baton.simulation.fleet.scenario import ControlPlan
from baton.simulation.fleet.shared_membership import PREFIX, TOKEN
from baton.simulation.fleet.world import World
from baton.simulation.virtual.machine import Machine
from baton.simulation.virtual.simulated_redis import SimulatedRedisClient

GOALS = ServiceGoals(ttft_s=2.0, itl_s=0.5, max_sequences=16)
RELEASE_S = 15.0  # for which fewer workers must be enough
LONGEST_START_S = 60.0  # of a worker, after which it is overdue


class ControlRoad(Protocol):
    """The faults of a controller and its calls. `acts` receives a call with effect just before
    it is made, `passes` is awaited at each stage of a step, and an order that `loses` accepts has
    no answer."""

    silent: set[str]  # workers whose reports are lost
    old_reports: bool  # all reports are those of before

    def acts(self, controller: ControllerHost, what: str) -> None: ...

    async def passes(self, controller: ControllerHost, stage: str) -> None: ...

    def loses(self, record: WorkerRecord, order: Order) -> bool: ...


class ControllerHost:
    """One process; it runs from the start on."""

    def __init__(
        self,
        world: World,
        machine: Machine,
        plan: ControlPlan,
        pool: SimulatedPool,
        road: ControlRoad,
    ) -> None:
        assert world.shared is not None
        self.machine = machine
        self._world = world
        self._road = road
        self._registry = world.shared.client_of(machine)
        self._records: dict[str, WorkerRecord] = {}  # of the last reading, by boot
        self._last: FleetSample | None = None
        client: Any = SimulatedRedisClient(world.shared.server, machine)  # in place of redis-py's
        clock = world.loop.time
        self.leadership = leadership.RedisLeadership(client, PREFIX, clock)
        connection = PoolConnection(pool, self._way_s, self._resizing)
        sizes = SizeLoop(
            connection,
            SizeController(SizeBounds(plan.least, plan.most, RELEASE_S)),
            self._drain,
            clock,
            LONGEST_START_S,
        )
        self.loop = RoleLoop(
            self,
            RoleController(GOALS),
            ControllerMemory(self.leadership, (TOKEN,)),
            self._change_role,
            clock,
            acts=True,
            sizes=sizes,
        )
        self.task = machine.spawn(self.loop.run(asyncio.Event()), "controller")

    # -- reports ----------------------------------------------------------------------------------

    async def read(self, term: int) -> FleetSample:
        """Ask all registered workers (see deploy/control/fleet_reports.py). Raises Unavailable if
        they cannot be listed."""
        if self._road.old_reports and self._last is not None:
            return self._last
        records = {each.worker_id: each for each in await self._registered()}
        self._records = {each.boot_id: each for each in records.values()}
        at_s = self._world.loop.time()
        asked = (self._ask(record, term) for record in self._records.values())
        self._last = FleetSample(at_s, tuple(await asyncio.gather(*asked)))
        return self._last

    async def _registered(self) -> list[WorkerRecord]:
        """Return all records, the newest boot of a worker last. Raises Unavailable."""
        reading = self._registry.workers()
        if not await waits.done_within(reading, ANSWER_S):
            raise Unavailable("the registry has not answered")
        try:
            return reading.result()
        except RegistryUnavailable as error:
            raise Unavailable(str(error)) from error

    async def _ask(self, record: WorkerRecord, term: int) -> WorkerSample:
        if record.worker_id not in self._road.silent:
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    found = await self._call(record, Question(record.boot_id, term))
                assert found is not None
                return found
            except (TimeoutError, LinkClosed, Unavailable):
                pass  # it is unreachable
        return WorkerSample(record.worker_id, record.boot_id, record.role, "unreachable")

    # -- orders -----------------------------------------------------------------------------------

    async def _change_role(self, step: RoleStep, term: int) -> None:
        """Raises Unavailable as deploy/control/orders.py's `order_role`."""
        record = self._records[step.boot_id]
        order = RoleOrder(step.boot_id, step.role, term)
        await self._order(record, order, f"the order to become a {step.role} worker")

    async def _drain(self, boot_id: str) -> None:
        """Raises Unavailable as `order_leave`."""
        await self._order(self._records[boot_id], DrainOrder(boot_id), "the order to drain")

    async def _order(self, record: WorkerRecord, order: Order, what: str) -> None:
        self._road.acts(self, what)
        await self._road.passes(self, "before order")
        async with order_rules.order_time(record, what):
            order_rules.check_others(record, await self._registered())
            if self._road.loses(record, order):
                await asyncio.Event().wait()
            try:
                await self._call(record, order)
            except LinkClosed as error:
                raise order_rules.OrderUnanswered(f"{record.worker_id} is lost") from error
        await self._road.passes(self, "after order")

    async def _resizing(self, stage: str) -> None:
        if stage == "before resize":
            self._road.acts(self, "the request for workers")
        await self._road.passes(self, stage)

    async def _call(self, record: WorkerRecord, call: Question | Order) -> WorkerSample | None:
        """Raises Unavailable for a refusal, LinkClosed without an answer."""
        link = self._world.network.connect(self.machine, record.address, "control")
        try:
            await link.send(call)
            reply: WorkerSample | Unavailable | None = await link.receive()
        finally:
            await link.close()
        if isinstance(reply, Unavailable):
            raise reply
        return reply

    def _way_s(self) -> float:
        return self._world.delay_s * self._world.dice.random()
