"""One simulation from its trace to its report."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from baton.planner.timing_model import TimingModel
from baton.planner.traces import TraceRequest
from baton.router.fleet.placement import Placer, place
from baton.simulation.capacity.capacity_fleet import CapacityFleet
from baton.simulation.capacity.capacity_report import CapacityReport, make_report
from baton.simulation.capacity.layout import CapacityScenario
from baton.simulation.capacity.timeline import EventQueue

PROGRESS_ACTIONS = 2048  # between two reports of progress


def simulate(
    scenario: CapacityScenario,
    timing: TimingModel,
    trace: list[TraceRequest],
    progress: Callable[[int, int], None] = lambda finished, total: None,
) -> CapacityReport:
    """Simulate until each request has ended. `progress` gets the requests that have ended, and
    all. Raises RuntimeError if a request never ends or a block stays held: a bug."""
    started_s = time.perf_counter()
    fleet = run_fleet(scenario, timing, trace, progress)
    return make_report(fleet, scenario, timing, time.perf_counter() - started_s)


def run_fleet(
    scenario: CapacityScenario,
    timing: TimingModel,
    trace: list[TraceRequest],
    progress: Callable[[int, int], None] = lambda finished, total: None,
    begun: Callable[[CapacityFleet, EventQueue], None] = lambda fleet, timeline: None,
    placer: Placer = place,
) -> CapacityFleet:
    """Same as `simulate`, but return the fleet at its end. `begun` is called before time passes;
    `placer` places requests."""
    scenario = replace(scenario, layout=scenario.layout.with_blocks_of_chunks())
    timeline = EventQueue()
    with _without_collection():
        fleet = CapacityFleet(timeline, timing, scenario, trace, placer)
        begun(fleet, timeline)
        actions = 0
        while timeline.step():
            actions += 1
            if not actions % PROGRESS_ACTIONS:
                progress(fleet.finished, len(trace))
    fleet.check()
    progress(fleet.finished, len(trace))
    return fleet


@contextmanager
def _without_collection() -> Iterator[None]:
    """Suspend the search for reference cycles: it costs a sixth of a run, and frees little."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
