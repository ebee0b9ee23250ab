"""`python -m benchmarks.advice`: its figures, and a short run of the real fleets behind them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.engine.scheduling.batch import Slice, StepBatch
from baton.planner.timing_model import StepWork
from baton.planner.trace_distributions import draw_trace
from baton.runtime.worker.attention_pairs import causal_pairs
from baton.simulation.capacity.layout import Objectives
from baton.simulation.capacity.live_advice import Times, advise
from benchmarks.advice.__main__ import (
    LAYOUTS,
    MEASURED,
    MIXES,
    SIZE,
    TIMING,
    MixOutcome,
    figures_of,
)
from benchmarks.fleets.sleeping_fleet import measure
from benchmarks.fleets.sleeping_workers import step_s


def times(share: float, end_s: float = 1.0) -> Times:
    return Times(0.1, 0.2, 0.05, 0.06, end_s, share)


def outcome(*rounds: tuple[list[Times], list[float]]) -> MixOutcome:
    """Return that of rounds of predictions and measured shares, by layout."""
    predicted, measured = zip(*rounds, strict=True)
    return MixOutcome(
        MIXES[0],
        {layout: [*found] for layout, *found in zip(LAYOUTS, *predicted, strict=True)},
        {layout: [*found] for layout, *found in zip(LAYOUTS, *measured, strict=True)},
    )


def test_regret_is_of_the_layout_with_the_best_prediction() -> None:
    predicted = [times(0.5), times(0.9), times(0.9, 0.8), times(0.2)]
    found = outcome((predicted, [0.5, 0.96, 0.8, 0.25]))
    assert found.advised is LAYOUTS[2]  # as good, and sooner
    assert found.regret == pytest.approx(0.2) and found.error == pytest.approx(0.1)


def test_a_layout_that_serves_nothing_is_infinite_regret() -> None:
    found = outcome(([times(1.0), *[times(0.0)] * 3], [0.0, 0.5, 0.5, 0.5]))
    figures = {each.name: each for each in figures_of([found])}
    assert found.regret == float("inf") and figures["advice_regret"].holds is False
    assert figures["prompts_1_prefill_3_decode"].beside.endswith("advised")


def test_rounds_count_by_their_median_and_show_their_range() -> None:
    def seen(first: float) -> list[float]:
        return [first, 0.5, 0.5, 0.5]

    shares = [(0.9, 0.7), (0.8, 0.9), (0.7, 0.8)]  # predicted and measured
    found = outcome(*[(list(map(times, seen(one))), seen(other)) for one, other in shares])
    (first, *_) = figures_of([found])
    assert found.error == 0 and first.value == 0.8
    assert first.beside == "0.700 to 0.900; predicted 0.800, 0.700 to 0.900, advised"


def test_a_step_sleeps_for_its_chunks_and_sequences() -> None:
    batch = StepBatch((Slice(list(range(10)), 20, [0]), Slice([1], 99, [1]), Slice([1], 49, [2])))
    work = StepWork(10, causal_pairs(20, 30), 2, 150)
    assert step_s(TIMING, batch) == TIMING.step_s(work)


def test_a_fleet_is_measured_as_advice_reads_it() -> None:
    """The real processes: a router, a prefill and a decode worker that sleep, and a client."""
    layout = replace(SIZE, prefill=1, decode=1, colocated=0)
    traffic = draw_trace("requests=30,rate=3,prompt=constant:200,output=constant:12")
    run = measure(layout, TIMING, traffic, Objectives(5.0, 1.0))
    assert [each.error for each in run.measurements] == [None] * 30
    assert (run.fleet.layout.prefill, run.fleet.layout.decode) == (1, 1)
    assert len(run.fleet.requests) == 30
    found = run.fleet.fit.model.step_s(StepWork(sequences=2, context_tokens=400))
    assert TIMING.step_s(StepWork(sequences=2)) < found < 2 * TIMING.step_s(StepWork(sequences=2))
    assert advise(run.fleet).measured.good_share > 0.9
    assert MEASURED in LAYOUTS
