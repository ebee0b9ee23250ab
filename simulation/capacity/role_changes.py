"""Role changes on a simulated fleet, and the reports that a controller reads there.

    order ─▶ draining ─ idle, or drain_s over ─▶ its prompts and requests move ─▶ left ─ change_s ─▶
             the other role, under another boot, with an empty pool

A worker that drains takes nothing new. After `drain_s` others compute its prompts, and its requests
migrate with the tokens that they have, as in production. A worker's name is `base#boot`; the base
is its worker id.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from baton.planner.change_history import RoleStep
from baton.planner.controller import Decision, RoleController
from baton.planner.controller_forecast import ServiceGoals
from baton.planner.controller_load import FleetSample, WorkerRole, WorkerSample, WorkerState
from baton.simulation.capacity.capacity_fleet import CapacityFleet
from baton.simulation.capacity.decode_stage import DecodeStage
from baton.simulation.capacity.layout import CapacityScenario
from baton.simulation.capacity.prefill_stage import PrefillStage
from baton.simulation.capacity.timeline import EventQueue

DRAIN_S = 10.0  # worker.drain_s
CHANGE_S = 2.0  # from the drained worker to the first request of its next role
POLL_S = 0.1
TICK_S = 1.0  # between two decisions

DecisionHook = Callable[[Decision, FleetSample, "RoleChanges"], None]


class RoleChanges:
    """Owns the changes under way of one fleet."""

    def __init__(self, fleet: CapacityFleet, timeline: EventQueue) -> None:
        self._fleet = fleet
        self._timeline = timeline
        self._boots = 0

    def order(self, step: RoleStep) -> bool:
        """Begin a change; False if that boot of the worker is not there or drains already."""
        return self._begin(step.boot_id, step.role)

    def leave(self, boot_id: str) -> bool:
        """Let a worker drain and leave for good; False as `order`."""
        return self._begin(boot_id, None)

    def _begin(self, boot_id: str, role: WorkerRole | None) -> bool:
        fleet = self._fleet
        stage = fleet.prefill.get(boot_id) or fleet.decode.get(boot_id)
        if stage is None or boot_id in fleet.draining:
            return False
        fleet.drain(stage)
        self._poll(stage, role, self._timeline.now_s + DRAIN_S)
        return True

    def _poll(
        self, stage: DecodeStage | PrefillStage, role: WorkerRole | None, until_s: float
    ) -> None:
        if not self._fleet.busy(stage):
            self._leave(stage, role)
        elif self._timeline.now_s < until_s:
            again = partial(self._poll, stage, role, until_s)
            self._timeline.at(self._timeline.now_s + POLL_S, again)
        elif isinstance(stage, DecodeStage):
            stage.stop(partial(self._move_requests, stage, role))
        else:
            self._fleet.move_prompts(stage)
            self._wait(stage, role)

    def _move_requests(self, stage: DecodeStage, role: WorkerRole | None) -> None:
        self._fleet.move_requests(stage)
        self._leave(stage, role)

    def _wait(self, stage: PrefillStage, role: WorkerRole | None) -> None:
        """Wait for the READs of complete prompts, and for the step under way."""
        if self._fleet.busy(stage) or stage.running:
            again = partial(self._wait, stage, role)
            self._timeline.at(self._timeline.now_s + POLL_S, again)
        else:
            self._leave(stage, role)

    def _leave(self, stage: DecodeStage | PrefillStage, role: WorkerRole | None) -> None:
        self._fleet.remove(stage)
        if role is None:
            return
        self._boots += 1
        name = f"{worker_id(stage.worker_id)}#{self._boots}"
        add = self._fleet.add_prefill if role == "prefill" else self._fleet.add_decode
        self._timeline.at(self._timeline.now_s + CHANGE_S, partial(add, name))


def worker_id(name: str) -> str:
    """Return the worker's id without its boot."""
    return name.partition("#")[0]


def fleet_sample(fleet: CapacityFleet, now_s: float) -> FleetSample:
    """Return what the workers would report now."""
    return FleetSample(now_s, tuple(_sample(each, fleet) for each in fleet.stages()))


def _sample(stage: DecodeStage | PrefillStage, fleet: CapacityFleet) -> WorkerSample:
    name = stage.worker_id
    state: WorkerState = "draining" if name in fleet.draining else "ready"
    used = stage.pool.counts().by_state()["used"] * stage.pool.block_size
    total = stage.pool.total * stage.pool.block_size
    scheduler = stage.scheduler
    common = (scheduler.queued_tokens, used, total, stage.requests)
    if isinstance(stage, PrefillStage):
        return WorkerSample(
            worker_id(name), name, "prefill", state, scheduler.waiting, stage.computing,
            *common, prompt_tokens=stage.prompt_tokens, busy_s=stage.busy_s, steps=stage.steps,
        )  # fmt: skip
    steps, tokens, busy_s = stage.progress()
    return WorkerSample(
        worker_id(name), name, "decode", state, scheduler.waiting, stage.scheduler.running,
        *common, stage.ended_requests, stage.ended_output_tokens,
        stage.prompt_tokens, tokens, busy_s, steps,
        recent_steps=() if stage.last_decode is None else (stage.last_decode,),
    )  # fmt: skip


class ControlledFleet:
    """A controller that decides every TICK_S and whose steps are carried out. `decisions` are all,
    `begun` is what `run_fleet` calls, `decided` is called after each decision."""

    def __init__(
        self,
        scenario: CapacityScenario,
        observed: Callable[[FleetSample], FleetSample] = lambda sample: sample,
        decided: DecisionHook = lambda decision, sample, changes: None,
    ) -> None:
        layout, goals = scenario.layout, scenario.objectives
        self.controller = RoleController(
            ServiceGoals(goals.ttft_s, goals.itl_s, layout.max_sequences)
        )
        self.decisions: list[Decision] = []
        self._observed = observed
        self._decided = decided

    @property
    def steps(self) -> list[Decision]:
        return [each for each in self.decisions if each.step is not None]

    def begun(self, fleet: CapacityFleet, timeline: EventQueue) -> None:
        changes = RoleChanges(fleet, timeline)

        def tick() -> None:
            now_s = timeline.now_s
            sample = self._observed(fleet_sample(fleet, now_s))
            decision = self.controller.decide(sample, now_s)
            self.decisions.append(decision)
            if decision.step is not None:
                accepted = changes.order(decision.step)
                (self.controller.took if accepted else self.controller.refused)(
                    decision.step, now_s
                )
            self._decided(decision, sample, changes)
            if fleet.finished < len(fleet.records):
                timeline.at(now_s + TICK_S, tick)

        timeline.at(TICK_S, tick)
