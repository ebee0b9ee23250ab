"""The number of workers, as a leader asks for it: in which order, and what happens when a call is
refused, late, or done by halves."""

from __future__ import annotations

import asyncio
import json

import pytest
from structlog.testing import capture_logs

from baton.planner.change_history import UNTAKEN_S
from baton.planner.control import size_loop, size_step
from baton.planner.control.leadership import TERM_S
from baton.planner.control.order_rules import OrderUnanswered
from baton.planner.control.repeated_event import REPEAT_S
from baton.planner.fleet_size import FAILED_S
from baton.runtime import metrics
from baton.runtime.errors import BatonError, Unavailable
from tests.support.role_loop_scene import ScriptedLeadership
from tests.support.sized_scene import SizedScene


def count(name: str, **labels: str) -> float:
    return metrics.REGISTRY.get_sample_value(name, labels) or 0.0


async def test_more_workers_are_asked_for_and_none_drains() -> None:
    scene = SizedScene()
    before = count("baton_size_decisions_total", reason="grow")
    await scene.flood()
    assert scene.pool.calls == ["resize 8"] and scene.pool.asked == 8
    assert count("baton_size_decisions_total", reason="grow") == before + 1
    assert count("baton_asked_workers") == 8.0
    report = scene.loop.size_report()
    assert report["reason"] in ("at_most", "starting") and report["text"]


async def test_the_worker_that_leaves_drains_before_the_number_falls() -> None:
    scene = SizedScene()
    await scene.calm()
    assert scene.pool.calls[:3] == ["check 4", "drain d3.0", "resize 4"]
    assert scene.pool.asked == 4


async def test_a_step_is_in_the_memory_before_it_is_asked_for() -> None:
    scene = SizedScene()
    left: list[bytes | None] = []
    scene.pool.amid["resize"] = lambda: left.append(scene.leadership.left)
    await scene.flood()
    written = [json.loads(each)["memory"]["size"] for each in left if each is not None]
    assert written and len(written[0]["grown_ago_s"]) == 1


async def test_an_order_to_drain_is_in_the_memory_with_its_age() -> None:
    """The successor counts from the order, not from the calls before it, which may be slow."""
    scene = SizedScene()

    def be_slow() -> None:
        scene.leadership.now_s += 3.0

    found: list[bool] = []

    def compare() -> None:
        assert scene.leadership.left is not None
        left = json.loads(scene.leadership.left)
        drain = {"worker_id": "d3", "ordered_ago_s": 0.0}
        found.append(left["memory"]["size"]["may_drain"] == drain)
        found.append(left["at_s"] == scene.leadership.now_s)

    scene.pool.amid["check"], scene.amid_drain = be_slow, compare
    await scene.calm(40)
    assert found == [True, True]


async def test_a_follower_and_an_adviser_ask_for_nothing() -> None:
    for scene in (SizedScene(leadership=ScriptedLeadership(leads=False)), SizedScene(acts=False)):
        await scene.flood()
        await scene.calm()
        assert scene.pool.calls == [] and scene.sizes.decision is None


async def test_a_new_leader_asks_for_nothing_in_its_first_seconds() -> None:
    scene = SizedScene()
    scene.pool.asked = 1  # below the least: no need to look at the load first
    await scene.pass_by(int(TERM_S) - 1)
    assert scene.pool.calls == []
    await scene.pass_by(5)
    assert scene.pool.calls == ["resize 2"]


@pytest.mark.parametrize("refusal", [BatonError("403: not allowed"), Unavailable("no answer")])
async def test_where_the_number_cannot_fall_no_worker_drains(refusal: BatonError) -> None:
    """The account has no right, or the API is away: a drain would be for nothing."""
    scene = SizedScene()
    scene.pool.faults["check"] = refusal
    failures = count("baton_size_failures_total")
    await scene.calm(40 + int(FAILED_S))
    assert set(scene.pool.calls) == {"check 4"} and len(scene.pool.calls) == 2
    assert count("baton_size_failures_total") == failures + 2


async def test_no_number_below_the_orchestrators_least_is_asked() -> None:
    scene = SizedScene()
    scene.pool.least = scene.pool.asked
    await scene.calm(40 + int(FAILED_S))
    assert scene.pool.calls == []
    assert scene.sizes.report()["reason"] == "at_least"


async def test_a_worker_that_refuses_to_drain_keeps_its_pod() -> None:
    scene = SizedScene()
    scene.refusal_of_drain = Unavailable("d3 is the last decode worker in the registry")
    await scene.calm(40)
    assert scene.pool.calls == ["check 4", "drain d3.0"] and scene.pool.asked == 5


@pytest.mark.parametrize(
    ("fault", "waits"),
    [
        (OrderUnanswered("d3 has not accepted the order"), True),
        (Unavailable("d3 refused the order"), False),
        (None, True),
    ],
)
async def test_no_role_changes_while_a_worker_may_begin_to_drain(
    fault: BatonError | None, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The role would lose both workers: the reports do not show yet that it drains."""
    monkeypatch.setattr(size_step, "CALL_S", 0.02)
    scene = SizedScene()
    scene.refusal_of_drain = fault
    scene.pool.hangs = "" if fault is not None else "drain"  # the call takes too long
    while "drain d3.0" not in scene.pool.calls:
        await scene.calm(1)
    scene.reader.scripted.rate = 30.0
    await scene.pass_by(int(UNTAKEN_S) - 2)
    assert bool(scene.ordered) != waits
    await scene.pass_by(int(UNTAKEN_S))
    assert scene.ordered


@pytest.mark.parametrize("forgets", [False, True])
async def test_a_successor_waits_for_a_worker_that_may_drain(forgets: bool) -> None:
    """`forgets` shows that the memory is what holds it back."""
    scene = SizedScene()
    scene.refusal_of_drain = OrderUnanswered("d3 has not accepted the order")
    while "drain d3.0" not in scene.pool.calls:
        await scene.calm(1)
    scene.leadership.term += 1
    scene.start()
    if forgets:
        scene.leadership.left = None
    scene.reader.scripted.rate = 30.0
    await scene.pass_by(int(UNTAKEN_S) - 2)
    assert bool(scene.ordered) is forgets
    await scene.pass_by(int(UNTAKEN_S))
    assert scene.ordered


async def test_a_number_that_is_refused_after_a_drain_is_asked_again() -> None:
    """Done by halves: the worker drains, and its pod starts it again."""
    scene = SizedScene()
    scene.pool.faults["resize"] = Unavailable("the API has not answered")
    await scene.calm(40)
    assert scene.pool.calls == ["check 4", "drain d3.0", "resize 4"]
    scene.reader.scripted.states.clear()
    scene.pool.faults.clear()
    await scene.pass_by(int(FAILED_S))
    assert scene.pool.asked == 4
    assert scene.pool.calls[3:6] == ["check 4", "drain d3.0", "resize 4"]


async def test_a_number_that_a_user_changes_amid_a_drain_stays() -> None:
    scene = SizedScene()

    def add_one() -> None:
        scene.pool.asked += 1

    scene.amid_drain = add_one
    await scene.calm(40)
    assert scene.pool.calls == ["check 4", "drain d3.0"] and scene.pool.asked == 6


async def test_a_change_that_was_made_without_an_answer_is_seen() -> None:
    """The PATCH arrived, and its answer was lost: no second one follows."""
    scene = SizedScene()
    scene.pool.faults["resize"] = Unavailable("the API has not answered")
    await scene.flood()
    assert scene.pool.calls == ["resize 8"]
    scene.pool.asked, scene.pool.version = 8, 2
    await scene.pass_by(2 * int(FAILED_S))
    assert scene.pool.calls == ["resize 8"]


async def test_the_last_worker_of_a_role_leaves_after_a_handover() -> None:
    scene = SizedScene()
    scene.pool.last = "p0"  # the only prefill worker has the highest number
    with capture_logs() as logs:
        await scene.calm(35)
    assert [e["worker_id"] for e in logs if e["event"] == "role handed over"] == [
        each.worker_id for each in scene.ordered
    ]
    assert [each.role for each in scene.ordered] == ["prefill"]
    taker = scene.ordered[0].worker_id
    assert scene.pool.calls == [] or scene.pool.calls[0] == "check 4"
    await scene.calm(35)
    assert scene.pool.calls[:3] == ["check 4", "drain p0.0", "resize 4"]
    assert scene.reader.scripted.roles[taker] == "prefill"


async def test_a_handover_keeps_to_the_brakes_of_role_changes() -> None:
    scene = SizedScene()
    scene.pool.last = "p0"
    scene.refusal = Unavailable("the worker of a test keeps its role")
    with capture_logs() as logs:
        await scene.calm(60)
    assert len(scene.ordered) == len({each.worker_id for each in scene.ordered})
    assert scene.pool.calls == []
    assert "role handed over" not in [each["event"] for each in logs], "none has accepted"


async def test_leadership_is_renewed_before_a_handover() -> None:
    """It ended while the number was read."""
    scene = SizedScene()
    scene.pool.last = "p0"
    scene.pool.amid["count"] = lambda: setattr(scene.leadership, "leads", False)
    handovers = []
    for _ in range(35):
        scene.leadership.leads = True
        await scene.calm(1)
        handovers.append(scene.sizes.decision is not None and scene.sizes.decision.handover)
    assert any(handovers) and scene.ordered == []


async def test_a_step_that_is_not_taken_is_logged_once_a_minute() -> None:
    """The counters of the worker that should leave grow in each report."""
    scene = SizedScene()
    scene.leadership.broken = True
    with capture_logs() as logs:
        await scene.calm(120)
    said = [each["log_level"] for each in logs if each["event"] == "workers not asked for"]
    assert 1 <= len(said) <= 2 + 120 / REPEAT_S


async def test_a_follower_reports_no_number() -> None:
    scene = SizedScene()
    await scene.flood()
    assert count("baton_asked_workers") == 8.0 and scene.loop.size_report()
    scene.leadership.leads = False
    await scene.pass_by(1)
    assert count("baton_asked_workers") == 0.0 and scene.loop.size_report() == {}


async def test_a_number_that_is_not_read_holds_up_no_role(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(size_loop, "ANSWER_S", 0.01)
    scene = SizedScene()
    scene.pool.slow = asyncio.Event()
    await scene.overload()
    assert len(scene.ordered) >= 1 and scene.pool.calls == []
    scene.pool.slow.set()
    await scene.pass_by(3)
    assert scene.sizes.decision is not None
    await scene.sizes.close()
    assert scene.pool.calls[-1] == "close"


async def test_an_error_of_any_kind_leaves_nothing_open() -> None:
    scene = SizedScene()
    scene.pool.faults = {"count": ZeroDivisionError(), "close": RuntimeError("it does not close")}
    with pytest.raises(RuntimeError, match="does not close"):
        await scene.loop.run(asyncio.Event())
    assert scene.pool.calls == ["close"] and scene.leadership.closed


async def test_a_reading_that_fails_at_the_end_leaves_no_pool_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(size_loop, "ANSWER_S", 0.01)
    scene = SizedScene()
    scene.pool.slow = asyncio.Event()
    await scene.pass_by(1)
    scene.pool.faults["count"] = ZeroDivisionError()
    scene.pool.slow.set()
    await asyncio.sleep(0.01)  # the reading ends between two ticks
    with pytest.raises(ZeroDivisionError):
        await scene.sizes.close()
    assert scene.pool.calls == ["close"]


async def test_an_unreadable_number_is_counted_and_not_acted_on() -> None:
    scene = SizedScene()
    scene.pool.faults["count"] = Unavailable("the API is away")
    failures = count("baton_size_failures_total")
    await scene.flood(20)
    assert scene.pool.calls == [] and count("baton_size_failures_total") >= failures + 20
    assert scene.sizes.decision is None


async def test_a_leader_that_cannot_write_asks_for_nothing() -> None:
    scene = SizedScene()
    await scene.calm(15)
    scene.leadership.broken = True
    await scene.calm()
    assert scene.pool.calls == []


async def test_a_successor_waits_as_long_as_its_predecessor_would() -> None:
    scene = SizedScene()
    await scene.calm(40)
    assert scene.pool.asked == 4
    scene.pool.last = "d2"
    scene.leadership.term += 1
    scene.reader.scripted.states.clear()
    del scene.reader.scripted.roles["d3"]
    scene.start()
    await scene.calm(35)
    assert scene.sizes.decision is not None
    assert scene.sizes.decision.reason == "cool_down", scene.sizes.decision
