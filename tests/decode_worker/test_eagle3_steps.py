"""A decode scheduler over a target and its EAGLE-3 head: tokens, published KV, preemption."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.decode_worker.draft_progress import DraftProgress
from baton.engine.execution.runner import ModelRunner
from baton.engine.scheduling.batch import DraftWork, Draw, Slice, StepBatch
from baton.runtime import identity
from baton.runtime.sampling import SamplingParams
from tests.support.drafting_worker import KEY, ROOT, DraftingWorker
from tests.support.eagle3_heads import TrainedPair, train_pair

TOKENS = 36
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TrainedPair:
    torch.set_num_threads(1)
    return train_pair(tmp_path_factory.mktemp("pair"), "speculators")


def worker(pair: TrainedPair, **how: Any) -> DraftingWorker:
    return DraftingWorker(pair.target, pair.head, "eagle3", **how)


def answers(pair: TrainedPair) -> list[list[int]]:
    return [answer[:TOKENS] for answer in pair.greedy]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_head_changes_no_token_and_is_accepted(pair: TrainedPair, ahead: bool) -> None:
    ours = worker(pair, ahead=ahead)
    assert ours.serve(pair.prompts, TOKENS, sampling=GREEDY) == answers(pair)
    assert ours.proposed > 10
    assert ours.accepted > 0.3 * ours.proposed


@pytest.mark.parametrize("ahead", [False, True])
def test_a_head_catches_up_where_it_proposes_nothing(pair: TrainedPair, ahead: bool) -> None:
    """Published blocks hold its KV, of features that earlier steps left there."""
    ours = worker(pair, ahead=ahead, longest=0)
    assert ours.serve(pair.prompts, TOKENS, sampling=GREEDY) == answers(pair)
    tokens = [*pair.prompts[1], *pair.greedy[1]]
    assert ours.pool.held_prefix(identity.chain(KEY, ROOT, tokens, 16)) >= 3


def accepted_counts(
    runner: ModelRunner, prompt: list[int], blocks: list[int], computed: int
) -> list[int]:
    """How many of four proposals each step accepts, after a prompt of which so many tokens are in
    the blocks."""
    first = Slice(
        prompt[computed:], computed, blocks, (Draw(0, len(prompt), GREEDY),), draft=DraftWork()
    )
    output = [runner.run(StepBatch((first,))).drawn[0][0].token]
    counts, known = list[int](), len(prompt)
    while len(output) < TOKENS - 4:
        start = len(prompt) + len(output) - 1
        draws = tuple(Draw(0, start + 1 + row, GREEDY) for row in range(5))
        work = DraftWork([*prompt, *output][known:start], 4)
        item = Slice(output[-1:], start, blocks, draws, draft=work)
        drawn = [each.token for each in runner.run(StepBatch((item,))).drawn[0]]
        output, known = output + drawn, start + 1
        counts.append(len(drawn) - 1)
    return counts


def test_a_prefix_hit_leaves_acceptance_as_it_was(pair: TrainedPair) -> None:
    """The features of the last matched token are in its block."""
    runner, prompt = worker(pair).runner, pair.prompts[1]
    size = runner.pool.block_size
    counts = accepted_counts(runner, prompt, [0, 1, 2, 3, 4], 0)
    matched = len(prompt) // size * size
    assert accepted_counts(runner, prompt, [0, 1, 7, 8, 9], matched) == counts
    assert sum(counts) > len(counts)


def test_a_preempted_sequence_speculates_again(pair: TrainedPair) -> None:
    ours = worker(pair, blocks=10, growth_tokens=4)
    assert ours.serve(pair.prompts, TOKENS, sampling=GREEDY) == answers(pair)
    assert ours.scheduler.preemptions > 0
    assert ours.accepted > 0


def span(start: int, end: int) -> list[int]:
    return list(range(start, end))


def test_accepted_proposals_of_a_head_are_computed_again() -> None:
    progress = DraftProgress.at(10, keeps_proposals=False)
    assert progress.plan(10, 3, span) == DraftWork([], 3)
    progress.commit(Slice([1], 10, (), draft=DraftWork([], 3)), 13)  # two accepted
    assert progress.computed == 11
    assert progress.plan(13, 2, span) == DraftWork([11, 12], 2)
