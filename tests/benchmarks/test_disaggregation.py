"""`python -m benchmarks.disaggregation`: its figures, and a short run of real fleets."""

from __future__ import annotations

from array import array

import pytest

from baton.deploy.bench.answer import Measurement
from baton.planner.traces import TraceRequest
from benchmarks.disaggregation.__main__ import ComparisonResults, figures
from benchmarks.disaggregation.predicted_cells import predicted_cells
from benchmarks.disaggregation.second_token import SecondToken, second_tokens
from benchmarks.disaggregation.traffic_shapes import (
    LONG_TOKENS,
    OBJECTIVES,
    SHAPES,
    STREAM_PROMPT,
    STREAM_TOKENS,
    STRICT,
    Pace,
    stream_gaps,
)
from tests.support.benchmark_runs import Measure

PACE = Pace(2.0, 3.0)


def answered(ttft_s: float, gaps_s: list[float], tokens: int = STREAM_TOKENS) -> Measurement:
    asked = TraceRequest(0.0, STREAM_PROMPT, tokens)
    first = Measurement(asked, warm_up=False, intended_s=0.0, first_s=ttft_s)
    first.gaps_s = array("d", gaps_s)
    return first


def test_traffic_of_a_slower_machine_is_as_dense() -> None:
    for shape in SHAPES.values():
        quick, slow = shape(60.0, Pace(1.0, 1.0)), shape(60.0, PACE)
        assert [2 * each.arrived_s for each in quick] == pytest.approx(
            [each.arrived_s for each in slow]
        )
    assert sum(each.prompt_tokens == LONG_TOKENS for each in SHAPES["bursts"](60.0, PACE)) == 10


def test_an_objective_bounds_every_gap() -> None:
    objective = STRICT.at(PACE)
    assert objective.met_by(answered(9.9, [0.1, 0.89]))
    assert not objective.met_by(answered(9.9, [0.1, 0.91]))
    assert not objective.met_by(answered(10.1, [0.1]))


def test_gaps_count_from_when_all_streams_decode() -> None:
    early, late = answered(1.0, [0.5, 0.5, 0.1]), answered(1.9, [0.2])
    assert stream_gaps([early, late, answered(0.0, [9.0], tokens=16)]) == [0.1, 0.2]


def test_the_gap_to_the_second_token_adds_up() -> None:
    phases = [["return", 1000, 0, ""], ["fetch", 2000, 5, "d"], ["verify", 3000, 0, "d"]]
    phases += [["decode queue", 40_000, 0, "d"], ["step", 50_000, 0, "d"], ["return", 1000, 0, ""]]
    record = {"after": phases, "offers": [[1, 2, 3, 5]], "preempted": False, "migrations": 0}
    (found,) = second_tokens([record, record | {"offers": []}, record | {"preempted": True}])
    assert found.transfer_s == pytest.approx(0.005)
    assert found.own_s == pytest.approx(0.092)


def test_cells_take_the_best_chunk_and_name_what_loses() -> None:
    good, bad = answered(1.0, [0.1]), answered(99.0, [0.1])
    found = ComparisonResults(Pace(1.0, 1.0), [0.1], [0.15], [0.16])
    found.colocated = {64: [0.4], 128: [0.3]}
    found.second = {"bursts": [[SecondToken(1.0, 0.1, 0.1, 0.0)]], "mixed": [[]]}
    found.later = {"bursts": [0.16], "mixed": [0.1]}
    for objective in OBJECTIVES:
        found.requests["bursts", objective.name, 64] = [[good, good, good]]
        found.requests["mixed", objective.name, 64] = [[bad, bad, bad]]
        found.requests["mixed", objective.name, 128] = [[good, bad, bad]]
    found.of_chunk = {("bursts", 64): [[good, bad, bad]], ("bursts", 128): [[good, good, bad]]}
    found.of_chunk |= {("mixed", 64): [[good, good, bad]], ("mixed", 128): [[bad, bad, bad]]}
    named = {each.name: each for each in figures(found)}
    assert named["bursts_strict"].value == 1.5 and named["mixed_strict"].value == 0.5
    assert (
        "3 and 2 of 3, chunks 64 and 128; 1.50 to 1.50; TTFT 5.00 s"
        in named["bursts_strict"].beside
    )
    assert named["goodput_ratio_best"].holds and not named["goodput_ratio_worst"].holds
    assert named["cells_lost"].value == 3 and "mixed_strict" in named["cells_lost"].beside
    assert named["itl_p99_ratio"].value == pytest.approx(0.16 / 0.15)
    assert named["itl_p99_over_alone_colocated"].value == pytest.approx(3.0)
    assert named["second_token_bursts_over_steps"].value == pytest.approx(0.2 / 0.16)
    assert named["second_token_bursts_over_steps"].holds
    assert not any(name.startswith("second_token_mixed") for name in named)  # no KV moved


def test_cells_are_predicted_on_virtual_time() -> None:
    named = {each.name: each for each in predicted_cells(60.0, (64,))}
    assert len(named) == 6
    assert named["predicted_bursts_strict"].value > 1  # a burst's first prompt is in time
    assert "chunks 64 and 64; TTFT 2.50 s" in named["predicted_mixed_quick_start"].beside


@pytest.mark.timeout(900)  # two fleets start, and answer some minutes of traffic at their pace
def test_real_fleets_are_measured(measured: Measure) -> None:
    written, found, printed = measured("disaggregation", timeout_s=900)
    assert found["rounds"]["value"] == 1
    assert found["itl_p99_alone_ms"]["value"] > 0 and found["itl_p99_ratio"]["value"] > 0
    assert {"goodput_ratio_best", "goodput_ratio_worst", "cells_lost"} <= found.keys()
    assert "limit" in found["itl_p99_ratio"]["beside"]
    assert all("every gap" in found[f"mixed_{each}"]["beside"] for each in ("strict", "patient"))
    assert "benchmarks.disaggregation" in written["command"] and "cells_lost" in printed
