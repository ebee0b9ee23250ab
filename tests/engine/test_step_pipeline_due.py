"""When a step should long have been over: by the steps before it, and by what it compiles."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.engine.scheduling.batch import Draw, StepBatch, StepResult
from baton.engine.scheduling.draw_costs import DrawCosts
from baton.engine.scheduling.step_pipeline import (
    KEPT_STEPS,
    OVERDUE_FACTOR,
    ROUTER_WAIT_S,
    UNMEASURED_LIMIT_S,
)
from baton.runtime.errors import EngineError, OutOfMemory
from baton.runtime.sampling import SamplingParams
from tests.support.step_pipeline_scene import PipelineScene
from tests.support.virtual_time import on_virtual_time


def seconds(expected_s: float) -> object:
    """The virtual loop's rounds take microseconds, which OVERDUE_FACTOR and growth multiply."""
    return pytest.approx(expected_s, rel=5e-3)


@on_virtual_time
async def test_a_step_is_due_after_a_multiple_of_what_its_kind_took() -> None:
    scene, now_s = PipelineScene(), asyncio.get_running_loop().time
    steps, device = scene.steps, scene.device
    assert steps.due_s() is None
    for _ in range(2):
        steps.submit(scene.chunk())
        assert steps.due_s() - now_s() == seconds(UNMEASURED_LIMIT_S)
        assert await steps.next() is None
        scene.end_after(0.02)
        await scene.over()
    steps.submit(scene.chunk())
    due_s = steps.due_s()
    assert due_s - now_s() == seconds(OVERDUE_FACTOR * 0.02)
    steps.submit(scene.chunk(8))
    assert steps.due_s() == due_s  # the oldest one counts
    assert await steps.next() is None
    device.end(2)
    await scene.over()
    assert steps.due_s() - now_s() == seconds(UNMEASURED_LIMIT_S)  # of chunks, none is known
    assert await steps.next() is None
    device.end(3)
    await scene.over()
    assert steps.due_s() is None


@pytest.mark.parametrize(
    ("step_s", "allowed_s"),
    [(0.2, 0.8), (0.25, 1.0), (0.3, 1.0), (0.62, 1.0), (0.75, 1.5), (2.0, 6.5), (30.0, 118.5)],
)
@on_virtual_time
async def test_of_a_long_step_it_is_a_part(step_s: float, allowed_s: float) -> None:
    """What routers wait besides is the rest, so that what is left has had it all."""
    scene = PipelineScene()
    await scene.run([scene.chunk(8)] * 2, step_s)
    assert scene.allowed_s(scene.chunk(8)) == seconds(allowed_s)


@pytest.mark.parametrize(
    ("before", "step", "times"),
    [
        ((256,), (2,), 1.0),  # reading the weights takes the same time for both
        ((256,), (16, 100_000), 16 * 100_016 / 256**2),  # each of the few looks at very many
        ((16, 100_000), (256,), 16.0),  # many look at few, and pass through the weights
    ],
)
@on_virtual_time
async def test_a_chunk_may_take_what_another_took_for_its_tokens(
    before: tuple[int, ...], step: tuple[int, ...], times: float
) -> None:
    scene = PipelineScene()
    await scene.run([scene.chunk(*before)] * 2, 0.002)
    assert scene.allowed_s(scene.chunk(*step)) == seconds(OVERDUE_FACTOR * times * 0.002)


@pytest.mark.parametrize(("before", "step", "times"), [(1, 64, 64.0), (64, 1, 1.0)])
@on_virtual_time
async def test_a_slow_machine_may_compute_one_row_after_another(
    before: int, step: int, times: float
) -> None:
    scene = PipelineScene()
    await scene.run([scene.decode(before)] * 2, 0.002)
    assert scene.allowed_s(scene.decode(step)) == seconds(OVERDUE_FACTOR * times * 0.002)


@on_virtual_time
async def test_a_small_step_says_little_of_a_known_large_one() -> None:
    """Prompts that are cached but for a few tokens come among others. By pairs of tokens the large
    step may take 400 times as long as they."""
    scene = PipelineScene()
    await scene.run([scene.chunk(128)] * 2, 0.05)
    await scene.run([scene.chunk(3, 16)] * 5, 0.02)
    assert scene.allowed_s(scene.chunk(128)) == seconds(OVERDUE_FACTOR * 0.05)


@pytest.mark.parametrize(("last", "allowed_s"), [(128, 0.04), (3, 0.8)])
@on_virtual_time
async def test_the_last_two_of_a_size_and_a_slowed_machine_count(
    last: int, allowed_s: float
) -> None:
    scene = PipelineScene()
    await scene.run([scene.chunk(128)], 0.2)
    await scene.run([scene.chunk(128)] * 2, 0.01)
    if last == 3:
        await scene.run([scene.chunk(3, 16)] * 2, 0.2)
    assert scene.allowed_s(scene.chunk(128)) == seconds(allowed_s)


@on_virtual_time
async def test_a_step_that_hung_says_nothing_of_those_that_are_like_it() -> None:
    """Else a request that hangs in such a step again, a while later, would be given four times as
    long as it hung before."""
    scene = PipelineScene()
    await scene.run([scene.chunk(128)] * 2, 0.02)
    await scene.run([scene.chunk(128)], 5.0)
    assert scene.allowed_s(scene.chunk(128)) == seconds(OVERDUE_FACTOR * 5.0 - ROUTER_WAIT_S)
    scene.device.end(3)
    await scene.over()
    await scene.run([scene.chunk(3, 16)] * 2, 0.01)
    assert scene.allowed_s(scene.chunk(128)) == seconds(OVERDUE_FACTOR * 0.02)


@on_virtual_time
async def test_on_a_slowed_machine_only_the_first_step_reads_as_hung() -> None:
    scene = PipelineScene()
    await scene.run([scene.chunk(128)] * 2, 0.02)
    await scene.run([scene.chunk(128)] * 4, 5.0)
    assert [hung for _, hung in scene.known_chunks()] == [False] * 2 + [True] + [False] * 3
    assert scene.allowed_s(scene.chunk(128)) == seconds(OVERDUE_FACTOR * 5.0 - ROUTER_WAIT_S)


@pytest.mark.parametrize(
    "outcome",
    [EngineError("a kernel failed"), StepResult(((),), failed={0: OutOfMemory("no room")})],
    ids=["step", "slice"],
)
@on_virtual_time
async def test_fast_failures_allow_the_next_step_no_less(outcome: StepResult | EngineError) -> None:
    for measured in ([], [0.3, 0.3]):
        scene = PipelineScene()
        for step_s in measured:
            await scene.run([scene.chunk(128)], step_s)
        ended = await scene.run([scene.chunk(128)] * 2, 0.001, outcome)
        assert [step.outcome for step in ended] == [outcome] * 2
        allowed_s = UNMEASURED_LIMIT_S if not measured else 1.0
        assert scene.allowed_s(scene.chunk(128)) == seconds(allowed_s)
        assert scene.steps.tokens_per_s() == seconds(128 / 0.3 if measured else 0.0)


@on_virtual_time
async def test_how_many_steps_are_known_is_bounded() -> None:
    scene = PipelineScene()
    await scene.run([scene.chunk(128)] * 2, 0.0)
    await scene.run([scene.chunk(3, 16)] * (KEPT_STEPS + 1), 0.0)
    sizes = [tokens for tokens, _ in scene.known_chunks()]
    assert sizes == [3] * KEPT_STEPS


@on_virtual_time
async def test_what_a_step_compiles_is_no_part_of_its_time() -> None:
    scene = PipelineScene(compiles=True)
    steps, device = scene.steps, scene.device
    device.seconds = 500.0  # before any step
    await scene.run([scene.decode(1)] * 2, 0.02)
    steps.submit(scene.decode(1))
    due_s = steps.due_s()
    device.seconds += 7.0
    assert steps.due_s() == due_s + 7.0
    device.seconds += 500.0
    assert steps.due_s() == due_s + UNMEASURED_LIMIT_S  # a compiler may hang too
    scene.end_after(507.02)
    await steps.next()
    await scene.over()
    # nor is the next one allowed more
    assert scene.allowed_s(scene.decode(1)) == seconds(OVERDUE_FACTOR * 0.02)


@on_virtual_time
async def test_a_step_behind_a_compiling_one_is_not_given_its_time() -> None:
    scene, now_s = PipelineScene(compiles=True), asyncio.get_running_loop().time
    steps, device = scene.steps, scene.device
    await scene.run([scene.decode(1)] * 2, 0.02)
    steps.submit(scene.decode(1))
    await steps.next()
    steps.submit(scene.decode(1))
    device.seconds += 9.0
    await asyncio.sleep(9.0)
    device.end(2)
    await scene.over()
    assert steps.due_s() - now_s() == seconds(OVERDUE_FACTOR * 0.02)
    steps.close()


@on_virtual_time
async def test_what_its_process_stood_still_is_no_part_of_a_steps_time() -> None:
    scene, now_s = PipelineScene(), asyncio.get_running_loop().time
    steps, device = scene.steps, scene.device
    steps.record_stall(60.0)  # no step ran
    await scene.run([scene.decode(1)] * 2, 0.02)
    steps.submit(scene.decode(1))
    due_s = steps.due_s()
    await steps.next()
    await asyncio.sleep(5.005)  # after 0.015 s
    steps.record_stall(2.0)
    steps.record_stall(3.0)
    assert steps.due_s() == pytest.approx(due_s + 5.0)
    steps.submit(scene.decode(1))
    device.end(2)
    await scene.over()
    assert steps.due_s() - now_s() == seconds(
        OVERDUE_FACTOR * 0.02
    )  # nor is the next one allowed more
    await asyncio.sleep(0.01)
    steps.record_stall(60.0)  # it has run for less
    assert steps.due_s() - now_s() == seconds(OVERDUE_FACTOR * 0.02)
    steps.close()


COSTS = DrawCosts(greedy_s=0.001, random_s=0.002, cut_s=0.05)
DEAR = SamplingParams(temperature=2.0, top_p=0.9999)
GREEDY = SamplingParams(temperature=0.0)


@on_virtual_time
async def test_a_step_may_take_what_its_draws_cost_besides() -> None:
    """Cheap draws so far say nothing of dear ones: a step of them would be overdue, and its worker
    left, though all is well."""
    scene = PipelineScene(costs=COSTS)
    await scene.run([scene.decode(8, GREEDY)] * 2, 0.02)
    allowed_s = OVERDUE_FACTOR * (0.02 + 8 * 0.053 - 8 * 0.001)
    assert scene.allowed_s(scene.decode(8, DEAR)) == seconds(max(1.0, allowed_s - ROUTER_WAIT_S))


@on_virtual_time
async def test_dear_draws_that_are_over_allow_cheap_ones_no_more() -> None:
    scene = PipelineScene(costs=COSTS)
    await scene.run([scene.decode(8, DEAR)] * 2, 0.1)
    assert scene.allowed_s(scene.decode(8, GREEDY)) == seconds(OVERDUE_FACTOR * 0.1)


@on_virtual_time
async def test_the_pace_of_chunks_leaves_their_draws_out() -> None:
    scene = PipelineScene(costs=COSTS)
    assert scene.steps.tokens_per_s() == 0.0
    plan = scene.chunk(100)
    drawing = replace(plan.batch.slices[0], draws=(Draw(0, 100, DEAR),) * 2)
    await scene.run([type(plan)(StepBatch((drawing,)))], 0.206)
    assert scene.steps.tokens_per_s() == seconds(100 / 0.1)


@on_virtual_time
async def test_a_step_that_verifies_is_judged_by_its_rows() -> None:
    """It is no chunk of a prompt: its time grows with its rows, from those of plain steps."""
    scene = PipelineScene()
    await scene.run([scene.decode(4)] * 2, 0.01)
    assert scene.allowed_s(scene.verification(4, proposed=0)) == seconds(OVERDUE_FACTOR * 0.01)
    scene = PipelineScene()
    await scene.run([scene.decode(4)] * 2, 0.01)
    assert scene.allowed_s(scene.verification(4, proposed=3)) == seconds(4 * OVERDUE_FACTOR * 0.01)
    scene = PipelineScene()
    await scene.run([scene.chunk(8)] * 2, 5.0)
    assert scene.allowed_s(scene.verification(4, proposed=3)) == seconds(UNMEASURED_LIMIT_S)
