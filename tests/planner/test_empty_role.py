"""What the role controller does about a role that has no ready worker."""

from __future__ import annotations

import pytest

from baton.planner.change_history import CHANGE_S, RoleStep
from baton.planner.controller import EMPTY_S, MIN_SPAN_S, RoleController
from tests.support.scripted_fleet import (
    GOALS,
    fleet,
    run,
    until,
)


@pytest.mark.parametrize("rate", [0.0, 4.0])
@pytest.mark.parametrize("roles", [(3, 0), (0, 3)])
def test_a_role_without_workers_gets_one(roles: tuple[int, int], rate: float) -> None:
    """No traffic is no reason to leave it so: without a decode worker nothing can be served."""
    scripted = fleet(*roles, rate=rate)
    decisions = run(RoleController(GOALS), scripted, int(MIN_SPAN_S + EMPTY_S) + 3)
    steps = [each for each in decisions if each.step is not None]
    assert len(steps) == 1 and steps[0].step is not None
    assert steps[0].step.role == ("prefill" if roles[0] == 0 else "decode")
    assert min(len(scripted.of("prefill")), len(scripted.of("decode"))) == 1
    before = [each.reason for each in decisions if each.at_s < steps[0].at_s]
    assert set(before) == {"learning", "last_worker"}
    assert before.count("last_worker") >= EMPTY_S


@pytest.mark.parametrize("roles", [(1, 0), (0, 1), (0, 0)])
def test_the_only_worker_of_a_fleet_keeps_its_role(roles: tuple[int, int]) -> None:
    scripted = fleet(*roles, rate=0.0)
    decisions = run(RoleController(GOALS), scripted, 200)
    assert {each.reason for each in decisions} == {"learning", "last_worker"}
    assert "start more workers" in decisions[-1].text


def test_a_worker_that_is_away_for_a_moment_is_not_replaced() -> None:
    scripted = fleet(3, 1, rate=0.0)
    controller = RoleController(GOALS)
    run(controller, scripted, 20)
    del scripted.roles["d0"]
    decisions = run(controller, scripted, int(EMPTY_S) - 1)
    assert {each.reason for each in decisions} == {"last_worker"}
    scripted.roles["d0"] = "decode"
    assert run(controller, scripted, 1)[0].reason == "idle"
    del scripted.roles["d0"]  # the controller waits for it from the start again
    assert {each.step for each in run(controller, scripted, int(EMPTY_S) - 1)} == {None}


@pytest.mark.parametrize("name", ["d0", "p0"])
def test_a_drain_may_be_the_change_that_fills_the_role(name: str) -> None:
    """Another controller has ordered it, and was killed."""
    scripted = fleet(4, 1, rate=0.0)
    scripted.states |= {"d0": "not ready", name: "draining"}
    decisions = run(RoleController(GOALS), scripted, int(CHANGE_S) + 30)
    assert {each.reason for each in decisions} == {"learning", "last_worker"}
    assert f"{name} drains" in decisions[-1].text


def test_a_worker_that_is_not_ready_gets_the_time_of_a_change() -> None:
    scripted = fleet(3, 1, rate=0.0)
    scripted.states["d0"] = "not ready"
    decisions = run(RoleController(GOALS), scripted, int(CHANGE_S + MIN_SPAN_S) + 3)
    (step,) = (each for each in decisions if each.step is not None)
    assert step.at_s - decisions[0].at_s >= CHANGE_S


def test_a_reversal_that_fills_a_role_does_not_wait() -> None:
    scripted = fleet(3, 1, rate=0.0)
    controller = RoleController(GOALS)
    run(controller, scripted, 20)
    for role in ("decode", "prefill"):  # a reversal, whose change is still under way
        controller.took(RoleStep("p9", "p9.0", role), scripted.now_s)
    del scripted.roles["d0"]
    steps = [each.step for each in run(controller, scripted, int(EMPTY_S) + 2) if each.step]
    assert [step.role for step in steps] == ["decode"]


def test_a_role_is_filled_by_another_worker_if_one_refuses() -> None:
    scripted = fleet(2, 0, rate=0.0)
    controller = RoleController(GOALS)
    for name in ("p0", "p1"):
        until(controller, scripted, "taken")
        controller.refused(RoleStep(name, f"{name}.0", "decode"), scripted.now_s)
    assert until(controller, scripted, "no_worker") == 1
