"""Two steps under way: when the next one is planned, and in what order they end."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass

import pytest

from baton.engine import step_pipeline
from baton.engine.batch import Slice, StepBatch, StepResult, forsake
from baton.engine.step_pipeline import Over, StepPipeline
from baton.runtime.errors import DeviceLost, EngineError


@dataclass
class Plan:
    batch: StepBatch


class Handle:
    def __init__(self, future: asyncio.Future[StepResult]) -> None:
        self._future = future

    async def result(self) -> StepResult:
        return await asyncio.shield(self._future)

    def forsake(self) -> None:
        forsake(self._future)


class Device:
    """Steps that end when the test says so."""

    def __init__(self) -> None:
        self.steps: list[asyncio.Future[StepResult]] = []
        self.refusal: EngineError | None = None

    def submit(self, batch: StepBatch) -> Handle:
        if self.refusal is not None:
            raise self.refusal
        self.steps.append(asyncio.get_running_loop().create_future())
        return Handle(self.steps[-1])

    async def close(self) -> None:
        pass

    def end(self, step: int, device_s: float = 0.0) -> None:
        self.steps[step].set_result(StepResult((), device_s))


def plan(number: int, tokens: int = 1, start: int = 0) -> Plan:
    return Plan(StepBatch((Slice([number] * tokens, start, [0]),)))


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def steps(device: Device) -> StepPipeline[Plan]:
    return StepPipeline(device)


async def over(steps: StepPipeline[Plan]) -> Over[Plan]:
    found = await asyncio.wait_for(steps.next(), 5)
    assert found is not None
    return found


async def test_with_nothing_under_way_a_step_should_be_planned(steps: StepPipeline[Plan]) -> None:
    assert await steps.next() is None
    assert not steps


async def test_the_second_step_is_planned_while_the_first_runs(
    steps: StepPipeline[Plan], device: Device
) -> None:
    first, second, third = plan(1), plan(2), plan(3)
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
    assert (await over(steps)).plan is second
    assert await steps.next() is None
    assert (await over(steps)).plan is third
    assert not steps


async def test_where_there_is_nothing_to_plan_the_step_is_waited_for(
    steps: StepPipeline[Plan], device: Device
) -> None:
    steps.submit(plan(1))
    assert await steps.next() is None
    waiting = asyncio.ensure_future(steps.next())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    device.end(0)
    assert (await waiting) is not None
    assert await steps.next() is None


async def test_steps_that_take_long_are_planned_shortly_before_their_end(
    steps: StepPipeline[Plan], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_pipeline, "LEAD_S", 0.04)
    clock = asyncio.get_running_loop().time
    for step in range(2):
        steps.submit(plan(step))
        await steps.next()
        await asyncio.sleep(0.12)
        device.end(step)
        ended = await over(steps)
        assert 0.11 < ended.ended_s - ended.started_s < 0.6
    steps.submit(plan(2))
    began = clock()
    assert await steps.next() is None
    assert clock() - began > 0.06


async def test_a_longer_chunk_is_expected_to_take_longer(
    steps: StepPipeline[Plan], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_pipeline, "LEAD_S", 0.04)
    clock = asyncio.get_running_loop().time
    for step in range(2):
        steps.submit(plan(step, tokens=4))
        await steps.next()
        await asyncio.sleep(0.02)
        device.end(step)
        await over(steps)
    steps.submit(plan(2, tokens=40))
    began = clock()
    assert await steps.next() is None
    assert clock() - began > 0.12


async def run_steps(
    steps: StepPipeline[Plan], device: Device, plans: list[Plan], step_s: float
) -> None:
    for each in plans:
        steps.submit(each)
        await steps.next()
        await asyncio.sleep(step_s)
        device.end(len(device.steps) - 1)
        await over(steps)


def decode(sequences: int) -> Plan:
    return Plan(StepBatch(tuple(Slice([1], 5, [number]) for number in range(sequences))))


@pytest.mark.parametrize("sequences", [1, 4, 16])
async def test_a_decode_step_is_expected_to_take_as_long_as_the_last_whatever_its_batch(
    steps: StepPipeline[Plan], device: Device, monkeypatch: pytest.MonkeyPatch, sequences: int
) -> None:
    monkeypatch.setattr(step_pipeline, "LEAD_S", 0.04)
    await run_steps(steps, device, [decode(4)] * 2, 0.12)
    steps.submit(decode(sequences))
    clock = asyncio.get_running_loop().time
    began = clock()
    assert await asyncio.wait_for(steps.next(), 0.2) is None
    assert clock() - began > 0.06


async def test_a_chunk_says_nothing_of_decode_steps_and_they_nothing_of_a_chunk(
    steps: StepPipeline[Plan], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_pipeline, "LEAD_S", 0.01)
    await run_steps(steps, device, [decode(4)] * 2, 0.08)
    clock = asyncio.get_running_loop().time
    for _ in range(2):  # no two chunks are known yet: the next step is planned at once
        began = clock()
        steps.submit(plan(1, tokens=100))
        assert await asyncio.wait_for(steps.next(), 0.05) is None
        await asyncio.sleep(0.01)
        device.end(len(device.steps) - 1)
        await over(steps)
        assert clock() - began < 0.06
    steps.submit(decode(4))
    began = clock()
    assert await steps.next() is None
    assert clock() - began > 0.05


async def test_a_step_that_ends_before_the_next_one_is_planned_is_told_first(
    steps: StepPipeline[Plan], device: Device
) -> None:
    for step in range(2):
        steps.submit(plan(step))
        await steps.next()
        await asyncio.sleep(0.1)
        device.end(step)
        await over(steps)
    steps.submit(plan(2))
    asyncio.get_running_loop().call_later(0.01, device.end, 2)
    assert (await over(steps)).plan.batch == plan(2).batch
    assert await steps.next() is None


async def test_a_step_starts_when_the_one_before_it_has_ended(
    steps: StepPipeline[Plan], device: Device
) -> None:
    steps.submit(plan(1))
    await steps.next()
    steps.submit(plan(2))
    await asyncio.sleep(0.02)
    device.end(0)
    first = await over(steps)
    await steps.next()
    device.end(1)
    second = await over(steps)
    assert first.started_s < first.ended_s == second.started_s <= second.ended_s


async def test_a_failed_step_is_told_in_its_turn_and_the_next_one_goes_on(
    steps: StepPipeline[Plan], device: Device
) -> None:
    steps.submit(plan(1))
    await steps.next()
    steps.submit(plan(2))
    failure = EngineError("the device failed")
    device.steps[0].set_exception(failure)
    device.end(1)
    assert (await over(steps)).outcome is failure
    await steps.next()
    assert isinstance((await over(steps)).outcome, StepResult)


async def test_a_device_that_is_lost_is_nothing_to_go_on_from(
    steps: StepPipeline[Plan], device: Device
) -> None:
    steps.submit(plan(1))
    await steps.next()
    device.steps[0].set_exception(DeviceLost("no answer"))
    with pytest.raises(DeviceLost):
        await steps.next()


async def test_a_step_that_the_engine_does_not_take_is_not_under_way(
    steps: StepPipeline[Plan], device: Device
) -> None:
    device.refusal = EngineError("the engine is closed")
    with pytest.raises(EngineError, match="closed"):
        steps.submit(plan(1))
    assert not steps and await steps.next() is None


async def test_closing_lets_go_of_the_steps_and_does_not_disturb_them(
    steps: StepPipeline[Plan], device: Device
) -> None:
    steps.submit(plan(1))
    await steps.next()
    steps.submit(plan(2))
    waiting = asyncio.ensure_future(steps.next())
    await asyncio.sleep(0)
    waiting.cancel()
    result = steps._result
    assert result is not None and not result.done()
    steps.close()
    await asyncio.wait({waiting, result}, timeout=1)
    assert result.cancelled()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not any(step.done() for step in device.steps)
    device.end(0), device.end(1)


@pytest.mark.parametrize("first_fails", ["before", "after"])
async def test_errors_of_steps_that_were_let_go_of_are_not_logged_as_missed(
    steps: StepPipeline[Plan], device: Device, first_fails: str
) -> None:
    missed: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: missed.append(context))
    steps.submit(plan(1))
    assert await steps.next() is None
    steps.submit(plan(2))
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
    steps._steps.clear()
    steps._result = None
    gc.collect()
    await asyncio.sleep(0)
    assert missed == []


async def test_a_step_is_due_after_a_multiple_of_what_its_kind_took(
    steps: StepPipeline[Plan], device: Device
) -> None:
    loop = asyncio.get_running_loop()
    assert steps.due_s() is None
    for number in range(2):
        steps.submit(plan(number))
        due_s = steps.due_s()
        assert due_s is not None and due_s > loop.time() + step_pipeline.UNKNOWN_S - 1
        assert await steps.next() is None
        loop.call_later(0.02, device.end, number)
        await over(steps)
    steps.submit(plan(2))
    due_s, now_s = steps.due_s(), loop.time()
    assert due_s is not None and 0.06 < due_s - now_s < 20  # four times 20 ms, or a slow machine's
    steps.submit(plan(3, tokens=8))
    assert steps.due_s() == due_s  # the oldest one counts
    assert await steps.next() is None
    device.end(2)
    await over(steps)
    chunk_due_s = steps.due_s()
    assert chunk_due_s is not None and chunk_due_s > now_s + step_pipeline.UNKNOWN_S - 1
    assert await steps.next() is None
    device.end(3)
    await over(steps)
    assert steps.due_s() is None


async def allowed_s(steps: StepPipeline[Plan], device: Device, step: Plan) -> float:
    """How long it may take, as the last step of all."""
    steps.submit(step)
    due_s, now_s = steps.due_s(), asyncio.get_running_loop().time()
    assert due_s is not None
    steps.close()
    return due_s - now_s


@pytest.mark.parametrize(
    ("before", "step", "times"),
    [
        (plan(1, 256), plan(1, 2), 1.0),  # reading the weights takes the same time for both
        (plan(1, 256), plan(1, 16, 100_000), 20),  # each of the few looks at very many
        (plan(1, 16, 100_000), plan(1, 256), 15),  # many look at few, and pass through the weights
        (decode(1), decode(64), 60),  # a slow machine may compute one row after another
        (decode(64), decode(1), 1.0),
    ],
)
async def test_a_step_may_take_what_another_one_took_for_its_tokens_or_what_they_look_at(
    steps: StepPipeline[Plan], device: Device, before: Plan, step: Plan, times: float
) -> None:
    await run_steps(steps, device, [before] * 2, 0.05)
    usual_s = 4 * times * max(took.seconds for kind in steps._last.values() for took in kind)
    assert 0.95 * usual_s < await allowed_s(steps, device, step) < 1.5 * usual_s


async def test_a_small_step_says_little_of_a_large_one_as_long_as_another_large_one_is_known(
    steps: StepPipeline[Plan], device: Device
) -> None:
    """Prompts that are cached but for a few tokens come among others. By pairs of tokens the large
    step may take 400 times as long as they."""
    small, large = plan(1, 3, 16), plan(1, 128)
    await run_steps(steps, device, [large] * 2, 0.05)
    await run_steps(steps, device, [small] * 5, 0.02)
    large_s = max(took.seconds for took in list(steps._last[True])[:2])
    slowest_s = max(took.seconds for took in steps._last[True])
    assert 3.9 * large_s < await allowed_s(steps, device, large) <= 4 * slowest_s


async def test_the_last_two_of_a_size_count_and_a_machine_that_has_become_slow(
    steps: StepPipeline[Plan], device: Device
) -> None:
    small, large = plan(1, 3, 16), plan(1, 128)
    await run_steps(steps, device, [large], 0.4)
    await run_steps(steps, device, [large] * 2, 0.01)
    assert await allowed_s(steps, device, large) < 1.6
    steps = StepPipeline(device)
    await run_steps(steps, device, [large] * 2, 0.01)
    await run_steps(steps, device, [small] * 2, 0.4)
    assert await allowed_s(steps, device, large) >= 1.6


async def test_how_many_steps_are_known_is_bounded(
    steps: StepPipeline[Plan], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = plan(1, 3, 16), plan(1, 128)
    await run_steps(steps, device, [large] * 2, 0.0)
    await run_steps(steps, device, [small] * (step_pipeline.KNOWN + 1), 0.0)
    sizes = [took.size.tokens for took in steps._last[True]]
    assert sizes == [3] * step_pipeline.KNOWN


async def test_how_long_a_step_has_run_is_known(steps: StepPipeline[Plan], device: Device) -> None:
    assert steps.running_s() is None
    steps.submit(plan(1))
    await steps.next()
    steps.submit(plan(2))
    await asyncio.sleep(0.05)
    first_s = steps.running_s()
    assert first_s is not None and first_s >= 0.05
    device.end(0)
    await over(steps)
    second_s = steps.running_s()  # since the one before it ended
    assert second_s is not None and second_s < first_s
    await steps.next()
    device.end(1)
    await over(steps)
    assert steps.running_s() is None


class CompilingDevice(Device):
    seconds = 0.0

    def compiled_s(self) -> float:
        return self.seconds


async def test_what_a_step_compiles_is_no_part_of_its_time() -> None:
    device = CompilingDevice()
    steps: StepPipeline[Plan] = StepPipeline(device)
    device.seconds = 500.0  # before any step
    await run_steps(steps, device, [decode(1)] * 2, 0.02)
    steps.submit(decode(1))
    due_s = steps.due_s()
    assert due_s is not None
    device.seconds += 7.0
    assert steps.due_s() == due_s + 7.0
    device.seconds += 500.0
    assert steps.due_s() == due_s + step_pipeline.UNKNOWN_S  # a compiler may hang too
    await steps.next()
    device.end(2)
    await over(steps)
    assert await allowed_s(steps, device, decode(1)) < 10  # nor is the next one allowed more


async def test_a_step_that_waits_behind_one_that_compiles_is_not_given_its_time() -> None:
    device = CompilingDevice()
    steps: StepPipeline[Plan] = StepPipeline(device)
    await run_steps(steps, device, [decode(1)] * 2, 0.02)
    steps.submit(decode(1))
    await steps.next()
    steps.submit(decode(1))
    device.seconds += 9.0
    device.end(2)
    await over(steps)
    due_s = steps.due_s()
    assert due_s is not None and due_s - asyncio.get_running_loop().time() < 8
    steps.close()
