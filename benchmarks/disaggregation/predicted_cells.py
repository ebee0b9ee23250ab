"""The cells of `benchmarks.disaggregation` on virtual time: what scheduling and placement give.

Workers have the times of inputs/one_core_timing.py whatever the other one does: they share no
memory bus and no core. Placement knows the objective of each cell, as from `slo.itl_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.planner.traces import TraceRequest
from baton.simulation.capacity.capacity_run import run_fleet
from baton.simulation.capacity.layout import CapacityScenario, Layout, Objectives
from benchmarks.disaggregation.traffic_shapes import OBJECTIVES, SHAPES, Objective, Pace
from benchmarks.figures.report import Figure
from benchmarks.inputs.one_core_timing import LAYOUT, TIMING

COLOCATED = replace(LAYOUT, prefill=0, decode=0, colocated=2)


def predicted_cells(seconds: float, chunks: Sequence[int]) -> list[Figure]:
    """Return the ratio of good requests for each shape and objective, D over C, each with the chunk
    of prompts beside streams that is best for it."""
    found = []
    for shape, traffic in SHAPES.items():
        requests = traffic(seconds, Pace(1.0, 1.0))
        for objective in OBJECTIVES:
            layouts = (LAYOUT, COLOCATED)
            own, other = (_best(each, objective, requests, chunks) for each in layouts)
            found.append(_cell(shape, objective, len(requests), own, other))
    return found


def _best(
    layout: Layout, objective: Objective, requests: list[TraceRequest], chunks: Sequence[int]
) -> tuple[int, int]:
    """Return how many requests meet the objective, and the chunk with which most do."""
    return max(
        (_good(replace(layout, local_chunk_tokens=chunk), objective, requests), chunk)
        for chunk in chunks
    )


def _good(layout: Layout, objective: Objective, requests: list[TraceRequest]) -> int:
    scenario = CapacityScenario(layout, Objectives(objective.ttft_s, objective.gap_s))
    records = run_fleet(scenario, TIMING, requests).records
    return sum(objective.allows(each.ttft_s, each.longest_gap_s) for each in records)


def _cell(
    shape: str, objective: Objective, asked: int, own: tuple[int, int], other: tuple[int, int]
) -> Figure:
    (good, chunk), (colocated_good, colocated_chunk) = own, other
    beside = (
        f"{good} and {colocated_good} of {asked}, chunks {chunk} and {colocated_chunk}; "
        f"{objective.text}"
    )
    value = good / colocated_good if colocated_good else float(good or 1)
    return Figure(f"predicted_{shape}_{objective.name}", value, "", beside)
