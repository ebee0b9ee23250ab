"""The hash engine: its next token hangs on every byte that it should have read."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.engine.scheduling.token_history import history_of
from baton.runtime.sampling import SamplingParams
from baton.simulation.fleet.hash_engine import HashEngine, block_bytes, expected_output

SIZE, SLABS, VOCAB = 4, 2, 1000
GREEDY = SamplingParams(temperature=0.0)


def make(blocks: int = 8) -> tuple[HashEngine, np.ndarray]:
    pool = np.zeros((blocks, block_bytes(SIZE, SLABS)), dtype=np.uint8)
    return HashEngine(pool, block_size=SIZE, slabs=SLABS, vocab_size=VOCAB), pool


async def run(engine: HashEngine, *slices: Slice) -> list[list[int]]:
    result = await engine.submit(StepBatch(slices)).result()
    return [[drawn.token for drawn in draws] for draws in result.drawn]


def prompt_slice(tokens: list[int], blocks: list[int], **more: int) -> Slice:
    start = more.get("start", 0)
    draw = Draw(0, start + len(tokens), GREEDY)
    return Slice(tokens, start, blocks, (draw,))


def expected(tokens: list[int], count: int, params: SamplingParams = GREEDY) -> list[int]:
    return expected_output(tokens, count, params, choice=0, slabs=SLABS, vocab_size=VOCAB)


async def test_whole_chunked_and_scattered_runs_agree() -> None:
    tokens = list(range(10))
    (want,) = expected(tokens, 1)
    engine, _ = make()
    assert await run(engine, prompt_slice(tokens, [0, 1, 2])) == [[want]]
    engine, _ = make()
    await run(engine, Slice(tokens[:4], 0, [7]))
    await run(engine, Slice(tokens[4:8], 4, [7, 3]))
    assert await run(engine, prompt_slice(tokens[8:], [7, 3, 5], start=8)) == [[want]]


async def test_decoding_continues_as_expected() -> None:
    tokens = list(range(7))
    engine, _ = make()
    output = (await run(engine, prompt_slice(tokens, [0, 1, 2])))[0]
    for _ in range(4):
        position = len(tokens) + len(output) - 1
        piece = prompt_slice(output[-1:], [0, 1, 2], start=position)
        output += (await run(engine, piece))[0]
    assert output == expected(tokens, 5)


@pytest.mark.parametrize("position", [0, 3, 5, 9])
async def test_any_changed_byte_changes_the_next_token(position: int) -> None:
    tokens = list(range(10))
    engine, pool = make()
    await run(engine, Slice(tokens, 0, [0, 1, 2]))
    block, token = divmod(position, SIZE)
    pool.reshape(-1, SLABS, SIZE, 8)[block, 1, token, 5] ^= 1
    changed = await run(engine, prompt_slice([77], [0, 1, 2], start=10))
    assert changed[0] != expected([*tokens, 77], 1)


async def test_swapped_blocks_change_the_next_token() -> None:
    tokens = list(range(10))
    engine, _ = make()
    await run(engine, Slice(tokens, 0, [0, 1, 2]))
    swapped = await run(engine, prompt_slice([77], [1, 0, 2], start=10))
    assert swapped[0] != expected([*tokens, 77], 1)


async def test_draws_hang_on_seed_and_choice_only_with_a_temperature() -> None:
    tokens = [1, 2, 3]
    engine, _ = make()
    params = [SamplingParams(temperature=t, seed=s) for t in (0.0, 1.0) for s in (1, 2)]
    draws = tuple(Draw(choice, 3, p) for p in params for choice in (0, 1))
    (tokens_drawn,) = await run(engine, Slice(tokens, 0, [0], draws))
    assert len(set(tokens_drawn[:4])) == 1 and len(set(tokens_drawn[4:])) == 4


async def test_with_a_penalty_draws_depend_on_history_and_output_start() -> None:
    tokens = [1, 2, 3]
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    draws = tuple(
        Draw(0, 3, params, history_of(history, prompt_tokens))
        for history, prompt_tokens in (([1, 2, 3], 3), ([1, 2, 3], 2), ([1, 2, 4], 3))
    )
    engine, _ = make()
    (drawn,) = await run(engine, Slice(tokens, 0, [0], draws))
    assert len(set(drawn)) == 3
    whole = expected(tokens, 3, params)
    assert whole[0] == drawn[0]
    assert expected([*tokens, whole[0]], 2, params) != whole[1:]  # then it is of the prompt


async def test_a_copied_block_reads_like_its_source() -> None:
    engine, _ = make()
    await run(engine, Slice([1, 2, 3], 0, [0]))
    batch = StepBatch((prompt_slice([4], [6], start=3),), ((0, 6),))
    result = await engine.submit(batch).result()
    assert result.drawn[0][0].token == expected([1, 2, 3, 4], 1)[0]


async def test_steps_run_in_their_order_and_feed_each_other() -> None:
    engine, _ = make()
    tokens = list(range(7))
    first = engine.submit(StepBatch((prompt_slice(tokens, [0, 1, 2]),)))
    fed = [
        engine.submit(StepBatch((Slice([0], start, [0, 1, 2], (draw,), feed=0),)))
        for start in (7, 8, 9)
        if (draw := Draw(0, start + 1, GREEDY))
    ]
    assert len(engine.under_way) == 4 and engine.steps == 0
    results = [await step.result() for step in reversed([first, *fed])][::-1]
    assert [result.drawn[0][0].token for result in results] == expected(tokens, 4)
    assert (engine.under_way, engine.steps) == ([], 4)


async def test_a_copy_waits_for_earlier_steps_and_delays_the_next() -> None:
    engine, _ = make()
    engine.submit(StepBatch((Slice([1, 2, 3], 0, [0]),)))
    later = engine.submit(StepBatch((prompt_slice([4], [6], start=3),), ((0, 6),)))
    assert (await later.result()).drawn[0][0].token == expected([1, 2, 3, 4], 1)[0]
