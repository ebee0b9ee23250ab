"""The number of workers: when more or fewer are asked for, and each reason for which none are."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import pytest

from baton.planner.change_history import HOUR_S, UNTAKEN_S, RoleStep
from baton.planner.control.worker_count import fleet_count
from baton.planner.controller import Decision, RoleController
from baton.planner.controller_load import FleetSample, WorkerRole, WorkerSample, WorkerState
from baton.planner.fleet_size import (
    FAILED_S,
    GROW_HOLD_S,
    GROWTHS_PER_HOUR,
    SETTLE_S,
    SHRINK_GAP_S,
    SIZE_REASONS,
    PoolState,
    SizeBounds,
    SizeController,
    SizeDecision,
)
from tests.support.json_values import Json
from tests.support.scripted_fleet import GOALS, fleet

BOUNDS = SizeBounds(least=2, most=8, release_s=120.0)


def decision(needed: int | None, at_s: float = 0.0, idle: bool = False) -> Decision:
    """A decision on roles of a fleet that needs so many workers; None: nothing is known."""
    if idle:
        return Decision(at_s, "idle", "there is no traffic")
    if needed is None:
        return Decision(at_s, "learning", "no speed is known yet")
    return Decision(at_s, "small_gain", "", wanted={"prefill": 1, "decode": needed - 1})


@dataclass
class Pool:
    """Workers w-0, w-1, ..: the first one prefills. `pending` are asked for and not there."""

    asked: int = 4
    pending: int = 0
    now_s: float = 1000.0
    roles: dict[str, WorkerRole] = field(default_factory=dict)
    states: dict[str, WorkerState] = field(default_factory=dict)
    changing: frozenset[str] = frozenset()
    overdue: int = 0
    least: int = 1
    controller: SizeController = field(default_factory=lambda: SizeController(BOUNDS))

    def sample(self) -> FleetSample:
        names = [f"w-{number}" for number in range(self.asked - self.pending)]
        return FleetSample(
            self.now_s,
            tuple(
                WorkerSample(
                    name,
                    f"{name}.0",
                    self.roles.get(name, "prefill" if name == "w-0" else "decode"),
                    self.states.get(name, "ready"),
                )
                for name in names
            ),
        )

    def decide(self, needed: int | None, *, idle: bool = False) -> SizeDecision:
        """Let a second pass."""
        self.now_s += 1.0
        last_id = f"w-{self.asked - 1}"
        state = PoolState(self.asked, last_id, self.changing, self.overdue, self.least)
        roles = decision(needed, self.now_s, idle)
        found = self.controller.decide(roles, self.sample(), state, self.now_s)
        assert found.reason in SIZE_REASONS and found.text
        return found

    def run(
        self, needed: int | None, seconds: float, *, idle: bool = False, acts: bool = True
    ) -> list[SizeDecision]:
        found = []
        for _ in range(int(seconds)):
            found.append(self.decide(needed, idle=idle))
            if (step := found[-1].step) is not None and acts:
                assert step.before == self.asked
                self.controller.took(step, self.now_s)
                self.asked = step.workers
        return found


def reasons(found: list[SizeDecision]) -> set[str]:
    return {each.reason for each in found}


def test_more_are_asked_for_once_the_need_has_lasted() -> None:
    pool = Pool(asked=4)
    found = pool.run(6, SETTLE_S + 1)
    assert pool.asked == 6
    steps = [each for each in found if each.step is not None]
    assert len(steps) == 1 and found.index(steps[0]) >= GROW_HOLD_S
    assert "6 workers are needed, 4 are asked for and 4 are ready" in steps[0].text
    assert reasons(found) == {"holding", "grow"}


def test_a_need_that_does_not_last_asks_for_none() -> None:
    pool = Pool(asked=4)
    for _ in range(20):
        assert all(each.step is None for each in pool.run(6, GROW_HOLD_S - 2))
        assert all(each.step is None for each in pool.run(4, 2))
    assert pool.asked == 4


def test_new_workers_are_waited_for_with_their_slow_start() -> None:
    pool = Pool(asked=4)
    pool.run(5, 30)
    assert pool.asked == 5
    pool.pending = 1
    assert reasons(pool.run(8, 100)) == {"holding", "starting"}
    pool.pending = 0
    found = pool.run(8, SETTLE_S + 1)
    assert [each.reason for each in found[: int(SETTLE_S)]] == ["cool_down"] * int(SETTLE_S)
    assert found[-1].reason == "grow" and pool.asked == 8


def test_no_more_are_asked_for_while_one_is_overdue() -> None:
    pool = Pool(asked=5, pending=1, overdue=1)
    found = pool.run(8, 300)
    assert pool.asked == 5 and reasons(found) == {"holding", "overdue"}
    assert found[-1].text.endswith("5 are asked for and 4 are ready: 1 of them are overdue")
    pool.pending = pool.overdue = 0
    assert "grow" in reasons(pool.run(8, SETTLE_S + 1))


def test_the_least_are_asked_for_while_one_is_overdue() -> None:
    """A user has raised the bound: that is no growth by load."""
    pool = Pool(asked=1, pending=1, overdue=1)
    assert reasons(pool.run(None, 1)) == {"grow"} and pool.asked == BOUNDS.least


def test_an_overdue_worker_may_leave() -> None:
    pool = Pool(asked=5, pending=1, overdue=1)
    assert "shrink" in reasons(pool.run(3, BOUNDS.release_s + SHRINK_GAP_S))


def test_a_worker_that_changes_its_role_is_not_waited_for() -> None:
    """Role changes are what an overload brings first, and each would hold up the request."""
    pool = Pool(asked=4, changing=frozenset({"w-2"}), states={"w-2": "draining"})
    found = pool.run(6, SETTLE_S + 1)
    assert pool.asked == 6 and reasons(found) == {"holding", "grow"}
    pool = Pool(asked=4, changing=frozenset({"w-2"}), states={"w-2": "draining"}, pending=1)
    assert reasons(pool.run(6, 100)) == {"holding", "starting"}


def test_a_changing_worker_that_is_ready_counts_once() -> None:
    """Its order had no answer: it may be as it was, and another one is not there yet."""
    pool = Pool(asked=4, changing=frozenset({"w-1"}), pending=1)
    assert reasons(pool.run(6, 100)) == {"holding", "starting"}


def test_a_step_doubles_the_fleet_at_most() -> None:
    pool = Pool(asked=2)
    pool.run(8, SETTLE_S + 2)
    assert pool.asked == 4


def test_no_more_than_the_most_are_asked_for() -> None:
    pool = Pool(asked=8)
    found = pool.run(20, 60)
    assert reasons(found) == {"at_most"} and found[-1].needed == 8
    text = "20 workers are needed, 8 are asked for and 8 are ready: 8 are the most"
    assert found[-1].text == text
    pool = Pool(asked=7)
    pool.run(20, 60)
    assert pool.asked == 8


def test_an_hour_has_a_budget_of_growth() -> None:
    pool = Pool(asked=2)
    for _ in range(GROWTHS_PER_HOUR):
        pool.run(3, 40)
        assert pool.asked == 3
        pool.asked = 2  # a user takes one away
    found = pool.run(3, 60)
    assert "budget" in reasons(found) and pool.asked == 2
    pool.now_s += HOUR_S
    pool.run(3, 60)
    assert pool.asked == 3


def test_fewer_than_the_least_are_never_left() -> None:
    """A StatefulSet without a number begins with one pod; no load has to be known."""
    pool = Pool(asked=1)
    found = pool.run(None, 1)
    assert found[0].reason == "grow" and pool.asked == 2
    assert "1 workers are asked for, the minimum is 2" in found[0].text


@pytest.mark.parametrize("asked", [4, 9])  # 9: above the most, too
def test_an_orchestrators_least_is_kept(asked: int) -> None:
    pool = Pool(asked=asked, least=asked)
    found = pool.run(2, BOUNDS.release_s + 1)
    assert pool.asked == asked and "at_least" in reasons(found)
    assert f"{asked} are the least that the orchestrator takes" in found[-1].text
    pool.least = asked - 1
    pool.run(2, 1)
    assert pool.asked == asked - 1


def test_a_fleet_on_ray_keeps_its_prefill_workers() -> None:
    found = fleet_count("1", prefill=2, decode=3)
    assert found.worker_ids == ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2")
    assert (found.asked, found.least) == (5, 3)


def test_one_leaves_once_fewer_were_enough_for_long() -> None:
    pool = Pool(asked=6)
    found = pool.run(4, BOUNDS.release_s + 1)
    assert pool.asked == 5 and reasons(found) == {"holding", "shrink"}
    step = found[-1].step
    assert step is not None and step.leaving is not None
    assert (step.workers, step.leaving.worker_id) == (5, "w-5")
    assert [each.reason for each in found[:-1]] == ["holding"] * int(BOUNDS.release_s)
    found = pool.run(4, SHRINK_GAP_S)
    assert reasons(found[:-1]) == {"cool_down"} and found[-1].reason == "shrink"
    assert pool.asked == 4
    assert reasons(pool.run(4, 300)) == {"enough"}


def test_a_need_within_the_time_keeps_all() -> None:
    pool = Pool(asked=6)
    for _ in range(5):
        assert all(each.step is None for each in pool.run(4, BOUNDS.release_s - 2))
        assert all(each.step is None for each in pool.run(6, 2))


def test_idle_workers_leave_down_to_the_least() -> None:
    pool = Pool(asked=5)
    pool.run(None, 1200, idle=True)
    assert pool.asked == BOUNDS.least


def test_what_is_not_known_changes_nothing() -> None:
    pool = Pool(asked=6)
    found = pool.run(None, 1000)
    assert reasons(found) == {"unknown"}
    assert found[-1].text == "learning: no speed is known yet"
    pool.run(4, 30)
    pool.run(None, 100)
    assert reasons(pool.run(4, BOUNDS.release_s)) == {"holding"}  # it begins again


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_last_worker_of_a_role_never_leaves(role: WorkerRole) -> None:
    other: WorkerRole = "decode" if role == "prefill" else "prefill"
    pool = Pool(asked=4, roles={f"w-{n}": other for n in range(3)} | {"w-3": role})
    found = pool.run(2, 1000)
    assert pool.asked == 4 and found[-1].reason == "last_worker"
    assert f"w-3 would leave, the last {role} worker: it stays" in found[-1].text
    assert found[-1].handover == RoleStep("w-0", "w-0.0", role)  # then it may


def test_the_last_two_workers_hand_nothing_over() -> None:
    pool = Pool(asked=2, controller=SizeController(SizeBounds(least=1, most=8, release_s=10.0)))
    found = pool.run(1, 20)
    assert found[-1].reason == "last_worker" and found[-1].handover is None


def test_one_that_is_not_ready_does_not_count_as_another() -> None:
    pool = Pool(asked=4, roles={"w-1": "prefill", "w-3": "prefill"})
    pool.states = {"w-0": "draining", "w-1": "not ready"}
    found = pool.run(2, 500)
    assert pool.asked == 4 and found[-1].reason == "changing"
    assert "w-0, w-1 are not ready" in found[-1].text


def test_no_worker_leaves_amid_a_role_change() -> None:
    pool = Pool(asked=4, changing=frozenset({"w-1"}))
    assert pool.run(2, 500)[-1].reason == "changing" and pool.asked == 4


def test_one_that_is_not_registered_amid_a_change_stays() -> None:
    """Between its two boots a worker that changes its role is not in the registry."""
    pool = Pool(asked=4, pending=1, changing=frozenset({"w-3"}))
    assert pool.run(2, 500)[-1].reason == "changing" and pool.asked == 4
    pool.changing = frozenset()
    pool.run(2, 1)
    assert pool.asked == 3


def test_a_worker_that_drains_already_can_leave() -> None:
    """The number was refused after its drain: the next step asks again."""
    pool = Pool(asked=4, states={"w-3": "draining"})
    pool.run(3, BOUNDS.release_s + 1)
    assert pool.asked == 3


def test_one_that_never_came_leaves_without_a_drain() -> None:
    pool = Pool(asked=4, pending=1)
    found = pool.run(3, BOUNDS.release_s + 1)
    assert pool.asked == 3
    step = found[-1].step
    assert step is not None and step.leaving is None and "w-3 is not registered" in found[-1].text


def test_more_than_the_most_leave_one_by_one() -> None:
    pool = Pool(asked=10)
    found = pool.run(10, 2 * SHRINK_GAP_S)
    assert pool.asked == 8
    assert "10 workers are asked for, 8 are the most" in found[0].text


def test_a_request_that_failed_is_not_repeated_at_once() -> None:
    pool = Pool(asked=4)
    found = pool.run(6, 20, acts=False)
    assert found[-1].reason == "grow"
    pool.controller.failed(pool.now_s)
    held = pool.decide(20)
    assert (held.reason, held.needed) == ("failed", BOUNDS.most)
    assert reasons(pool.run(6, FAILED_S - 2)) == {"failed"}
    pool.run(6, 2)
    assert pool.asked == 6


def test_a_successor_knows_growth_and_the_last_change() -> None:
    pool = Pool(asked=2)
    for _ in range(GROWTHS_PER_HOUR - 1):
        pool.run(3, 40)
        pool.asked = 2
    found = pool.run(3, 30, acts=False)
    assert found[-1].step is not None
    text = json.dumps(pool.controller.memory(pool.now_s, found[-1].step))
    pool.controller = SizeController(BOUNDS)
    pool.now_s += 5000.0  # of another clock
    pool.controller.recall(json.loads(text), pool.now_s)
    assert "budget" in reasons(pool.run(3, 30))
    pool.asked = 10
    assert reasons(pool.run(3, SHRINK_GAP_S - 31)) == {"cool_down"}


@pytest.mark.parametrize("ordered", [True, False])
def test_a_successor_knows_which_worker_may_drain(ordered: bool) -> None:
    """The order had no answer, or its leader ended before it could know that."""
    pool = Pool(asked=6)
    step = pool.run(4, BOUNDS.release_s + 1, acts=False)[-1].step
    assert pool.controller.drain_hindrance(pool.now_s) is None
    if ordered:
        pool.controller.unanswered("w-5", pool.now_s)
    text = json.dumps(pool.controller.memory(pool.now_s, None if ordered else step))
    successor = SizeController(BOUNDS)
    successor.recall(json.loads(text), 70.0)
    held = successor.drain_hindrance(70.0 + UNTAKEN_S)
    assert held is not None and held.startswith(
        "w-5 may have got an order to drain in the last 20 s"
    )
    assert successor.drain_hindrance(70.0 + UNTAKEN_S + 0.1) is None


@pytest.mark.parametrize(
    "memory",
    [
        {},
        ["a list"],
        {"grown_ago_s": [], "changed_ago_s": None},
        {"grown_ago_s": [], "changed_ago_s": "x", "may_drain": None},
        {"grown_ago_s": [-1], "changed_ago_s": None, "may_drain": None},
        {"grown_ago_s": [], "changed_ago_s": None, "may_drain": "w-3"},
        {"grown_ago_s": [], "changed_ago_s": None, "may_drain": {"worker_id": "w-3"}},
    ],
)
def test_a_memory_of_another_form_is_refused(memory: Json) -> None:
    with pytest.raises(ValueError, match="not a memory|no age"):
        SizeController(BOUNDS).recall(memory, 0.0)


def test_an_objective_that_none_meets_is_named() -> None:
    roles, pool = replace(decision(4), shortfall="not even 9"), PoolState(4, "w-3", frozenset())
    found = SizeController(BOUNDS).decide(roles, Pool().sample(), pool, 1000.0)
    assert found.reason == "enough" and found.text.endswith(f"ready; {roles.shortfall}")


def test_the_forecast_of_an_overload_asks_for_more_workers() -> None:
    """The role controller's own numbers: no ratio of four workers serves this load."""
    scripted = fleet(1, 3, rate=4.0)
    roles, sizes = RoleController(GOALS), SizeController(BOUNDS)
    last: SizeDecision | None = None
    for second in range(90):
        if second == 40:
            scripted.rate = 60.0
        sample = scripted.tick()
        found = roles.decide(sample, scripted.now_s)
        if found.step is not None:
            roles.took(found.step, scripted.now_s)
            scripted.change(found.step)
        last = sizes.decide(found, sample, PoolState(4, "d2", roles.changing), scripted.now_s)
        if last.step is not None:
            break
        assert second < 40 or last.reason in ("holding", "unknown", "enough")
    assert last is not None and last.step is not None and last.step.workers > 4
