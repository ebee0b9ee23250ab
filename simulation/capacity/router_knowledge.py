"""The router of a simulated fleet: what it knows of the workers, and the placements it makes of it.

    worker ── load report, every heartbeat ──▶ last report ─┐
    placement ── tokens and requests since that report ─────┴▶ view ─▶ roster ─▶ place

A load is as old as its worker's last report, and what was placed since counts beside it, as in the
fleet's links (router/fleet/worker_link.py). Block events arrive at once. Workers that join together
report together. Placement, roster, index and slow start are the product's own. Owned by the fleet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.planner.timing_model import TimingModel
from baton.router.fleet.placement import (
    FleetView,
    Placement,
    PlacementInput,
    Placer,
    computation_us,
    open_groups,
)
from baton.router.fleet.radix_index import RadixIndex
from baton.router.fleet.request_need import Need
from baton.router.fleet.roster import Roster
from baton.router.fleet.slow_start import SlowStart
from baton.router.fleet.worker_costs import WorkerCosts
from baton.router.fleet.worker_view import WorkerView
from baton.runtime.config import PlacementMode, RouterConfig, StepConfig
from baton.simulation.capacity.decode_stage import DecodeStage
from baton.simulation.capacity.prefill_stage import PrefillStage
from baton.simulation.capacity.stage_values import held_by, view_of
from baton.simulation.capacity.timeline import EventQueue

Stage = DecodeStage | PrefillStage


@dataclass(slots=True)
class _Worker:
    """It reports when it joins, and whole heartbeats later."""

    stage: Stage
    bit: int
    joined_s: float
    view: WorkerView  # of the last report
    draining: bool = False
    placed_tokens: int = 0  # since the last report
    placed_requests: int = 0
    placed_us: int = 0
    report_due: bool = False


class RouterKnowledge:
    """Knows what the workers' steps take by `timing`, as a router does that has learned it, and
    their objective `itl_s`."""

    def __init__(
        self,
        timeline: EventQueue,
        mode: PlacementMode,
        timing: TimingModel,
        step: StepConfig,
        placer: Placer,
        itl_s: float,
    ) -> None:
        config, growth = RouterConfig(), step.expected_growth_tokens
        self._timeline = timeline
        self._mode = mode
        self._place = placer
        own = step.local_prefill_tokens
        self._decode_costs = WorkerCosts(timing, 1.0, own, own, growth, itl_s=itl_s)
        sizes = step.prefill_tokens, step.chunk_tokens
        self._prefill_costs = WorkerCosts(timing, 1.0, *sizes, growth)
        self._heartbeat_s = config.link_heartbeat_s
        self._index = RadixIndex()
        self._roster = Roster(config.max_waiting)
        self._slow_start = SlowStart()
        self._workers: dict[str, _Worker] = {}
        self._changed: dict[str, Stage] = {}  # their blocks may be others
        self._stale: dict[str, _Worker] = {}  # in the roster

    def add(self, stage: Stage) -> None:
        """Link a worker, which reports at once."""
        name, now_s = stage.worker_id, self._timeline.now_s
        self._index.add(name)
        bit = self._index.bit(name)
        view = view_of(stage, bit, self._costs_of(stage), joined_s=now_s)
        self._workers[name] = worker = _Worker(stage, bit, now_s, view)
        self._stale[name] = worker
        self.changed(stage)

    def remove(self, name: str) -> None:
        """Drop a worker and what it holds."""
        del self._workers[name]
        self._index.remove(name)
        self._roster.remove(name)
        self._slow_start.forget(name)
        self._changed.pop(name, None)
        self._stale.pop(name, None)

    def drain(self, name: str) -> None:
        """Place nothing more on a worker, which reports at once that it drains."""
        worker = self._workers[name]
        worker.draining = True
        self._report(worker)

    def changed(self, stage: Stage) -> None:
        """Note that a worker's blocks or load are others now: its next report will say so."""
        self._changed[stage.worker_id] = stage
        if (worker := self._workers.get(stage.worker_id)) is not None:
            self._expect_report(worker)

    def place(self, need: Need, names: Sequence[bytes]) -> Placement:
        """Place a request whose prompt has the blocks `names`. Raises BatonError if no worker could
        take it."""
        self._take_block_events()
        self._update_roster()
        now_s = self._timeline.now_s
        fleet = FleetView(self._roster, deferred=self._slow_start.deferred(self._roster, now_s))
        groups = open_groups(need, fleet)
        held = held_by(self._index.holders(names))
        given = PlacementInput(need, fleet, groups, held, self._mode)
        placement = self._place(given)
        computed_us = computation_us(given, placement)
        self._count(placement.decode, need.tokens, computed_us if placement.local else 0)
        if placement.candidates:
            self._count(placement.candidates[0], need.tokens, computed_us)
        return placement

    def _costs_of(self, stage: Stage) -> WorkerCosts:
        return self._decode_costs if isinstance(stage, DecodeStage) else self._prefill_costs

    def _count(self, view: WorkerView, tokens: int, computed_us: int) -> None:
        """Count a request that was placed on a worker, in its view and its slow start."""
        worker, now_s = self._workers[view.worker_id], self._timeline.now_s
        self._slow_start.record_placement(view.worker_id, view.role, self._roster, now_s)
        worker.placed_tokens += tokens
        worker.placed_requests += 1
        worker.placed_us += computed_us
        self._stale[view.worker_id] = worker
        self._expect_report(worker)

    def _expect_report(self, worker: _Worker) -> None:
        """Let the worker's next report come, which would say nothing new without a change."""
        if not worker.report_due:
            worker.report_due = True
            now_s, heartbeat_s = self._timeline.now_s, self._heartbeat_s
            passed = (now_s - worker.joined_s) // heartbeat_s
            next_s = worker.joined_s + passed * heartbeat_s
            if next_s <= now_s:
                next_s += heartbeat_s
            self._timeline.at(next_s, lambda: self._reported(worker))

    def _reported(self, worker: _Worker) -> None:
        worker.report_due = False
        if self._workers.get(worker.stage.worker_id) is worker:
            self._report(worker)

    def _report(self, worker: _Worker) -> None:
        worker.view = view_of(
            worker.stage,
            worker.bit,
            self._costs_of(worker.stage),
            joined_s=worker.joined_s,
            draining=worker.draining,
        )
        worker.placed_tokens = worker.placed_requests = worker.placed_us = 0
        self._stale[worker.stage.worker_id] = worker

    def _update_roster(self) -> None:
        for worker in self._stale.values():
            view = worker.view
            if worker.placed_requests:
                view = replace(
                    view,
                    placed_tokens=worker.placed_tokens,
                    placed_requests=worker.placed_requests,
                    placed_us=worker.placed_us,
                )
            self._slow_start.follow(view)
            self._roster.put(view)
        self._stale.clear()

    def _take_block_events(self) -> None:
        for stage in self._changed.values():
            stored, removed = stage.pool.drain_events()
            if stored or removed:
                self._index.record(stage.worker_id, b"".join(stored), b"".join(removed))
        self._changed.clear()
