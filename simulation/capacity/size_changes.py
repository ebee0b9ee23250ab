"""A simulated fleet in which the number of workers and their roles change.

    asked for ─ start_s ─▶ a decode worker with an empty pool ─ the last one drains ─▶ removed

The workers leave in the opposite order of their start, as in a StatefulSet. A worker that was asked
for and given up before it has started never starts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from baton.planner.controller import Decision
from baton.planner.controller_load import FleetSample
from baton.planner.fleet_size import PoolState, SizeBounds, SizeController, SizeDecision, SizeStep
from baton.simulation.capacity.capacity_fleet import CapacityFleet
from baton.simulation.capacity.layout import CapacityScenario
from baton.simulation.capacity.role_changes import ControlledFleet, RoleChanges, worker_id
from baton.simulation.capacity.timeline import EventQueue


class SizedFleet:
    """A controlled fleet whose number of workers is decided too. `sizes` are all decisions on it,
    `asked` the workers asked for after each; `begun` is what `run_fleet` calls. `observed` is that
    of a ControlledFleet."""

    def __init__(
        self,
        scenario: CapacityScenario,
        bounds: SizeBounds,
        start_s: float,
        observed: Callable[[FleetSample], FleetSample] = lambda sample: sample,
    ) -> None:
        self.roles = ControlledFleet(scenario, observed, self._decided)
        self.sizes: list[SizeDecision] = []
        self.asked: list[int] = []
        self._controller = SizeController(bounds)
        self._start_s = start_s
        self._ids: list[str] = []  # of the workers asked for, in the order of their start
        self._started = 0

    def begun(self, fleet: CapacityFleet, timeline: EventQueue) -> None:
        self._fleet, self._timeline = fleet, timeline
        self._ids = [worker_id(each.worker_id) for each in fleet.stages()]
        self.roles.begun(fleet, timeline)

    def _decided(self, roles: Decision, sample: FleetSample, changes: RoleChanges) -> None:
        if roles.step is not None:
            return
        now_s, controller = self._timeline.now_s, self.roles.controller
        pool = PoolState(len(self._ids), self._ids[-1], controller.changing)
        found = self._controller.decide(roles, sample, pool, now_s)
        self.sizes.append(found)
        if found.step is not None:
            self._resize(found.step, changes)
        step = found.handover
        if step is not None and controller.permits(step, len(sample.workers), now_s):
            accepted = changes.order(step)
            (controller.took if accepted else controller.refused)(step, now_s)
        self.asked.append(len(self._ids))

    def _resize(self, step: SizeStep, changes: RoleChanges) -> None:
        now_s = self._timeline.now_s
        if step.leaving is not None and not changes.leave(step.leaving.boot_id):
            self._controller.failed(now_s)
            return
        if step.workers < step.before:
            self._ids.pop()
        for _ in range(step.before, step.workers):
            name = f"w{self._started:05}"
            self._started += 1
            self._ids.append(name)
            self._timeline.at(now_s + self._start_s, partial(self._start, name))
        self._controller.took(step, now_s)

    def _start(self, name: str) -> None:
        if name in self._ids:
            self._fleet.add_decode(name)
