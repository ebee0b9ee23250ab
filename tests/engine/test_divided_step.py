"""Memory that runs out: at every allocation of a step, and for one slice again and again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from baton.engine.execution.divided_step import is_out_of_memory, run_divided
from baton.engine.execution.torch_engine import TorchEngine
from baton.engine.scheduling.batch import Draw, Drawn, Slice, StepBatch, StepResult
from baton.runtime.errors import EngineError, OutOfMemory
from baton.runtime.sampling import SamplingParams
from tests.support.engine_probe import replace_compute
from tests.support.model_story import ModelStory, random_prompt
from tests.support.small_models import Reference

GREEDY = SamplingParams(temperature=0.0)
NO_MEMORY = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"


class Allocator(TorchDispatchMode):
    """Counts the operations that make a tensor, from 1; those of `refused` numbers fail, and
    those of more elements than `most`, the pool's own views excepted."""

    def __init__(self, refused, most):
        super().__init__()
        self.count = 0
        self._refused, self._most = refused, most

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.count += 1
            if self.count in self._refused or self._most < out.numel() < 100_000:
                raise RuntimeError(NO_MEMORY)
        return out


class Bench:
    """Four slices on a fresh pool: two that decode, two chunks; one of them draws no token."""

    def __init__(self, folder):
        self.reported = ModelStory(folder, deterministic=True)
        tokens = [random_prompt(40, seed=n) for n in range(4)]
        blocks = [self.reported.blocks(40) for _ in range(4)]
        for n, length in ((0, 20), (1, 9), (3, 8)):
            self.reported.logits(Slice(tokens[n][:length], 0, blocks[n]))
        draw = (Draw(0, 30, GREEDY),)
        self.batch = StepBatch(
            (
                Slice(tokens[0][20:21], 20, blocks[0], draw),
                Slice(tokens[1][9:10], 9, blocks[1], draw),
                Slice(tokens[2][:12], 0, blocks[2], draw),
                Slice(tokens[3][8:32], 8, blocks[3]),
            )
        )

    def run(self, *refused, most=100_000):
        """The result, the number of operations, and the pool afterwards."""
        with Allocator(refused, most) as allocator:
            result = self.reported.runner.run(self.batch)
        return result, allocator.count, self.reported.runner.pool.bytes_view().copy()


@pytest.mark.nightly
def test_one_failure_at_any_allocation_changes_nothing(qwen3: Reference) -> None:
    """The step is run again in halves: the same tokens and, bit for bit, the same KV."""
    bench = Bench(qwen3.folder)
    expected, count, pool = bench.run()
    assert count > 100 and not expected.failed and not expected.shortages
    for failing in range(1, count + 1):
        result, _, after = bench.run(failing)
        assert result.drawn == expected.drawn, failing
        assert not result.failed and not result.broken
        assert (after == pool).all(), failing


def test_two_failures_at_any_allocation_lose_nothing_either(qwen3: Reference) -> None:
    """The second one hits a half: it is halved again."""
    bench = Bench(qwen3.folder)
    expected, count, _ = bench.run()
    for failing in range(1, count, 7):
        result, _, _ = bench.run(failing, failing + count // 3)
        assert result.drawn == expected.drawn and not result.failed


def test_a_slice_that_never_fits_fails_alone_and_says_so(qwen3: Reference) -> None:
    """No tensor of more than 5,000 numbers: the longest chunk has one, nothing else alone."""
    bench = Bench(qwen3.folder)
    expected, _, _ = bench.run()
    result, _, _ = bench.run(most=5000)
    assert set(result.failed) == {3}
    assert result.drawn == expected.drawn  # it would have drawn none
    assert type(result.failed[3]) is OutOfMemory
    assert "a slice of 24 tokens" in str(result.failed[3])
    assert "can't allocate memory" in str(result.failed[3])


def test_when_nothing_fits_every_slice_says_so(qwen3: Reference) -> None:
    bench = Bench(qwen3.folder)
    result, _, _ = bench.run(most=0)
    assert set(result.failed) == {0, 1, 2, 3}
    assert result.drawn == ((), (), (), ())
    assert result.shortages == 7  # four slices, two halves, the whole


def test_parts_are_put_together_in_order() -> None:
    """Slices differ by their start; the odd ones do not fit beside another."""
    steps = []

    def run(batch):
        steps.append([item.start for item in batch.slices])
        if len(batch.slices) > 1 and any(item.start % 2 for item in batch.slices):
            raise MemoryError
        drawn = tuple((Drawn(0, item.start),) for item in batch.slices)
        odd = [index for index, item in enumerate(batch.slices) if item.start == 3]
        return StepResult(drawn, 0.25, frozenset(odd))

    slices = tuple(Slice([1], start, [0]) for start in (0, 2, 4, 3, 5))
    result = run_divided(run, StepBatch(slices))
    assert steps == [[0, 2, 4, 3, 5], [0, 2], [4, 3, 5], [4], [3, 5], [3], [5]]
    assert [drawn[0].token for drawn in result.drawn] == [0, 2, 4, 3, 5]
    assert result.broken == {3}
    assert result.device_s == 1.0
    assert result.shortages == 3


def test_the_memory_of_the_failed_try_is_released() -> None:
    """What its frames held must not be in the way of the parts."""
    held = []

    class Big:
        def __del__(self):
            held.remove(self.name)

        def __init__(self, name):
            self.name = name
            held.append(name)

    def run(batch):
        assert not held
        big = Big(len(batch.slices))
        if len(batch.slices) > 1:
            raise MemoryError(big.name)
        return StepResult(((),))

    result = run_divided(run, StepBatch(tuple(Slice([1], n, [0]) for n in range(4))))
    assert len(result.drawn) == 4 and not held


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(NO_MEMORY),
        RuntimeError("std::bad_alloc"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_lack_of_memory_has_many_names(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_real_failures_are_known() -> None:
    for attempt in (
        lambda: torch.empty(1 << 60),
        lambda: bytearray(1 << 62),
        lambda: np.empty(1 << 58),
    ):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            attempt()
        assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error", [RuntimeError("shape mismatch"), ValueError("out of memory"), EngineError("broken")]
)
def test_other_errors_are_not_retried(error: Exception) -> None:
    calls = []

    def run(batch):
        calls.append(batch)
        raise error

    assert not is_out_of_memory(error)
    with pytest.raises(type(error)):
        run_divided(run, StepBatch((Slice([1], 0, [0]), Slice([1], 1, [0]))))
    assert len(calls) == 1


def test_a_failed_slice_feeds_the_next_step_an_unused_token(qwen3: Reference) -> None:
    """Its request is over; the others of the step that was submitted already go on."""
    bench = Bench(qwen3.folder)
    first, second, chunk, _ = bench.batch.slices
    result, _, _ = bench.run(most=1500)
    assert set(result.failed) == {2, 3}
    draw = (Draw(0, 31, GREEDY),)
    after = StepBatch(
        (
            Slice((0,), 12, chunk.blocks, draw, feed=2),
            Slice((0,), 21, first.blocks, draw, feed=0),
        )
    )
    drawn = bench.reported.runner.run(after).drawn
    token = result.drawn[0][0].token
    again = bench.reported.runner.run(StepBatch((Slice((token,), 21, first.blocks, draw),)))
    assert drawn[1] == again.drawn[0]


async def test_the_engine_runs_the_parts(qwen3: Reference) -> None:
    bench = Bench(qwen3.folder)
    runner, left = bench.reported.runner, [1]

    def short_once(compute):
        def short(batch):
            if left:
                left.pop()
                raise MemoryError
            return compute(batch)

        return short

    replace_compute(runner, short_once)
    engine = TorchEngine(runner, threads=1)
    result = await engine.submit(bench.batch).result()
    assert result.drawn == runner.run(bench.batch).drawn and not left
    assert result.device_s > 0
    await engine.close()
