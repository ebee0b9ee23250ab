"""The cells of `benchmarks.disaggregation` on virtual time: what scheduling and placement give.

Workers have the times of inputs/one_core_timing.py whatever the other one does: they share no
memory bus and no core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.simulation.capacity.capacity_run import run_fleet
from baton.simulation.capacity.layout import CapacityScenario, Layout
from baton.simulation.capacity.request_record import RequestRecord
from benchmarks.disaggregation.traffic_shapes import OBJECTIVES, SHAPES, Objective, Pace
from benchmarks.figures.report import Figure
from benchmarks.inputs.one_core_timing import LAYOUT, TIMING


def predicted_cells(seconds: float, chunks: Sequence[int]) -> list[Figure]:
    """Return the ratio of good requests for each shape and objective, D over C's best chunk."""
    found = []
    for shape, traffic in SHAPES.items():
        requests = traffic(seconds, Pace(1.0, 1.0))
        own = run_fleet(CapacityScenario(LAYOUT), TIMING, requests).records
        of_chunk = {
            chunk: run_fleet(CapacityScenario(colocated(chunk)), TIMING, requests).records
            for chunk in chunks
        }
        found += [_cell(shape, objective, own, of_chunk) for objective in OBJECTIVES]
    return found


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
