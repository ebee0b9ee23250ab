"""Role changes in the capacity simulator: no request is lost, and a controller acts in time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.planner.change_history import RoleStep
from baton.planner.controller_load import FleetSample, LoadWindow, WorkerRole
from baton.planner.trace_distributions import draw_trace
from baton.planner.traces import TraceRequest
from baton.simulation.capacity.capacity_fleet import CapacityFleet
from baton.simulation.capacity.capacity_report import meets
from baton.simulation.capacity.capacity_run import run_fleet
from baton.simulation.capacity.layout import CapacityScenario, Layout, Objectives
from baton.simulation.capacity.role_changes import (
    CHANGE_S,
    DRAIN_S,
    ControlledFleet,
    RoleChanges,
    fleet_sample,
    worker_id,
)
from baton.simulation.capacity.timeline import EventQueue
from tests.support.timing_files import BY_HAND

TRAFFIC = "requests=200,rate=6,prompt=lognormal:2000:0.8,output=exponential:300,seed="


def changed_fleet(
    trace: list[TraceRequest], layout: Layout, seed: int, *, every_token: bool = False
) -> CapacityFleet:
    """Simulate with role changes at random times, which leave one worker of each role."""
    rng = random.Random(seed)

    def begun(fleet: CapacityFleet, timeline: EventQueue) -> None:
        changes = RoleChanges(fleet, timeline)

        def change() -> None:
            roles: list[tuple[WorkerRole, WorkerRole]] = [
                ("prefill", "decode"), ("decode", "prefill"),
            ]  # fmt: skip
            old, new = rng.choice(roles)
            ready = fleet_sample(fleet, timeline.now_s).of(old, "ready")
            if len(ready) > 1:
                chosen = rng.choice(ready)
                step = RoleStep(chosen.worker_id, chosen.boot_id, new)
                assert changes.order(step)
                assert not changes.order(step), "it drains already"
            if fleet.finished < len(fleet.records):
                timeline.at(timeline.now_s + rng.uniform(0.5, 8.0), change)

        timeline.at(1.0, change)

    scenario = CapacityScenario(layout, every_token=every_token)
    return run_fleet(scenario, BY_HAND, trace, begun=begun)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "layout",
    [Layout(prefill=3, decode=3), Layout(prefill=2, decode=3, pool_tokens=40 * 512)],
    ids=["large pools", "small pools"],
)
def test_no_request_is_lost_while_roles_change(layout: Layout, seed: int) -> None:
    trace = draw_trace(f"{TRAFFIC}{seed}")
    fleet = changed_fleet(trace, layout, seed)  # raises if one waits, or a block is held
    assert len(fleet.retired) >= 3
    for record in fleet.records:
        if not record.refused:
            assert record.tokens == record.request.output_tokens
            assert record.first_s <= record.last_s == record.end_s
    largest = layout.pool_tokens - 512
    assert all(
        record.request.prompt_tokens + record.request.output_tokens > largest
        for record in fleet.records
        if record.refused
    )
    gaps = sum(max(0, record.tokens - 1) for record in fleet.records)
    assert sum(fleet.gaps.counts) == gaps


def test_runs_of_steps_equal_single_steps_while_roles_change() -> None:
    trace = draw_trace(f"{TRAFFIC}9")[:80]
    layout = Layout(prefill=2, decode=3)
    runs, single = (
        changed_fleet(trace, layout, 9, every_token=every).records for every in (False, True)
    )
    for one, other in zip(runs, single, strict=True):
        assert one.tokens == other.tokens
        assert one.first_s == pytest.approx(other.first_s, rel=1e-6)
        assert one.end_s == pytest.approx(other.end_s, rel=1e-6)


def order_at(
    at_s: float, step: RoleStep, seen: list[str]
) -> Callable[[CapacityFleet, EventQueue], None]:
    def begun(fleet: CapacityFleet, timeline: EventQueue) -> None:
        changes = RoleChanges(fleet, timeline)
        timeline.at(at_s, lambda: seen.append(f"ordered {changes.order(step)}"))

        def watch() -> None:
            names = sorted(each.worker_id for each in fleet.stages())
            seen.append(f"{timeline.now_s:.1f} {' '.join(names)}")
            if fleet.finished < len(fleet.records):
                timeline.at(timeline.now_s + 1.0, watch)

        timeline.at(0.5, watch)

    return begun


def test_a_long_answer_migrates_when_the_drain_is_over() -> None:
    """It loses no token: the other worker gets its prompt with the tokens that it has."""
    trace = [TraceRequest(0.0, 1000, 4000)]  # 33 s of decoding
    seen: list[str] = []
    begun = order_at(1.0, RoleStep("d00000", "d00000", "prefill"), seen)
    scenario = CapacityScenario(Layout(prefill=1, decode=2))
    fleet = run_fleet(scenario, BY_HAND, trace, begun=begun)
    (record,) = fleet.records
    assert record.tokens == 4000
    assert record.longest_gap_s > 5e-5 * 1500, "the prompt and its tokens are computed again"
    (left,) = fleet.retired
    assert left.worker_id == "d00000"
    assert sorted(fleet.prefill) == ["d00000#1", "p00000"]
    there = [line for line in seen if "d00000 " in line]
    assert there and float(there[-1].split()[0]) == pytest.approx(1.0 + DRAIN_S, abs=1.0)
    back = [line for line in seen if "d00000#1" in line]
    assert float(back[0].split()[0]) == pytest.approx(1.0 + DRAIN_S + CHANGE_S, abs=1.2)


def test_an_idle_worker_changes_at_once_and_begins_empty() -> None:
    trace = [TraceRequest(0.0, 1000, 10, (1, 2)), TraceRequest(20.0, 1000, 10, (1, 2))]
    seen: list[str] = []
    begun = order_at(5.0, RoleStep("p00000", "p00000", "decode"), seen)
    fleet = run_fleet(CapacityScenario(Layout(prefill=2, decode=1)), BY_HAND, trace, begun=begun)
    assert "ordered True" in seen
    assert sorted(fleet.decode) == ["d00000", "p00000#1"]
    assert worker_id("p00000#1") == "p00000"
    first, second = fleet.records
    assert first.cached_tokens == 0 and second.tokens == 10


def rising_traffic(seconds: float = 120.0) -> list[TraceRequest]:
    """Prompts that one prefill worker computes, and three times as many from 30 s on."""
    rng, now_s, found = random.Random(5), 0.0, []
    while now_s < seconds:
        found.append(TraceRequest(now_s, rng.randint(3000, 5000), rng.randint(20, 60)))
        now_s += rng.expovariate(3.0 if now_s < 30 else 9.0)
    return found


GOALS = Objectives(2.0, 0.030)
SCENARIO = CapacityScenario(Layout(prefill=1, decode=3), GOALS, placement="disaggregated")


def test_a_controller_moves_a_worker_to_the_role_that_queues() -> None:
    trace = rising_traffic()
    controlled = ControlledFleet(SCENARIO)
    fleet = run_fleet(SCENARIO, BY_HAND, trace, begun=controlled.begun)
    assert {each.step.role for each in controlled.steps if each.step} == {"prefill"}
    assert 30 < controlled.steps[0].at_s < 45
    fixed = run_fleet(SCENARIO, BY_HAND, trace)
    good = [sum(meets(each, GOALS) for each in run.records) for run in (fleet, fixed)]
    assert good[0] > 1.5 * good[1]


def test_decode_steps_are_learned_beside_prompts() -> None:
    """Workers that compute prompts in every second report a step without, as real ones do."""
    window = LoadWindow()

    def begun(fleet: CapacityFleet, timeline: EventQueue) -> None:
        def tick() -> None:
            window.add(fleet_sample(fleet, timeline.now_s))
            if timeline.now_s < trace[-1].arrived_s - 1.0:
                timeline.at(timeline.now_s + 1.0, tick)

        timeline.at(1.0, tick)

    trace = [TraceRequest(0.1 * number, 300, 20 + number % 40) for number in range(600)]
    run_fleet(CapacityScenario(Layout(colocated=2)), BY_HAND, trace, begun=begun)
    step = window.load().step
    assert step is not None
    assert step.fixed_s == pytest.approx(BY_HAND.step.fixed_s, rel=0.01)
    assert step.per_sequence_s == pytest.approx(BY_HAND.step.per_sequence_s, rel=0.01)


def test_a_controller_with_old_reports_takes_no_step() -> None:
    def old(sample: FleetSample) -> FleetSample:
        return replace(sample, at_s=sample.at_s - 6.0)

    controlled = ControlledFleet(SCENARIO, old)
    run_fleet(SCENARIO, BY_HAND, rising_traffic(60.0), begun=controlled.begun)
    assert {each.reason for each in controlled.decisions} == {"stale"}
