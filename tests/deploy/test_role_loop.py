"""The role controller's loop: it reads, decides, and orders only where it leads and may act."""

from __future__ import annotations

from structlog.testing import capture_logs

from baton.planner.change_history import UNTAKEN_S
from baton.planner.control.leadership import TERM_S
from baton.planner.control.order_rules import ORDER_TIMEOUT_S, OrderUnanswered
from baton.planner.controller import STALE_S
from baton.runtime import metrics
from baton.runtime.errors import Unavailable
from tests.support.role_loop_scene import RoleLoopScene, ScriptedLeadership


def recommended(role: str) -> float | None:
    return metrics.REGISTRY.get_sample_value("baton_recommended_workers", {"role": role})


def count(reason: str) -> float:
    name = "baton_role_decisions_total"
    return metrics.REGISTRY.get_sample_value(name, {"reason": reason}) or 0.0


async def test_a_leader_that_acts_orders_the_step() -> None:
    scene = RoleLoopScene()
    await scene.overload()
    assert scene.ordered and scene.ordered[0].role == "prefill"
    assert len(scene.reader.scripted.of("prefill")) >= 2


async def test_without_act_a_step_is_advice() -> None:
    """It is counted and in the metrics, no lock is taken, and no worker hears of it."""
    taken = count("taken")
    scene = RoleLoopScene(acts=False)
    decisions = await scene.overload()
    assert any(each.step is not None for each in decisions)
    assert scene.ordered == [] and scene.leadership.asked == 0
    assert metrics.REGISTRY.get_sample_value("baton_controller_acts") == 0
    assert count("taken") > taken
    assert recommended("prefill") == decisions[-1].wanted["prefill"]
    now, more = (
        metrics.REGISTRY.get_sample_value("baton_forecast_good_ratio", {"ratio": each})
        for each in ("now", "more_prefill")
    )
    assert now is not None and more is not None and more >= now


async def test_a_follower_orders_nothing() -> None:
    scene = RoleLoopScene(leadership=ScriptedLeadership(leads=False))
    decisions = await scene.overload()
    assert any(each.step is not None for each in decisions)
    assert scene.ordered == []
    assert metrics.REGISTRY.get_sample_value("baton_controller_leads") == 0
    assert metrics.REGISTRY.get_sample_value("baton_controller_acts") == 1


async def test_leadership_is_asked_again_before_an_order() -> None:
    """It was paused between its reading and its order; another one leads since."""
    scene = RoleLoopScene(leadership=ScriptedLeadership(lost_after=30))
    for _ in range(30):
        await scene.loop.tick()
    scene.leadership.asked, scene.leadership.lost_after = 0, 1
    scene.reader.scripted.rate = 30.0
    for _ in range(15):
        scene.leadership.asked = 0
        await scene.loop.tick()
    assert scene.leadership.asked == 2
    assert scene.ordered == []


async def test_a_new_leader_acts_only_after_a_term() -> None:
    """An order of the one before may still be on its way; the reports show it by then."""
    scene = RoleLoopScene()
    for _ in range(30):
        await scene.loop.tick()
    scene.leadership.term = 2
    scene.reader.scripted.rate = 30.0
    began_s = scene.reader.scripted.now_s
    decisions = []
    with capture_logs() as logs:
        while not scene.ordered:
            decisions.append(await scene.loop.tick())
    assert scene.reader.scripted.now_s - began_s >= TERM_S
    wanted = [each.step for each in decisions[:-1] if each is not None and each.step is not None]
    held = [each for each in logs if each["event"] == "role step not ordered"]
    assert len(held) == len(set(wanted)) < len(wanted)  # said once
    assert held[0]["reason"].startswith("it has led for less than 10 s")


async def test_no_order_may_outlast_the_leadership() -> None:
    assert ORDER_TIMEOUT_S < TERM_S / 2
    scene = RoleLoopScene(leadership=ScriptedLeadership(remaining_s=ORDER_TIMEOUT_S - 0.1))
    decisions = await scene.overload()
    assert any(each.step is not None for each in decisions) and scene.ordered == []
    scene.leadership.remaining_s = ORDER_TIMEOUT_S
    await scene.loop.tick()
    assert len(scene.ordered) == 1


async def test_reports_that_grow_old_before_the_order_are_not_acted_on() -> None:
    """The leadership's server answered slowly, or the process was paused."""
    scene = RoleLoopScene()
    hold = scene.leadership.hold

    async def slow_hold() -> bool:
        scene.late_s += STALE_S if scene.leadership.asked % 2 else 0.0  # the second of a tick
        return await hold()

    for _ in range(30):
        await scene.loop.tick()
    scene.reader.scripted.rate = 30.0
    scene.leadership.hold = slow_hold
    steps = []
    for _ in range(15):
        scene.leadership.asked, scene.late_s = 0, 0.1
        decision = await scene.loop.tick()
        steps += [] if decision is None or decision.step is None else [decision.step]
    assert steps and scene.ordered == []


async def test_a_worker_that_refuses_is_not_asked_again_at_once() -> None:
    scene = RoleLoopScene(refusal=Unavailable("d0 refused the order"))
    await scene.overload(20)
    names = [step.worker_id for step in scene.ordered]
    assert len(names) >= 2 and len(set(names)) == len(names)
    assert scene.reader.scripted.of("prefill") == ["p0"]


async def test_an_order_without_an_answer_may_have_been_accepted() -> None:
    """Another worker's order could make two changes at once, and empty a role."""
    scene = RoleLoopScene(refusal=OrderUnanswered("d0 has not accepted the order"))
    await scene.overload(int(UNTAKEN_S) - 2)
    assert [step.worker_id for step in scene.ordered] == ["d0"]
    await scene.pass_by(int(UNTAKEN_S))
    assert len(scene.ordered) == 2 and scene.ordered[1].worker_id != "d0"


async def test_an_unreadable_registry_makes_reports_stale() -> None:
    scene = RoleLoopScene()
    for _ in range(30):
        await scene.loop.tick()
    scene.reader.scripted.rate = 30.0
    scene.reader.fails = True
    decisions = [await scene.loop.tick() for _ in range(20)]
    assert scene.ordered == []
    assert {each.reason for each in decisions[int(STALE_S) :] if each} == {"stale"}


async def test_recommendations_are_none_first_then_the_last_known_ones() -> None:
    """An autoscaler that follows them must never read 0 workers for what is not known."""
    scene = RoleLoopScene()
    for _ in range(3):
        decision = await scene.loop.tick()
    assert decision is not None and decision.reason == "learning"
    assert recommended("prefill") is None and recommended("decode") is None
    known = (await scene.overload())[-1].wanted
    assert min(known.values()) >= 1
    scene.reader.scripted.states["d3"] = "unreachable"
    decision = await scene.loop.tick()
    assert decision is not None and decision.wanted == {}
    assert {role: recommended(role) for role in known} == known


async def test_before_the_first_reading_nothing_is_decided() -> None:
    scene = RoleLoopScene()
    scene.reader.fails = True
    assert await scene.loop.tick() is None
    assert scene.loop.report() == {}


async def test_a_report_holds_the_last_decision() -> None:
    scene = RoleLoopScene()
    await scene.overload()
    report = scene.loop.report()
    assert report["reason"] and report["text"] and report["wanted"]["prefill"] >= 1
