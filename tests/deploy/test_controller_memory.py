"""A role controller that starts again, or takes over, knows what the one before has ordered."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
from structlog.testing import capture_logs

from baton.planner.change_history import RoleStep
from baton.planner.control.controller_memory import MAX_MEMORY_BYTES, ControllerMemory
from baton.planner.control.leadership import TERM_S
from baton.planner.controller import REVERSAL_S
from baton.runtime.errors import Unavailable
from tests.support.role_loop_scene import RoleLoopScene, ScriptedLeadership

LONG_PROMPTS = {"rate": 8.0, "tokens": 6000.0}
LONG_ANSWERS = {"rate": 25.0, "tokens": 100.0}


def load(scene: RoleLoopScene, rate: float, tokens: float) -> None:
    scene.reader.scripted.rate, scene.reader.scripted.tokens = rate, tokens


async def reversed_once(scene: RoleLoopScene) -> float:
    """Let the scene move workers to prefill and one back; return when it turned."""
    for minute in range(6):
        load(scene, **(LONG_ANSWERS if minute % 2 else LONG_PROMPTS))
        for _ in range(60):
            await scene.pass_by(1)
            if {each.role for each in scene.ordered} == {"prefill", "decode"}:
                assert [each.role for each in scene.ordered].index("decode") > 0
                return scene.reader.scripted.now_s
    raise AssertionError("it has not turned")


@dataclass
class WatchedScene(RoleLoopScene):
    """`left` is what the store holds at each order."""

    left: list[bytes | None] = field(default_factory=list)

    async def order(self, step: RoleStep, term: int) -> None:
        self.left.append(self.leadership.left)
        await super().order(step, term)


def restart(scene: RoleLoopScene) -> None:
    scene.leadership.term += 1
    scene.start()


@pytest.mark.parametrize("forgets", [False, True])
async def test_a_restarted_controller_reverses_once_in_five_minutes(forgets: bool) -> None:
    """`forgets` shows that its memory is what holds it back."""
    scene = RoleLoopScene(workers=(3, 3))
    turned_s = await reversed_once(scene)
    restart(scene)
    if forgets:
        scene.leadership.left = None
    load(scene, **LONG_PROMPTS)
    before = len(scene.ordered)
    while scene.reader.scripted.now_s - turned_s < REVERSAL_S - 2.0:
        await scene.pass_by(1)
    roles = {each.role for each in scene.ordered[before:]}
    assert ("prefill" in roles) is forgets


async def test_a_step_is_in_the_memory_before_it_is_ordered() -> None:
    scene = WatchedScene()
    await scene.overload()
    assert scene.left and scene.left[0] is not None
    (under_way,) = json.loads(scene.left[0])["memory"]["roles"]["under_way"]
    assert under_way["worker_id"] == scene.ordered[0].worker_id


async def test_a_leader_that_cannot_write_its_memory_orders_nothing() -> None:
    scene = RoleLoopScene()
    for _ in range(int(TERM_S)):
        await scene.loop.tick()
    scene.leadership.broken = True
    decisions = await scene.overload()
    assert any(each.step is not None for each in decisions) and scene.ordered == []
    scene.leadership.broken = False
    await scene.pass_by(1)
    assert len(scene.ordered) == 1


async def test_a_leader_that_cannot_read_its_memory_orders_nothing() -> None:
    scene = RoleLoopScene(leadership=ScriptedLeadership(broken=True))
    decisions = await scene.overload()
    assert any(each.step is not None for each in decisions) and scene.ordered == []
    scene.leadership.broken = False
    await scene.pass_by(1)
    assert len(scene.ordered) == 1


async def test_a_memory_is_as_old_as_the_store_says() -> None:
    leadership = ScriptedLeadership(now_s=1000.0)
    memory = ControllerMemory(leadership, ("new", "old"))
    await memory.keep({"a": 1})
    leadership.now_s = 1030.0
    found = await ControllerMemory(leadership, ("newest", "new")).recall()
    assert found is not None and (found.memory, found.age_s) == ({"a": 1}, 30.0)
    leadership.now_s = 900.0  # the store's clock was set back
    found = await memory.recall()
    assert found is not None and found.age_s == 0.0


async def test_a_foreign_or_changed_memory_does_not_count() -> None:
    leadership = ScriptedLeadership()
    memory = ControllerMemory(leadership, ("token",))
    assert await memory.recall() is None
    await ControllerMemory(leadership, ("another",)).keep({})
    with pytest.raises(ValueError, match="not signed with this cluster's token"):
        await memory.recall()
    await memory.keep({"a": 1})
    assert leadership.left is not None
    signed = leadership.left
    changed = signed.replace(b'"a": 1', b'"a": 2')
    for text in (changed, b"", b"[]", b"{}", b"\xff", b" " * (MAX_MEMORY_BYTES + 1)):
        leadership.left = text
        with pytest.raises(ValueError, match="it is"):
            await memory.recall()
    leadership.left = signed
    assert await memory.recall() is not None


@pytest.mark.parametrize("memory", [{"of": "another version"}, {"roles": ["a list"]}])
async def test_a_memory_of_another_version_is_not_taken(memory: dict[str, object]) -> None:
    """It is signed, and unlike this version's: the controller begins without, and acts."""
    scene = RoleLoopScene()
    await ControllerMemory(scene.leadership, ("a-token",)).keep(memory)
    assert await memory_events(scene) == ["controller memory refused"]


async def test_a_memory_that_does_not_count_is_logged_once() -> None:
    scene = RoleLoopScene()
    await ControllerMemory(scene.leadership, ("another",)).keep({})
    assert await memory_events(scene) == ["controller memory refused"]
    scene = RoleLoopScene()
    assert await memory_events(scene) == ["controller memory not found"]


async def memory_events(scene: RoleLoopScene) -> list[str]:
    """Return what is logged of the memory until a step is ordered."""
    with capture_logs() as logs:
        await scene.overload()
    assert len(scene.ordered) >= 1
    return [each["event"] for each in logs if each["event"].startswith("controller memory")]


async def test_a_store_that_fails_is_named() -> None:
    memory = ControllerMemory(ScriptedLeadership(broken=True), ("token",))
    with pytest.raises(Unavailable, match="does not answer"):
        await memory.keep({})
    with pytest.raises(Unavailable, match="does not answer"):
        await memory.recall()
