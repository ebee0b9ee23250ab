"""Fleets as advice measures them, from simulated records: no process runs."""

from __future__ import annotations

from baton.planner.timing_fit import Fit, FitError
from baton.planner.timing_model import ChunkTiming, StepTiming, TimingModel
from baton.planner.trace_distributions import draw_trace
from baton.planner.traced_requests import traced_requests
from baton.simulation.capacity.layout import CapacityScenario, Layout, Objectives
from baton.simulation.capacity.live_advice import MeasuredFleet
from tests.support.traced_records import simulated_records

MODEL = TimingModel("test", 1e5, ChunkTiming(0.004, 2e-4), StepTiming(0.008, 3e-4))
FIT = Fit(MODEL, {"chunk": FitError(9, 0.03, 0.2), "step": FitError(9, 0.05, 0.2)})
LAYOUT = Layout(prefill=1, decode=3, chunk_tokens=1024, max_sequences=32, block_tokens=64)
GOALS = Objectives(0.5, 0.05)
QUIET = "requests=60,rate=1,prompt=constant:300,output=constant:20"


def measured_fleet(
    traffic: str, layout: Layout = LAYOUT, goals: Objectives = GOALS
) -> MeasuredFleet:
    """Return a fleet that has served drawn traffic as the model says."""
    records = simulated_records(CapacityScenario(layout, goals), MODEL, draw_trace(traffic))
    return MeasuredFleet(layout, FIT, traced_requests(records), goals)
