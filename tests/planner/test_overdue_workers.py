"""Workers that were asked for and do not get ready: when each counts as overdue, and until when."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from baton.planner.controller_load import FleetSample, WorkerSample, WorkerState
from baton.planner.overdue_workers import STUCK_S, OverdueWorkers, WorkerProblem

START_S = 900.0
ASKED = ("w-0", "w-1", "w-2")
NO_NODE = WorkerProblem("no_node", "0/3 nodes are available")


@dataclass
class Site:
    """The workers that are registered, by state, as seconds pass."""

    states: dict[str, WorkerState] = field(default_factory=lambda: {"w-0": "ready"})
    problems: dict[str, WorkerProblem] = field(default_factory=dict)
    now_s: float = 50.0
    watched: OverdueWorkers = field(default_factory=lambda: OverdueWorkers(START_S))

    def pass_by(self, seconds: float, asked: tuple[str, ...] = ASKED) -> dict[str, str]:
        """Return the reason of each worker that is overdue after so many seconds."""
        for _ in range(int(seconds)):
            self.now_s += 1.0
            workers = [
                WorkerSample(name, f"{name}.0", "decode", state)
                for name, state in self.states.items()
            ]
            sample = FleetSample(self.now_s, tuple(workers))
            missing = self.watched.missing(asked, sample, self.now_s)
            self.overdue = self.watched.found(missing, self.problems)
        return {each.worker_id: each.problem.reason for each in self.overdue}


def test_a_worker_is_overdue_after_the_longest_start() -> None:
    site = Site()
    assert site.pass_by(START_S) == {}
    assert site.pass_by(1) == {"w-1": "not_ready", "w-2": "not_ready"}
    assert site.overdue[0].missing_s == START_S
    assert site.overdue[0].problem.detail == "it has not been ready for 900 s"


def test_a_worker_with_a_problem_is_overdue_sooner() -> None:
    site = Site(problems={"w-2": NO_NODE})
    assert site.pass_by(STUCK_S) == {}
    assert site.pass_by(1) == {"w-2": "no_node"}
    assert site.overdue[0].problem == NO_NODE


def test_a_problem_that_comes_late_counts_from_the_request() -> None:
    site = Site()
    assert site.pass_by(STUCK_S + 5) == {}
    site.problems["w-1"] = WorkerProblem("crash", "it has ended 3 times")
    assert site.pass_by(1) == {"w-1": "crash"}


def test_a_crash_loop_does_not_come_and_go() -> None:
    site = Site(problems={"w-1": WorkerProblem("crash", "")})
    assert site.pass_by(STUCK_S + 1) == {"w-1": "crash"}
    site.problems.clear()  # its container runs now, until the next crash
    assert site.pass_by(5) == {"w-1": "not_ready"}
    site.states["w-1"] = "ready"
    assert site.pass_by(1) == {}


@pytest.mark.parametrize("state", ["ready", "draining", "no counters"])
def test_a_worker_that_serves_is_not_missing(state: WorkerState) -> None:
    site = Site(states=dict.fromkeys(ASKED, state))
    assert site.pass_by(START_S + 5) == {}


@pytest.mark.parametrize("state", ["not ready", "unreachable"])
def test_a_registered_worker_may_be_overdue(state: WorkerState) -> None:
    site = Site(states={"w-0": "ready", "w-1": state, "w-2": "ready"})
    assert site.pass_by(START_S + 5) == {"w-1": "not_ready"}


def test_time_begins_again_once_a_worker_was_ready() -> None:
    site = Site(states=dict.fromkeys(ASKED, "ready"))
    site.pass_by(START_S)
    del site.states["w-1"]
    site.pass_by(START_S - 5)
    site.states["w-1"] = "ready"
    site.pass_by(1)
    del site.states["w-1"]
    assert site.pass_by(START_S) == {}
    assert site.pass_by(1) == {"w-1": "not_ready"}


def test_a_worker_that_is_given_up_is_forgotten() -> None:
    site = Site(states={"w-0": "ready", "w-1": "ready"})
    assert site.pass_by(START_S + 1) == {"w-2": "not_ready"}
    assert site.pass_by(1, asked=ASKED[:2]) == {}
    assert site.pass_by(START_S) == {}, "it was asked for again"
    assert site.pass_by(1) == {"w-2": "not_ready"}


def test_another_leader_counts_for_itself() -> None:
    site = Site()
    assert len(site.pass_by(START_S + 1)) == 2
    site.watched.clear()
    assert site.pass_by(START_S) == {}
