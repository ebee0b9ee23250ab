"""Two controllers of a simulated fleet, and what befalls them and their calls.

    ControllerHost "c0", "c1" ─▶ OrderDesk of each worker, SimulatedPool
           ▲ killed, paused, amid a step too     ▲ lost, late; reports lost, old; dies in its drain

Owns the controllers' processes, the workers' desks and the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from baton.runtime.errors import Unavailable
from baton.runtime.registry import Role, WorkerRecord
from baton.simulation.control.controller_host import ControllerHost
from baton.simulation.control.leadership_scripts import LEADERSHIP_SCRIPTS
from baton.simulation.control.order_desk import Order, OrderDesk
from baton.simulation.control.simulated_pool import SimulatedPool
from baton.simulation.fleet.scenario import ControlPlan, Fault
from baton.simulation.fleet.world import WorkerProcess, World
from baton.simulation.virtual.network import Service

NAMES = ("c0", "c1")
LATE_S = (4.5, 16.0)  # of an order: its sender has given up, and may have lost its leadership
DRAINED_S = 0.5  # at most, from an order until its worker dies


class LabControllers:
    """One per run. `acting` receives each call with effect just before a controller makes it,
    `struck_worker` the name of each worker that a fault kills."""

    def __init__(self, world: World, plan: ControlPlan, homes: dict[str, Role]) -> None:
        assert world.shared is not None
        self.plan = plan
        self.homes = homes
        self.desk = OrderDesk(world, homes)
        self.pool = SimulatedPool(world, plan.names)
        self.controllers: dict[str, ControllerHost] = {}  # the last process of each
        self.acting: Callable[[ControllerHost, str], None] = lambda controller, what: None
        self.struck_worker: Callable[[str], None] = lambda name: None
        self.silent: set[str] = set()
        self.old_reports = False
        self._world = world
        self._armed: list[Fault] = []  # they strike at a stage of a step
        self._order_fates: list[str] = []  # of the next orders
        self._drain_killed: list[Fault] = []  # they strike the next worker with an order
        self._stopped = False
        world.start_s = plan.start_s
        world.more_services = self._serve
        self._watch_stage = world.restart_stage
        world.restart_stage = self._restart_stage
        world.shared.server.scripts = LEADERSHIP_SCRIPTS

    def start(self) -> None:
        for name in NAMES:
            self._start(name)

    def stop(self) -> None:
        """End both controllers, so that the fleet can come to rest."""
        self._stopped = True
        for controller in self.controllers.values():
            controller.machine.kill(silent=True)

    @property
    def leaders(self) -> list[ControllerHost]:
        """Return the controllers that believe that they lead."""
        running = self.controllers.values()
        return [each for each in running if each.machine.alive and each.leadership.term]

    def strike(self, fault: Fault) -> Callable[[], None]:
        """Begin a fault, and return what ends it."""
        (name,) = fault.targets
        match fault.what:
            case "worker killed":
                return self._kill_worker(name)
            case "dies in its drain":
                self._drain_killed.append(fault)
            case "report lost":
                self.silent.add(name)
                return lambda: self.silent.discard(name)
            case "reports old":
                self.old_reports = True
                return lambda: setattr(self, "old_reports", False)
            case "order lost" | "order late":
                self._order_fates.append(fault.what)
            case "never ready":
                self.pool.unborn = True
            case _:
                self._armed.append(fault)
                if fault.what.endswith("at once"):
                    self._strike_leaders(fault)
        return lambda: None

    # -- the road of the controllers (ControlRoad) ------------------------------------------------

    def acts(self, controller: ControllerHost, what: str) -> None:
        self.acting(controller, what)

    async def passes(self, controller: ControllerHost, stage: str) -> None:
        """Let what was armed for this stage strike the controller."""
        found = [fault for fault in self._armed if fault.what.endswith(stage)]
        for fault in found:
            self._armed.remove(fault)
            self._strike_controller(controller, fault)
            await asyncio.sleep(0)  # a stopped process goes no further

    def loses(self, record: WorkerRecord, order: Order) -> bool:
        """Return whether this order is lost, or arrives only later."""
        if not self._order_fates:
            return False
        if self._order_fates.pop(0) == "order late":
            self._deliver_late(record, order)
        return True

    def _deliver_late(self, record: WorkerRecord, order: Order) -> None:
        loop = self._world.loop
        late_s = self._world.dice.uniform(*LATE_S)

        def arrive() -> None:
            process = self._world.workers.get(record.worker_id)
            if process is not None and process.machine.alive:
                process.machine.spawn(self._answer_late(process, order), "control")

        loop.call_world(loop.world_s + late_s, arrive)

    async def _answer_late(self, process: WorkerProcess, order: Order) -> None:
        with contextlib.suppress(Unavailable):  # it is void, and no caller waits
            self.desk.answer(process, order)

    # -- processes --------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        if self._stopped:
            return
        machine = self._world.new_machine(name)
        self._world.network.listen(machine, {})
        self.controllers[name] = ControllerHost(self._world, machine, self.plan, self.pool, self)

    def _strike_leaders(self, fault: Fault) -> None:
        self._armed.remove(fault)
        for controller in self.leaders:
            self._strike_controller(controller, fault)

    def _strike_controller(self, controller: ControllerHost, fault: Fault) -> None:
        world, machine = self._world, controller.machine
        over_s = world.loop.world_s + fault.for_s
        if fault.what.startswith("paused"):
            machine.pause()
            world.loop.call_world(over_s, machine.resume)
            return
        machine.kill()
        world.network.killed(machine)
        world.loop.call_world(over_s, self._start, machine.name)

    def _kill_worker(self, name: str) -> Callable[[], None]:
        """Kill a worker; its supervisor starts it in its first role."""
        world = self._world
        process = world.workers.get(name)
        if process is None or not process.machine.alive:
            return lambda: None
        self.struck_worker(name)
        world.roles[name] = self.homes[name]
        world.kill(name, silent=False)
        self.pool.changed()
        return lambda: world.restart(name)

    def _restart_stage(self, stage: str, process: WorkerProcess) -> None:
        """Let the pool know that a worker drains, or ends."""
        self.pool.changed()
        self._watch_stage(stage, process)

    def _serve(self, process: WorkerProcess) -> dict[str, Service]:
        """Open the desk of a worker that starts, and let the pool know."""
        self.homes.setdefault(process.machine.name, process.role)
        self.pool.changed()
        return self.desk.services(process)

    def ordered(self, process: WorkerProcess) -> None:
        """Let what waits for a drain strike this worker."""
        loop, name = self._world.loop, process.machine.name
        for fault in self._drain_killed:
            at_s = loop.world_s + self._world.dice.uniform(0, DRAINED_S)

            def die(fault: Fault = fault) -> None:
                over = self._kill_worker(name)
                loop.call_world(loop.world_s + fault.for_s, over)

            loop.call_world(at_s, die)
        self._drain_killed.clear()
