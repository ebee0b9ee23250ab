"""The history that a controller writes for its successor, and the successor's brakes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.planner.change_history import (
    CHANGE_S,
    HOUR_S,
    UNTAKEN_S,
    ChangeHistory,
    RoleStep,
    read_history,
)
from baton.planner.controller import (
    CHANGES_PER_WORKER,
    COOL_DOWN_S,
    REVERSAL_S,
    RoleController,
)
from tests.support.scripted_fleet import GOALS, ScriptedFleet, first_step, fleet, overloaded, run

ELSEWHERE_S = 5000.0  # clocks of two processes differ


def handed_over(
    controller: RoleController, scripted: ScriptedFleet, step: RoleStep | None = None
) -> RoleController:
    """Return the controller of another process, which has read what this one has left."""
    text = json.dumps(controller.memory(scripted.now_s, step))
    scripted.now_s += ELSEWHERE_S
    successor = RoleController(GOALS)
    successor.recall(json.loads(text), scripted.now_s)
    return successor


def turned() -> tuple[RoleController, ScriptedFleet]:
    """A controller that has moved workers to prefill and one back, and now would turn again."""
    scripted = fleet(3, 3, rate=8.0, tokens=6000.0)
    controller = RoleController(GOALS)
    steps: list[str] = []
    for minute in range(8):
        scripted.rate, scripted.tokens = (25.0, 100.0) if minute % 2 else (8.0, 6000.0)
        for each in run(controller, scripted, 60):
            if each.step is not None:
                steps.append(each.step.role)
                if len(set(steps)) == 2:
                    return controller, scripted
    raise AssertionError("the controller has never turned")


def reasons(controller: RoleController, scripted: ScriptedFleet, seconds: int) -> list[str]:
    return [each.reason for each in run(controller, scripted, seconds, acts=False)]


def test_a_reversal_is_remembered_over_a_restart() -> None:
    controller, scripted = turned()
    began_s = scripted.now_s
    successor = handed_over(controller, scripted)
    turn = scripted.tokens == 100.0
    scripted.rate, scripted.tokens = (8.0, 6000.0) if turn else (25.0, 100.0)
    found = run(successor, scripted, int(REVERSAL_S) - 20)
    assert "reversal" in {each.reason for each in found}
    last = successor.memory(scripted.now_s)["last_role"]
    assert {each.step.role for each in found if each.step is not None} <= {last}
    assert scripted.now_s - began_s - ELSEWHERE_S < REVERSAL_S


def test_without_its_memory_a_controller_would_reverse_at_once() -> None:
    """The test above can fail: a controller that knows nothing takes that step."""
    controller, scripted = turned()
    last = controller.memory(scripted.now_s)["last_role"]
    turn = scripted.tokens == 100.0
    scripted.rate, scripted.tokens = (8.0, 6000.0) if turn else (25.0, 100.0)
    found = run(RoleController(GOALS), scripted, int(REVERSAL_S) - 20)
    assert {each.step.role for each in found if each.step is not None} - {last}


def test_a_change_under_way_is_neither_repeated_nor_added_to() -> None:
    controller, scripted = overloaded()
    step = first_step(controller, scripted)
    successor = handed_over(controller, scripted, step)
    scripted.states[step.worker_id] = "draining"
    for decision in run(successor, scripted, 60, acts=False):
        assert decision.step is None
        if decision.now is not None:  # the change counts as done
            assert (decision.now.prefill, decision.now.decode) == (2, 3)


def test_a_change_that_never_began_is_over_after_a_while() -> None:
    """Its worker has not got the order: it is ready, and the boot that it was."""
    controller, scripted = overloaded()
    step = first_step(controller, scripted)
    successor = handed_over(controller, scripted, step)
    began_s = scripted.now_s
    taken = [each for each in run(successor, scripted, 60) if each.step is not None]
    assert taken and UNTAKEN_S < taken[0].at_s - began_s < CHANGE_S / 2
    assert taken[0].step is not None and taken[0].step.worker_id != step.worker_id


def test_a_cool_down_begins_where_a_change_is_found_done() -> None:
    controller, scripted = overloaded(8)
    step = first_step(controller, scripted)
    successor = handed_over(controller, scripted, step)
    scripted.change(step)
    began_s = scripted.now_s
    taken = [each.at_s for each in run(successor, scripted, 60) if each.step is not None]
    assert taken and taken[0] - began_s >= COOL_DOWN_S


def test_the_budget_of_an_hour_is_remembered() -> None:
    controller, scripted = overloaded()
    for _ in range(CHANGES_PER_WORKER * len(scripted.roles)):
        controller.took(RoleStep("d0", "d0.0", "prefill"), scripted.now_s)
    scripted.tick(CHANGE_S + 1)
    controller.decide(scripted.sample(), scripted.now_s)
    successor = handed_over(controller, scripted)
    assert "budget" in reasons(successor, scripted, 60)
    scripted.now_s += HOUR_S
    assert "budget" not in reasons(successor, scripted, 60)


def test_a_step_is_written_before_it_is_taken() -> None:
    history, step = ChangeHistory(), RoleStep("d0", "d0.0", "prefill")
    assert history.written(10.0, step)["last_role"] == "prefill"
    assert history.last_role is None and history.taken(10.0) == 0
    history.took(step, 10.0)
    back = RoleStep("p0", "p0.0", "decode")
    found = read_history(history.written(20.0, back), 1020.0)
    assert (found.last_role, found.reversed_s) == ("decode", 1020.0)
    assert (found.taken(1020.0), found.under_way) == (2, {"d0", "p0"})


def test_ages_are_kept_and_old_changes_dropped() -> None:
    history = ChangeHistory()
    history.took(RoleStep("d0", "d0.0", "prefill"), 0.0)
    history.took(RoleStep("d1", "d1.0", "prefill"), HOUR_S)
    written = history.written(HOUR_S + 1.0)
    assert written["taken_ago_s"] == [1.0]
    assert read_history(json.loads(json.dumps(written)), 7.0).written(7.0) == written


BROKEN: list[tuple[str, object]] = [
    ("last_role", "router"),
    ("reversed_ago_s", -1),
    ("reversed_ago_s", "long"),
    ("reversed_ago_s", float("nan")),
    ("ended_ago_s", True),
    ("taken_ago_s", 3),
    ("taken_ago_s", [None]),
    ("under_way", ["d0"]),
    ("under_way", [{"worker_id": "d0", "boot_id": "b", "role": "x", "begun_ago_s": 0}]),
    ("more", 1),
]


@pytest.mark.parametrize(("field", "value"), BROKEN)
def test_a_history_of_another_form_is_refused(field: str, value: object) -> None:
    written = ChangeHistory().written(0.0)
    with pytest.raises(ValueError, match="no age|no role|no list|has \\["):
        read_history({**written, field: value}, 0.0)


def test_a_history_that_is_no_mapping_is_refused() -> None:
    listed: Any = ["a list"]
    with pytest.raises(ValueError, match="a history has"):
        read_history(listed, 0.0)
