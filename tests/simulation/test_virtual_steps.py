"""Steps of a simulated device: their order and time, and faults that are the next steps' alone."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.runtime.errors import EngineError, OutOfMemory
from baton.runtime.sampling import SamplingParams
from baton.simulation.fleet.hash_engine import HashEngine, block_bytes, expected_output
from baton.simulation.virtual import virtual_loop

SIZE, SLABS, VOCAB = 4, 2, 1000
GREEDY = SamplingParams(temperature=0.0)


def make(blocks: int = 8) -> tuple[HashEngine, np.ndarray]:
    pool = np.zeros((blocks, block_bytes(SIZE, SLABS)), dtype=np.uint8)
    return HashEngine(pool, block_size=SIZE, slabs=SLABS, vocab_size=VOCAB), pool


async def run(engine: HashEngine, *slices: Slice) -> list[list[int]]:
    result = await engine.submit(StepBatch(slices)).result()
    return [[drawn.token for drawn in draws] for draws in result.drawn]


def prompt_slice(tokens: list[int], blocks: list[int]) -> Slice:
    return Slice(tokens, 0, blocks, (Draw(0, len(tokens), GREEDY),))


def expected(tokens: list[int], count: int) -> list[int]:
    return expected_output(tokens, count, GREEDY, choice=0, slabs=SLABS, vocab_size=VOCAB)


def test_each_step_takes_its_time_after_the_previous_one() -> None:
    async def main() -> list[float]:
        pool = np.zeros((8, block_bytes(SIZE, SLABS)), dtype=np.uint8)
        engine = HashEngine(
            pool,
            block_size=SIZE,
            slabs=SLABS,
            vocab_size=VOCAB,
            step_s=lambda batch: len(batch.slices[0].tokens) / 10,
        )
        clock = asyncio.get_running_loop().time
        steps = [engine.submit(StepBatch((prompt_slice([1] * n, [n]),))) for n in (1, 4, 2)]
        ended = []
        for step in steps:
            assert (await step.result()).device_s > 0
            ended.append(clock())
        return ended

    assert virtual_loop.run(main()) == pytest.approx([0.1, 0.5, 0.7], abs=0.001)


async def test_a_failing_step_and_a_broken_slice_happen_once() -> None:
    engine, _ = make()
    engine.fail_steps = 1
    with pytest.raises(EngineError):
        await run(engine, prompt_slice([1], [0]))
    engine.break_slices = {1}
    batch = StepBatch((prompt_slice([1], [0]), prompt_slice([2], [1])))
    result = await engine.submit(batch).result()
    assert result.broken == {1} and result.drawn[1] == () and result.drawn[0]
    assert await run(engine, prompt_slice([2], [1])) == [expected([2], 1)]


async def test_a_failed_step_feeds_an_unused_token() -> None:
    engine, pool = make()
    engine.fail_steps = 1
    failing = engine.submit(StepBatch((prompt_slice([1], [0]),)))
    lost = Slice([0], 1, [0], (Draw(0, 2, GREEDY),), feed=0)
    after = engine.submit(StepBatch((lost, prompt_slice([2], [1]))))
    with pytest.raises(EngineError):
        await failing.result()
    assert (await after.result()).drawn[1][0].token == expected([2], 1)[0]
    assert pool[0].any()  # what a step writes for a request that is over


async def test_a_step_without_a_waiter_continues_and_is_closed() -> None:
    engine, pool = make()
    engine.submit(StepBatch((prompt_slice([1], [0]),))).result().cancel()
    engine.submit(StepBatch((prompt_slice([2], [1]),))).result().cancel()
    assert not pool.any()
    await engine.close()
    assert pool[0].any() and engine.steps == 2 and not engine.under_way


async def test_a_step_without_a_waiter_may_fail() -> None:
    engine, _ = make()
    engine.fail_steps = 1
    engine.submit(StepBatch((prompt_slice([2], [1]),))).result().cancel()
    await engine.close()
    assert engine.steps == 1 and not engine.under_way


async def test_a_slice_over_the_memory_fails_alone_and_writes_nothing() -> None:
    engine, pool = make()
    engine.memory_tokens = 3
    batch = StepBatch((prompt_slice([1, 2, 3, 4], [0]), prompt_slice([5, 6, 7], [1])))
    result = await engine.submit(batch).result()
    assert type(result.failed[0]) is OutOfMemory and result.drawn[0] == ()
    assert result.drawn[1][0].token == expected([5, 6, 7], 1)[0]
    assert result.shortages == 1 and not pool[0].any()


async def test_a_stalled_engine_ends_no_step_until_it_goes_on() -> None:
    engine, pool = make()
    engine.stall()
    steps = [engine.submit(StepBatch((prompt_slice([token], [token]),))) for token in (1, 2)]
    # An engine that went on would end a step in this time.
    await asyncio.sleep(0.01)
    assert len(engine.under_way) == 2 and not pool.any()
    engine.go_on()
    results = [await step.result() for step in steps]
    assert [r.drawn[0][0].token for r in results] == [*expected([1], 1), *expected([2], 1)]
    engine.stall()
    late = engine.submit(StepBatch((prompt_slice([3], [3]),)))
    engine.go_on()  # before it would have ended: once is enough
    await late.result()
    assert engine.steps == 3 and not engine.under_way
