"""Two steps under way: when the next one is planned, and in what order they end."""

from __future__ import annotations

import asyncio
import gc

import pytest

from baton.engine.scheduling.batch import StepResult
from baton.engine.scheduling.step_pipeline import LEAD_S
from baton.runtime.errors import DeviceLost, EngineError
from tests.support.step_pipeline_scene import PipelineScene
from tests.support.virtual_time import on_virtual_time


def seconds(expected_s: float) -> object:
    """The virtual loop's rounds take microseconds."""
    return pytest.approx(expected_s, abs=1e-3)


@on_virtual_time
async def test_with_nothing_under_way_a_step_should_be_planned() -> None:
    steps = PipelineScene().steps
    assert await steps.next() is None
    assert not steps


@on_virtual_time
async def test_the_second_step_is_planned_while_the_first_runs() -> None:
    scene = PipelineScene()
    steps, device = scene.steps, scene.device
    first, second, third = (scene.chunk() for _ in range(3))
    steps.submit(first)
    assert await steps.next() is None  # how long it takes is not known yet: now
    steps.submit(second)
    waiting = asyncio.ensure_future(steps.next())
    await asyncio.sleep(0.01)
    assert not waiting.done() and len(steps) == 2
    device.end(0, 0.25)
    ended = await waiting
    assert ended is not None and ended.plan is first
    assert isinstance(ended.outcome, StepResult) and ended.outcome.device_s == 0.25
    assert await steps.next() is None  # asked once for each step
    steps.submit(third)
    device.end(1)
    device.end(2)
    assert (await scene.over()).plan is second
    assert await steps.next() is None
    assert (await scene.over()).plan is third
    assert not steps


@on_virtual_time
async def test_where_there_is_nothing_to_plan_the_step_is_waited_for() -> None:
    scene = PipelineScene()
    scene.steps.submit(scene.chunk())
    assert await scene.steps.next() is None
    waiting = asyncio.ensure_future(scene.steps.next())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    scene.device.end(0)
    assert (await waiting) is not None
    assert await scene.steps.next() is None


@on_virtual_time
async def test_long_steps_are_planned_shortly_before_their_end() -> None:
    scene = PipelineScene()
    for ended in await scene.run([scene.chunk()] * 2, 0.12):
        assert ended.ended_s - ended.started_s == seconds(0.12)
    assert await scene.planned_after_s(scene.chunk()) == seconds(0.12 - LEAD_S)


@on_virtual_time
async def test_a_longer_chunk_is_expected_to_take_longer() -> None:
    scene = PipelineScene()
    await scene.run([scene.chunk(4)] * 2, 0.02)
    assert await scene.planned_after_s(scene.chunk(40)) == seconds(0.2 - LEAD_S)


@pytest.mark.parametrize(
    ("last_s", "expected_s"), [((0.06, 0.1), 0.1), ((0.1, 0.06), 0.1), ((0.02, 0.1), 0.02)]
)
@on_virtual_time
async def test_long_steps_that_differ_are_planned_by_the_longer(
    last_s: tuple[float, float], expected_s: float
) -> None:
    scene = PipelineScene()
    for each_s in last_s:
        await scene.run([scene.decode(4)], each_s)
    assert await scene.planned_after_s(scene.decode(4)) == seconds(expected_s - LEAD_S)


@pytest.mark.parametrize("sequences", [1, 4, 16])
@on_virtual_time
async def test_a_decode_step_is_expected_to_last_as_the_last_one(
    sequences: int,
) -> None:
    scene = PipelineScene()
    await scene.run([scene.decode(4)] * 2, 0.12)
    assert await scene.planned_after_s(scene.decode(sequences)) == seconds(0.12 - LEAD_S)


@on_virtual_time
async def test_chunks_and_decode_steps_are_estimated_separately() -> None:
    scene = PipelineScene()
    await scene.run([scene.decode(4)] * 2, 0.08)
    for step in (2, 3):  # no two chunks are known yet: the next step is planned at once
        assert await scene.planned_after_s(scene.chunk(100)) == 0
        await asyncio.sleep(0.01)
        scene.device.end(step)
        await scene.over()
    assert await scene.planned_after_s(scene.decode(4)) == seconds(0.08 - LEAD_S)


@on_virtual_time
async def test_a_step_that_ends_before_planning_is_reported_first() -> None:
    scene = PipelineScene()
    await scene.run([scene.chunk()] * 2, 0.1)
    plan = scene.chunk()
    scene.steps.submit(plan)
    scene.end_after(0.01)
    assert (await scene.over()).plan is plan
    assert await scene.steps.next() is None


@on_virtual_time
async def test_a_step_starts_when_the_one_before_it_has_ended() -> None:
    scene = PipelineScene()
    scene.steps.submit(scene.chunk())
    await scene.steps.next()
    scene.steps.submit(scene.chunk())
    await asyncio.sleep(0.02)
    scene.device.end(0)
    first = await scene.over()
    await scene.steps.next()
    await asyncio.sleep(0.03)
    scene.device.end(1)
    second = await scene.over()
    assert first.ended_s - first.started_s == seconds(0.02)
    assert second.started_s == first.ended_s
    assert second.ended_s - second.started_s == seconds(0.03)


@on_virtual_time
async def test_a_failed_step_is_reported_in_order_and_others_continue() -> None:
    scene = PipelineScene()
    scene.steps.submit(scene.chunk())
    await scene.steps.next()
    scene.steps.submit(scene.chunk())
    failure = EngineError("the device failed")
    scene.device.steps[0].set_exception(failure)
    scene.device.end(1)
    assert (await scene.over()).outcome is failure
    await scene.steps.next()
    assert isinstance((await scene.over()).outcome, StepResult)


@on_virtual_time
async def test_a_device_that_is_lost_is_nothing_to_go_on_from() -> None:
    scene = PipelineScene()
    scene.steps.submit(scene.chunk())
    await scene.steps.next()
    scene.device.steps[0].set_exception(DeviceLost("no answer"))
    with pytest.raises(DeviceLost):
        await scene.steps.next()


@on_virtual_time
async def test_a_step_that_the_engine_does_not_take_is_not_under_way() -> None:
    scene = PipelineScene()
    scene.device.refusal = EngineError("the engine is closed")
    with pytest.raises(EngineError, match="closed"):
        scene.steps.submit(scene.chunk())
    assert not scene.steps and await scene.steps.next() is None


@on_virtual_time
async def test_closing_lets_go_of_the_steps_and_does_not_disturb_them() -> None:
    scene = PipelineScene()
    scene.steps.submit(scene.chunk())
    await scene.steps.next()
    scene.steps.submit(scene.chunk())
    waiting = asyncio.ensure_future(scene.steps.next())
    await asyncio.sleep(0)
    waiting.cancel()
    result = scene.awaited()
    assert result is not None and not result.done()
    scene.steps.close()
    await asyncio.wait({waiting, result}, timeout=1)
    assert result.cancelled()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not any(step.done() for step in scene.device.steps)
    scene.device.end(0), scene.device.end(1)


@pytest.mark.parametrize("first_fails", ["before", "after"])
async def test_errors_of_released_steps_are_not_logged_as_missed(
    first_fails: str,
) -> None:
    missed: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: missed.append(context))
    scene = PipelineScene()
    steps, device = scene.steps, scene.device
    steps.submit(scene.chunk())
    assert await steps.next() is None
    steps.submit(scene.chunk())
    if first_fails == "before":
        device.steps[0].set_exception(EngineError("the device failed"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    steps.close()
    await asyncio.sleep(0)
    for step in device.steps:
        if not step.done():
            step.set_exception(EngineError("the device failed"))
    await asyncio.sleep(0)
    device.steps.clear()
    scene.forget()
    step = None
    gc.collect()
    await asyncio.sleep(0)
    assert missed == []


@on_virtual_time
async def test_how_long_a_step_has_run_is_known() -> None:
    scene = PipelineScene()
    steps = scene.steps
    assert steps.running_s() is None
    steps.submit(scene.chunk())
    await steps.next()
    steps.submit(scene.chunk())
    await asyncio.sleep(0.05)
    assert steps.running_s() == seconds(0.05)
    scene.device.end(0)
    await scene.over()
    await asyncio.sleep(0.02)
    assert steps.running_s() == seconds(0.02)  # since the one before it ended
    await steps.next()
    scene.device.end(1)
    await scene.over()
    assert steps.running_s() is None
