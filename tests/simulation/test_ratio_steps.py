"""Goodput at ratio -1, now and +1: from the changes that were simulated, or why there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.planner.timing_model import TimingModel
from baton.planner.traces import TraceRequest
from baton.simulation.capacity import live_advice
from baton.simulation.capacity.advice_text import advice_json
from baton.simulation.capacity.layout import Layout
from baton.simulation.capacity.live_advice import MeasuredFleet, Times, advise
from baton.simulation.capacity.ratio_steps import RatioStep, ratio_steps
from tests.support.measured_fleets import LAYOUT, QUIET, measured_fleet


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the requests is good for each prefill worker; nothing else is simulated."""

    def simulated(
        fleet: MeasuredFleet, layout: Layout, timing: TimingModel, traffic: list[TraceRequest]
    ) -> Times:
        return Times(0.1, 0.1, 0.01, 0.01, 1.0, layout.prefill / 10)

    monkeypatch.setattr(live_advice, "simulated", simulated)


def test_a_worker_moved_either_way_gives_both_neighbours() -> None:
    measured = measured_fleet(QUIET, replace(LAYOUT, prefill=2, decode=2))
    advice = advise(measured)
    assert ratio_steps(advice) == [
        RatioStep(-1, "1 prefill, 3 decode", 0.1),
        RatioStep(0, "2 prefill, 2 decode", 0.2),
        RatioStep(1, "3 prefill, 1 decode", 0.3),
    ]
    posted = advice_json(measured, advice, 5.0)
    rate = posted["requests"] / posted["window_s"]
    found = [each["goodput_per_s"] for each in posted["ratios"]]
    assert found == pytest.approx([0.1 * rate, 0.2 * rate, 0.3 * rate], rel=0.01)


def test_the_last_worker_of_a_role_has_no_neighbour() -> None:
    measured = measured_fleet(QUIET, replace(LAYOUT, prefill=1, decode=1))
    lower, now, upper = advice_json(measured, advise(measured), 5.0)["ratios"]
    assert lower["obstacle"] == "the only prefill worker stays" and lower["good_share"] is None
    assert now["name"] == "1 prefill, 1 decode" and lower["goodput_per_s"] is None
    assert upper["obstacle"] == "the only decode worker stays"


def test_a_colocated_fleet_has_no_ratio() -> None:
    advice = advise(measured_fleet(QUIET, replace(LAYOUT, prefill=0, decode=0, colocated=2)))
    assert [each.obstacle for each in ratio_steps(advice)] == [
        "each worker prefills and decodes",
        "",
        "each worker prefills and decodes",
    ]
