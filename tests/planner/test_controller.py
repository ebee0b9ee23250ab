"""The role controller's decisions: what it does, and each of the reasons for which it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.planner.change_history import CHANGE_S, RoleStep
from baton.planner.controller import (
    CHANGES_PER_WORKER,
    COOL_DOWN_S,
    HOLD_S,
    MIN_SPAN_S,
    REASONS,
    REFUSED_S,
    REVERSAL_S,
    STALE_S,
    RoleController,
)
from baton.planner.controller_load import (
    FleetSample,
    WorkerRole,
)
from tests.support.scripted_fleet import (
    GOALS,
    first_step,
    fleet,
    overloaded,
    run,
    until,
)


def test_overloaded_prefill_gets_a_worker_within_ten_seconds() -> None:
    controller, scripted = overloaded()
    decisions = run(controller, scripted, 10)
    taken = [each for each in decisions if each.step is not None]
    assert taken and taken[0].step is not None and taken[0].step.role == "prefill"
    assert "becomes a prefill worker: 1:4 is predicted to serve" in taken[0].text
    assert taken[0].now is not None and taken[0].best is not None
    assert taken[0].best.goodput_per_s > taken[0].now.goodput_per_s


def test_overloaded_decode_gets_a_worker() -> None:
    scripted = fleet(4, 1, rate=2.0, tokens=100.0)
    controller = RoleController(GOALS)
    run(controller, scripted, 30)
    scripted.rate = 10.0  # 1,000 tokens a second: a batch of 20 and more for each step of 30 ms
    roles = {each.step.role for each in run(controller, scripted, 30) if each.step is not None}
    assert roles == {"decode"}


def test_a_load_that_any_ratio_serves_moves_no_worker() -> None:
    scripted = fleet(2, 2, rate=1.0)
    decisions = run(RoleController(GOALS), scripted, 120)
    assert {each.reason for each in decisions} == {"learning", "small_gain"}
    assert "no other ratio more" in decisions[-1].text


def test_a_step_is_taken_only_after_its_reason_has_lasted() -> None:
    controller, scripted = overloaded()
    held_s = until(controller, scripted, "holding")
    taken_s = until(controller, scripted, "taken")
    assert taken_s >= HOLD_S > 0 and held_s < 10


def test_the_least_busy_worker_is_moved() -> None:
    controller, scripted = overloaded()
    until(controller, scripted, "holding")
    for _ in range(10):
        sample = scripted.tick()
        workers = tuple(
            replace(e, running=e.running + (e.worker_id != "d2")) for e in sample.workers
        )
        decision = controller.decide(FleetSample(sample.at_s, workers), scripted.now_s)
        if decision.step is not None:
            break
    assert decision.step == RoleStep("d2", "d2.0", "prefill")


# -- reasons for no step ------------------------------------------------------------------------


def test_stale_reports_are_not_acted_on() -> None:
    controller, scripted = overloaded()
    until(controller, scripted, "holding")
    for _ in range(20):
        sample = scripted.tick()
        decision = controller.decide(sample, scripted.now_s + STALE_S + 0.1)
        assert (decision.reason, decision.step) == ("stale", None)
        assert "5.1 s old" in decision.text


def test_the_same_report_again_moves_no_worker() -> None:
    """A reader that returns its last report for ever is stale once STALE_S has passed."""
    controller, scripted = overloaded()
    sample = scripted.tick()
    reasons = [controller.decide(sample, scripted.now_s + n).reason for n in range(20)]
    assert "taken" not in reasons and reasons[-1] == "stale"


def test_a_silent_worker_holds_every_step() -> None:
    controller, scripted = overloaded()
    scripted.states["d3"] = "unreachable"
    decisions = run(controller, scripted, 20)
    assert {each.reason for each in decisions} == {"unreachable"}
    assert decisions[0].text == "no report of d3"


def test_a_worker_without_counters_is_not_called_silent() -> None:
    controller, scripted = overloaded()
    scripted.states |= {"d2": "no counters", "d3": "unreachable"}
    (decision,) = run(controller, scripted, 1)
    assert decision.reason == "unreachable"
    assert decision.text.startswith("no report of d3; another version of Baton, with other c")


def test_a_controller_that_starts_again_learns_first() -> None:
    _, scripted = overloaded()
    decisions = run(RoleController(GOALS), scripted, int(MIN_SPAN_S))
    assert {each.reason for each in decisions} == {"learning"}


def test_prefill_workers_that_compute_nothing_can_be_moved() -> None:
    """All prompts are computed locally: a prefill worker's speed will never be known."""
    scripted = fleet(3, 1, rate=0.5, tokens=0.0)
    controller = RoleController(GOALS)
    run(controller, scripted, 30)
    scripted.rate = 10.0
    decisions = run(controller, scripted, 60)
    steps = [each for each in decisions if each.step is not None]
    assert {each.step.role for each in steps if each.step is not None} == {"decode"}
    assert decisions[0].wanted["prefill"] == 1
    assert len(scripted.of("prefill")) >= 1


def test_a_gap_in_the_reports_begins_the_rates_again() -> None:
    controller, scripted = overloaded()
    scripted.tick(30.0)
    assert run(controller, scripted, 1)[0].reason == "learning"


def test_no_traffic_is_a_reason_of_its_own() -> None:
    scripted = fleet(2, 2, rate=0.0)
    assert run(RoleController(GOALS), scripted, 20)[-1].reason == "idle"


@pytest.mark.parametrize("decode", [1, 2, 3])
def test_the_last_worker_of_a_role_stays(decode: int) -> None:
    controller, scripted = overloaded(decode)
    scripted.rate = 1000.0
    for decision in run(controller, scripted, 200):
        assert decision.reason in REASONS
        assert len(scripted.of("decode")) >= 1
    if decode == 1:
        assert until(controller, scripted, "last_worker") >= 1


def test_a_direction_that_was_better_before_does_not_count_on() -> None:
    """No ratio of the last two workers is better, whatever the reason for no step says."""
    controller, scripted = overloaded()
    until(controller, scripted, "holding")
    gone = {name: scripted.roles.pop(name) for name in ("d1", "d2", "d3")}
    between = run(controller, scripted, int(HOLD_S) + 1)
    assert {each.reason for each in between} == {"last_worker"}
    scripted.roles |= gone
    (decision,) = run(controller, scripted, 1)
    assert decision.reason == "holding" and decision.text.endswith(" for 0.0 s")


def test_ready_workers_count_and_not_registered_ones() -> None:
    """Two decode workers, of which one is not ready: the other one is the last."""
    controller, scripted = overloaded(2)
    scripted.states["d1"] = "not ready"
    decisions = run(controller, scripted, 30)
    assert all(each.step is None for each in decisions)
    assert "last_worker" in {each.reason for each in decisions}


def test_one_change_at_a_time_in_a_small_fleet() -> None:
    controller, scripted = overloaded()
    step = first_step(controller, scripted)
    controller.took(step, scripted.now_s)
    scripted.states[step.worker_id] = "draining"
    decisions = run(controller, scripted, 20, acts=False)
    assert all(each.step is None for each in decisions)
    assert {each.reason for each in decisions} <= {"changing", "holding", "small_gain"}


def test_a_change_of_another_controller_counts() -> None:
    """A controller that was killed in a change leaves a draining worker: the next one waits."""
    _, scripted = overloaded()
    scripted.states["d0"] = "draining"
    decisions = run(RoleController(GOALS), scripted, 30)
    assert all(each.step is None for each in decisions)
    assert "changing" in {each.reason for each in decisions}


def test_a_cool_down_follows_each_change() -> None:
    controller, scripted = overloaded(8)
    taken = [each.at_s for each in run(controller, scripted, 60) if each.step is not None]
    assert len(taken) >= 2
    gaps = [later - first for first, later in zip(taken, taken[1:], strict=False)]
    assert min(gaps) >= COOL_DOWN_S


def test_a_reversal_waits_for_the_one_before() -> None:
    """The mix turns each minute; directions change at most once in REVERSAL_S."""
    scripted = fleet(3, 3, rate=4.0)
    controller = RoleController(GOALS)
    steps: list[tuple[float, WorkerRole]] = []
    reasons = set()
    for minute in range(20):
        scripted.rate, scripted.tokens = (25.0, 100.0) if minute % 2 else (8.0, 6000.0)
        for each in run(controller, scripted, 60):
            reasons.add(each.reason)
            if each.step is not None:
                steps.append((each.at_s, each.step.role))
    turns = [b[0] for a, b in zip(steps, steps[1:], strict=False) if a[1] != b[1]]
    assert len(turns) >= 2
    gaps = [later - first for first, later in zip(turns, turns[1:], strict=False)]
    assert min(gaps) >= REVERSAL_S
    assert "reversal" in reasons


def test_an_hour_has_a_budget() -> None:
    controller, scripted = overloaded()
    step = RoleStep("d0", "d0.0", "prefill")
    for _ in range(CHANGES_PER_WORKER * len(scripted.roles)):
        controller.took(step, scripted.now_s)
    controller.decide(scripted.tick(CHANGE_S + 1), scripted.now_s)  # those changes have failed
    decisions = run(controller, scripted, 60)
    assert all(each.step is None for each in decisions)
    assert "budget" in {each.reason for each in decisions}


def test_a_worker_that_refuses_is_passed_over_for_a_while() -> None:
    controller, scripted = overloaded()
    refused = []
    for _ in range(4):
        step = first_step(controller, scripted)
        controller.refused(step, scripted.now_s)
        refused.append(step.worker_id)
    assert sorted(refused) == ["d0", "d1", "d2", "d3"]
    assert until(controller, scripted, "no_worker") < REFUSED_S
    assert until(controller, scripted, "taken", most=int(REFUSED_S) + 1) > 1


def test_a_change_that_never_ends_is_given_up() -> None:
    controller, scripted = overloaded()
    step = first_step(controller, scripted)
    controller.took(step, scripted.now_s)
    others = [each.step for each in run(controller, scripted, int(CHANGE_S) + 20) if each.step]
    assert others and others[0].worker_id != step.worker_id
