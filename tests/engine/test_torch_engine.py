from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_engine, build_runner
from baton.engine.execution.torch_engine import TorchEngine, TorchHandle
from baton.engine.scheduling.batch import Draw, FinishedStep, Slice, StepBatch, StepResult
from baton.runtime.errors import DeviceLost, EngineError
from baton.runtime.sampling import SamplingParams
from tests.support.small_models import Reference
from tests.support.waiting import eventually

GREEDY = SamplingParams(temperature=0.0)
STEP = StepBatch((Slice([1, 2, 3], 0, [0], (Draw(0, 3, GREEDY),)),))


class Gate:
    """Stands in for a runner: steps wait until they are let through, or fail."""

    def __init__(self, runner=None):
        self.go = threading.Event()
        self.pool = runner.pool if runner else None
        self.threads = set()
        self.error = None
        self.steps = []

    overlaps = False

    def start(self, batch):
        assert self.go.wait(20)
        self.threads.add(threading.current_thread().name)
        self.steps.append(batch)
        if self.error:
            raise self.error
        return FinishedStep(StepResult(((),) * len(batch.slices)))

    def close(self):
        self.closed = True


@pytest.fixture
async def gate() -> Gate:
    return Gate()


@pytest.fixture
async def gated(gate: Gate) -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(gate, queue_steps=4, step_timeout_s=20)
    yield engine
    gate.go.set()
    await engine.close()


@pytest.fixture
async def engine(qwen3: Reference) -> AsyncIterator[TorchEngine]:
    engine = build_engine(
        qwen3.folder, EngineOptions(blocks=20, block_size=8, threads=1, max_context=100)
    )
    yield engine
    await engine.close()


async def test_attributes(engine: TorchEngine) -> None:
    assert engine.spec.family == "qwen3"
    assert engine.pool.blocks == 20
    assert engine.max_context == 100
    assert engine.dtype_name == "float32"


async def test_a_step_is_what_the_runner_computes(engine: TorchEngine, qwen3: Reference) -> None:
    expected = build_runner(qwen3.folder, EngineOptions(blocks=20, block_size=8)).run(STEP)
    result = await engine.submit(STEP).result()
    assert result.drawn == expected.drawn
    assert result.broken == frozenset()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system has no /proc")
async def test_the_kernel_knows_the_device_thread_by_its_name(gate: Gate) -> None:
    before = set(threading.enumerate())
    engine = TorchEngine(gate, queue_steps=4, step_timeout_s=20)
    started = set(threading.enumerate()) - before
    gate.go.set()
    await engine.submit(STEP).result()
    names = [kernel_name(thread) for thread in started]
    await engine.close()
    assert names == ["device"]


def kernel_name(thread):
    return Path(f"/proc/self/task/{thread.native_id}/comm").read_text().strip()


async def test_steps_run_in_order_on_one_thread_while_the_loop_lives(
    gate: Gate, gated: TorchEngine
) -> None:
    handles = [gated.submit(STEP) for _ in range(3)]
    ticks = 0
    for _ in range(10):
        await asyncio.sleep(0)
        ticks += 1
    assert ticks == 10 and not gate.steps
    gate.go.set()
    for handle in handles:
        await handle.result()
    assert gate.threads == {"device"}
    assert len(gate.steps) == 3


async def test_a_failed_step_fails_alone(gate: Gate, gated: TorchEngine) -> None:
    gate.go.set()
    gate.error = RuntimeError("out of luck")
    with pytest.raises(EngineError, match="out of luck") as caught:
        await gated.submit(STEP).result()
    assert isinstance(caught.value.__cause__, RuntimeError)
    gate.error = None
    await gated.submit(STEP).result()


async def test_a_refused_step_keeps_its_reason(engine: TorchEngine) -> None:
    with pytest.raises(EngineError, match="^slice 0: .* outside the pool of 20"):
        await engine.submit(StepBatch((Slice([1], 0, [99]),))).result()


async def test_a_full_queue_is_refused_at_once(gate: Gate, gated: TorchEngine) -> None:
    handles = []
    with pytest.raises(EngineError, match="4 steps are already queued"):
        for _ in range(7):
            handles.append(gated.submit(STEP))
    assert len(handles) in (4, 5)  # one may be with the device thread
    gate.go.set()
    for handle in handles:
        await handle.result()


async def test_a_step_that_never_ends_is_given_up(gate: Gate) -> None:
    engine = TorchEngine(gate, step_timeout_s=0.05)
    handle = engine.submit(STEP)
    with pytest.raises(DeviceLost, match="no result within 0.05 s"):
        await handle.result()
    gate.go.set()
    await engine.close()


async def test_giving_up_does_not_disturb_the_step(gate: Gate, gated: TorchEngine) -> None:
    handle = gated.submit(STEP)
    waiting = asyncio.create_task(handle.result())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.go.set()
    assert await handle.result() == await handle.result()


@pytest.mark.parametrize("turns", range(5))
async def test_a_cancel_that_comes_with_the_result_is_not_lost(turns: int) -> None:
    """A worker that is stopped just then would go on for ever."""
    future = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(TorchHandle(future, 20).result())
    # The waiter has to be in its poll when the result comes.
    await asyncio.sleep(0.001)
    future.set_result(StepResult(()))
    for _ in range(turns):
        await asyncio.sleep(0)
    done = not waiting.cancel()
    await asyncio.wait([waiting])
    assert done or waiting.cancelled()


async def test_copy_comes_before_later_steps(engine: TorchEngine) -> None:
    await engine.submit(STEP).result()
    await engine.submit(StepBatch((Slice([4], 0, [7]),), ((0, 5),))).result()
    assert engine.pool.bytes_view()[0].any()
    assert (engine.pool.bytes_view()[0] == engine.pool.bytes_view()[5]).all()
    batch = StepBatch((Slice([3], 2, [5], (Draw(0, 3, GREEDY),)),))
    copied = await engine.submit(batch).result()
    assert copied.drawn == (await engine.submit(STEP).result()).drawn


async def test_a_failed_copy_fails_all_later_steps(engine: TorchEngine) -> None:
    for copies in (((0, 99),), ()):
        with pytest.raises(EngineError, match="block 99 is not in the pool"):
            await engine.submit(StepBatch(STEP.slices, copies)).result()


async def test_close_finishes_what_is_queued(gate: Gate) -> None:
    engine = TorchEngine(gate)
    handles = [engine.submit(STEP) for _ in range(3)]
    gate.go.set()
    await engine.close()
    await engine.close()
    for handle in handles:
        assert await handle.result() == StepResult(((),))
    with pytest.raises(EngineError, match="closed"):
        engine.submit(STEP)


def test_a_lost_loop_harms_no_other() -> None:
    gate = Gate()
    engine = TorchEngine(gate)

    async def submit_and_leave():
        engine.submit(STEP)

    asyncio.run(submit_and_leave())
    gate.go.set()

    async def later():
        await engine.submit(STEP).result()
        await engine.close()

    asyncio.run(later())
    assert len(gate.steps) == 2


class Overlapping(Gate):
    """Starts at once, like a device; each step's result waits to be let through."""

    overlaps = True

    def __init__(self):
        super().__init__()
        self.results, self.stumbles = [], 0

    def start(self, batch):
        self.steps.append(batch)
        self.threads.add(threading.current_thread().name)
        if self.error:
            raise self.error
        return Waiting(self, len(self.steps))


class Waiting:
    def __init__(self, gate, step):
        self.gate, self.step = gate, step

    def result(self):
        assert self.gate.go.wait(20)
        self.gate.results.append((self.step, threading.current_thread().name))
        if self.step == self.gate.stumbles:
            raise RuntimeError("the device stumbled")
        return StepResult(((),), float(self.step))


async def started(gate, count):
    await eventually(lambda: len(gate.steps) >= count)


async def test_the_next_step_starts_while_one_runs() -> None:
    gate = Overlapping()
    gate.stumbles = 3
    engine = TorchEngine(gate)
    handles = [engine.submit(STEP) for _ in range(5)]
    await started(gate, 3)
    # A fourth step may not start in this time.
    await asyncio.sleep(0.1)
    # One is waited for, one is queued behind it; the third keeps the device thread waiting.
    assert len(gate.steps) == 3 and not gate.results
    gate.go.set()
    assert [(await handles[n].result()).device_s for n in (0, 1, 3, 4)] == [1.0, 2.0, 4.0, 5.0]
    with pytest.raises(EngineError, match="the device stumbled"):
        await handles[2].result()
    await engine.close()
    assert gate.threads == {"device"}
    assert [step for step, _ in gate.results] == [1, 2, 3, 4, 5]
    assert {name for _, name in gate.results} == {"results"}


async def test_a_step_that_cannot_start_fails_alone() -> None:
    before = set(threading.enumerate())
    gate = Overlapping()
    gate.go.set()
    engine = TorchEngine(gate)
    assert (await engine.submit(STEP).result()).device_s == 1.0
    assert {each.name for each in set(threading.enumerate()) - before} >= {"device", "results"}
    gate.error = EngineError("out of bounds")
    with pytest.raises(EngineError, match="out of bounds"):
        await engine.submit(STEP).result()
    gate.error = None
    await engine.submit(STEP).result()
    await engine.close()
    left = set(threading.enumerate()) - before
    assert not [each for each in left if each.name in ("device", "results")]


@pytest.mark.parametrize("overlaps", [False, True])
async def test_both_threads_work_on_the_engines_gpu(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    """CUDA's current device is a thread's own: the second GPU's engine must not launch on the
    first, nor make a context there to wait with."""
    gate.overlaps = overlaps
    taken = []
    monkeypatch.setattr(
        "torch.cuda.set_device", lambda device: taken.append((str(device), thread_name()))
    )
    gate.go.set()
    engine = TorchEngine(gate, device=torch.device("cuda", 1))
    await engine.submit(STEP).result()
    await engine.close()
    threads = ["device", "results"] if overlaps else ["device"]
    assert sorted(taken) == [("cuda:1", name) for name in threads]


def thread_name():
    return threading.current_thread().name
