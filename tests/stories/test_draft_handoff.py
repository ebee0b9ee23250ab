"""A prompt computed by one worker and decoded by another, beside a draft model: its KV travels in
the same blocks, under checksums of its own, and acceptance is that of one worker."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from baton.deploy.processes.pool_memory import local_pool
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.execution.runner import ModelRunner
from baton.engine.scheduling.batch import DraftWork, Draw, Slice, StepBatch
from baton.runtime.sampling import SamplingParams

MODELS = Path(__file__).parents[2] / "models"
TARGET, DRAFT = MODELS / "baton-tiny", MODELS / "baton-tiny-draft"
RULE = SamplingParams(temperature=0.8, seed=7)
LENGTH, STEPS = 4, 24


def worker() -> ModelRunner:
    options = EngineOptions(blocks=24, dtype="float32", backend="torch", draft_folder=DRAFT)
    runner = build_runner(TARGET, options)
    assert runner.pool.draft is not None
    runner.pool.tensor.fill_(math.nan)
    runner.pool.draft.tensor.fill_(math.nan)
    return runner


def prefill(runner: ModelRunner, prompt: list[int], blocks: list[int]) -> int:
    draw = Draw(0, len(prompt), RULE)
    item = Slice(prompt, 0, blocks, (draw,), draft=DraftWork())
    return runner.run(StepBatch((item,))).drawn[0][0].token


def decode(
    runner: ModelRunner, prompt: list[int], first: int, blocks: list[int]
) -> tuple[list[int], list[int]]:
    """The output, and how many proposals each step accepted."""
    output, accepted, known = [first], list[int](), len(prompt)
    while len(output) < STEPS:
        start = len(prompt) + len(output) - 1
        draws = tuple(Draw(0, start + 1 + row, RULE) for row in range(LENGTH + 1))
        work = DraftWork([*prompt, *output][known:start], LENGTH)
        item = Slice(output[-1:], start, blocks, draws, draft=work)
        drawn = [each.token for each in runner.run(StepBatch((item,))).drawn[0]]
        output += drawn
        accepted.append(len(drawn) - 1)
        known = min(start + len(drawn), start + LENGTH)
    return output, accepted


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    text = "<|user|>Copy this list: pear, apple, plum, grape, lemon, fig<|end|><|assistant|>"
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def test_acceptance_after_a_handoff_is_that_of_one_worker(prompt: list[int]) -> None:
    granter, reader = worker(), worker()
    theirs, ours = [3, 8, 1, 5], [7, 2, 9, 4]
    first = prefill(granter, prompt, theirs)
    full = -(-len(prompt) // granter.pool.block_size)
    for source, target in zip(theirs[:full], ours, strict=False):  # one READ for each block
        reader.pool.bytes_view()[target] = granter.pool.bytes_view()[source]
    sent = local_pool(granter.pool).checksums(theirs[:full], [11] * full)
    got = local_pool(reader.pool).checksums(ours[:full], [11] * full)
    assert np.array_equal(sent, got)
    assert sent.shape[1] == granter.spec.kv_heads + 2  # two heads of the draft model
    alone = decode(granter, prompt, first, [*theirs, 10, 11])
    apart = decode(reader, prompt, first, [*ours, 12, 13])
    assert apart == alone
    assert sum(apart[1]) > len(apart[1])  # more than one proposal a step is accepted


def test_a_changed_byte_of_the_draft_group_changes_its_sum_alone(prompt: list[int]) -> None:
    runner = worker()
    prefill(runner, prompt, [3, 8, 1, 5])
    pool = local_pool(runner.pool)
    before = pool.checksums([3], [5])[0]
    runner.pool.bytes_view()[3, -1] ^= 1
    after = pool.checksums([3], [5])[0]
    assert [i for i in range(len(before)) if before[i] != after[i]] == [len(before) - 1]


def test_without_the_draft_group_nothing_is_proposed(prompt: list[int]) -> None:
    """What a handoff of the target's layers alone would leave: logits that are not finite."""
    granter, reader = worker(), worker()
    blocks = [3, 8, 1, 5, 10, 11]
    first = prefill(granter, prompt, blocks)
    reader.pool.tensor.copy_(granter.pool.tensor)
    output, accepted = decode(reader, prompt, first, blocks)
    assert output[:STEPS] == decode(granter, prompt, first, blocks)[0][:STEPS]
    assert sum(accepted) == 0
