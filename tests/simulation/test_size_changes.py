"""The number of workers in the capacity simulator: it follows the traffic, and loses no request."""

from __future__ import annotations

import random

import pytest

from baton.planner.fleet_size import SizeBounds
from baton.planner.traces import TraceRequest
from baton.simulation.capacity.capacity_fleet import CapacityFleet
from baton.simulation.capacity.capacity_report import meets
from baton.simulation.capacity.capacity_run import run_fleet
from baton.simulation.capacity.layout import CapacityScenario, Layout, Objectives
from baton.simulation.capacity.role_changes import ControlledFleet
from baton.simulation.capacity.size_changes import SizedFleet
from tests.support.timing_files import BY_HAND

GOALS = Objectives(2.0, 0.030)
SCENARIO = CapacityScenario(Layout(prefill=1, decode=1), GOALS)
BOUNDS = SizeBounds(least=2, most=6, release_s=60.0)
START_S = 20.0
PHASES = ((60.0, 1.0), (300.0, 11.0), (900.0, 0.5))  # until when, requests a second


def waves() -> list[TraceRequest]:
    """Prompts that one worker computes, then more than three times as many as it can, then few."""
    rng, now_s, found = random.Random(5), 0.0, []
    for until_s, rate in PHASES:
        while now_s < until_s:
            found.append(TraceRequest(now_s, rng.randint(3000, 5000), rng.randint(20, 60)))
            now_s += rng.expovariate(rate)
    return found


@pytest.fixture(scope="module")
def run() -> tuple[SizedFleet, CapacityFleet]:
    sized = SizedFleet(SCENARIO, BOUNDS, START_S)
    return sized, run_fleet(SCENARIO, BY_HAND, waves(), begun=sized.begun)


def test_more_workers_come_and_idle_ones_leave(run: tuple[SizedFleet, CapacityFleet]) -> None:
    sized, fleet = run
    assert max(sized.asked) > BOUNDS.least and sized.asked[-1] == BOUNDS.least
    assert len(fleet.stages()) == BOUNDS.least
    assert fleet.prefill and fleet.decode
    assert all(BOUNDS.least <= count <= BOUNDS.most for count in sized.asked)
    steps = [each for each in sized.sizes if each.step is not None]
    first = steps[0]
    assert PHASES[0][0] < first.at_s < PHASES[0][0] + 40.0, first
    grown = [each.step.workers > each.step.before for each in steps if each.step is not None]
    assert grown == sorted(grown, reverse=True), "none leaves before the wave is over"


def test_no_request_is_lost_while_workers_come_and_go(
    run: tuple[SizedFleet, CapacityFleet],
) -> None:
    _, fleet = run
    assert len(fleet.retired) >= 1
    assert all(each.tokens == each.request.output_tokens for each in fleet.records)


@pytest.mark.nightly
def test_more_requests_meet_the_objectives_than_without(
    run: tuple[SizedFleet, CapacityFleet],
) -> None:
    _, fleet = run
    controlled = ControlledFleet(SCENARIO)
    alone = run_fleet(SCENARIO, BY_HAND, waves(), begun=controlled.begun)
    good = [sum(meets(each, GOALS) for each in found.records) for found in (fleet, alone)]
    assert good[0] > 1.5 * good[1]
