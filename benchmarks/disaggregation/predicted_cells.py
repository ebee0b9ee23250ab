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
from baton.simulation.capacity.request_record import RequestRecord
from benchmarks.disaggregation.traffic_shapes import OBJECTIVES, SHAPES, Objective, Pace
from benchmarks.figures.report import Figure
from benchmarks.inputs.one_core_timing import LAYOUT, TIMING


def predicted_cells(seconds: float, chunks: Sequence[int]) -> list[Figure]:
    """Return the ratio of good requests for each shape and objective, D over C's best chunk."""
    found = []
    for shape, traffic in SHAPES.items():
        requests = traffic(seconds, Pace(1.0, 1.0))
        for objective in OBJECTIVES:
            own = _records(LAYOUT, objective, requests)
            of_chunk = {chunk: _records(colocated(chunk), objective, requests) for chunk in chunks}
            found.append(_cell(shape, objective, own, of_chunk))
    return found


def _records(
    layout: Layout, objective: Objective, requests: list[TraceRequest]
) -> list[RequestRecord]:
    scenario = CapacityScenario(layout, Objectives(objective.ttft_s, objective.gap_s))
    return run_fleet(scenario, TIMING, requests).records


def colocated(chunk: int) -> Layout:
    """Return two workers that compute prompts in chunks of so many tokens, and decode."""
    return replace(LAYOUT, prefill=0, decode=0, colocated=2, local_chunk_tokens=chunk)


def _cell(
    shape: str,
    objective: Objective,
    own: Sequence[RequestRecord],
    of_chunk: dict[int, list[RequestRecord]],
) -> Figure:
    good = sum(objective.allows(each.ttft_s, each.longest_gap_s) for each in own)
    counts = {
        chunk: sum(objective.allows(each.ttft_s, each.longest_gap_s) for each in records)
        for chunk, records in of_chunk.items()
    }
    best = max(counts, key=lambda chunk: counts[chunk])
    beside = f"{good} and {counts[best]} of {len(own)}, chunk {best}; {objective.text}"
    value = good / counts[best] if counts[best] else float(good or 1)
    return Figure(f"predicted_{shape}_{objective.name}", value, "", beside)
