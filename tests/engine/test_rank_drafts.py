"""Draft models and EAGLE-3 heads beside a model over several ranks, held against one process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from baton.deploy.processes.pool_memory import local_pool
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.execution.runner import ModelRunner
from baton.engine.ranks.loading import RankRunner, build_rank_runner
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.engine.speculation.draft_model import DraftModel
from baton.runtime.errors import DeviceLost, ModelError
from baton.runtime.sampling import SamplingParams
from tests.support.decoder_probe import draft_parts
from tests.support.drafted_decoding import DraftedSequence
from tests.support.eagle3_heads import HeadShape, ReferenceHead, save_head, train_pair
from tests.support.machine_speed import slowness
from tests.support.model_story import random_prompt
from tests.support.small_models import Reference

R = TypeVar("R", ModelRunner, RankRunner)
MODELS = Path(__file__).parents[2] / "models"
TINY, TINY_DRAFT = MODELS / "baton-tiny", MODELS / "baton-tiny-draft"
GREEDY = SamplingParams(temperature=0.0)
RULES = [
    GREEDY,
    SamplingParams(temperature=1.3, seed=11, top_p=0.95),
    SamplingParams(temperature=0.9, seed=3, repetition_penalty=1.3, logit_bias=((5, 2.0),)),
]
STEPS = 24
BLOCKS = [3, 8, 1, 5, 10, 11, 19, 13]

Make = Callable[..., RankRunner]


def options(draft: Path, **changes: Any) -> EngineOptions:
    how = {"blocks": 24, "block_size": 8, "dtype": "float32", "threads": 1, **changes}
    return EngineOptions(draft_folder=draft, **how)


def alone(target: Path, draft: Path, **changes: Any) -> ModelRunner:
    return without_kv(build_runner(target, options(draft, **changes)))


def without_kv(runner: R) -> R:
    """Fill both pools with NaN, so that a row which reads KV that no rank wrote is seen."""
    assert runner.pool.draft is not None
    runner.pool.tensor.fill_(float("nan"))
    runner.pool.draft.tensor.fill_(float("nan"))
    return runner


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[RankRunner] = []

    def runner(target: Path, draft: Path, ranks: int = 2, **changes: Any) -> RankRunner:
        made.append(build_rank_runner(target, ranks, options(draft, **changes)))
        found: RankRunner = without_kv(made[-1])
        return found

    yield runner
    for each in made:
        each.close()


def speculated(runner: ModelRunner, prompt: list[int], rule: SamplingParams) -> DraftedSequence:
    found = DraftedSequence(runner, prompt, BLOCKS, rule)
    found.prefill()
    found.decode(STEPS)
    return found


def assert_equal(one: ModelRunner, other: ModelRunner, prompt: list[int]) -> int:
    """Compare outputs, proposals and what is accepted; return how many are."""
    accepted = 0
    for rule in RULES:
        plain = DraftedSequence(one, prompt, BLOCKS, rule)
        plain.prefill()
        wanted, found = speculated(one, prompt, rule), speculated(other, prompt, rule)
        assert found.output[:STEPS] == wanted.output[:STEPS] == plain.plain(STEPS)
        assert (found.proposed, found.accepted) == (wanted.proposed, wanted.accepted)
        accepted += sum(found.accepted)
    return accepted


@pytest.mark.parametrize(
    ("draft", "ranks"),
    [
        # the shipped pair below is compared in the same way, and runs in `make test`
        pytest.param("llama", 2, marks=pytest.mark.nightly),
        # one KV head, which both ranks compute
        pytest.param("qwen2", 2, marks=pytest.mark.nightly),
        # which the leader computes alone
        pytest.param("llama-three-heads", 2, marks=pytest.mark.nightly),
        pytest.param("llama", 4, marks=pytest.mark.nightly),
        pytest.param("deepseek-v3", 2, marks=pytest.mark.nightly),
        pytest.param("mixtral", 2, marks=pytest.mark.nightly),
    ],
)
def test_proposals_equal_those_of_one_process(
    qwen3: Reference, references: Callable[[str], Reference], make: Make, draft: str, ranks: int
) -> None:
    folder = references(draft).folder
    one, other = alone(qwen3.folder, folder), make(qwen3.folder, folder, ranks)
    assert_equal(one, other, random_prompt(21))
    assert one.memory is not None and other.memory is not None
    assert other.memory.block_bytes == one.memory.block_bytes == other.pool.block_bytes


@pytest.mark.nightly
def test_all_proposals_of_a_twin_are_accepted(qwen3: Reference, make: Make) -> None:
    """The draft model is the target, and each rank holds half of both."""
    runner = make(qwen3.folder, qwen3.folder)
    assert isinstance(runner.draft, DraftModel) and runner.pool.draft is not None
    own = draft_parts(runner.draft).weights
    assert own.embedding.shape[0] in (99, 100)
    assert own.layers[0].mlp.down(torch.zeros(1, 48)).shape == (1, 64)
    runner.run(StepBatch((Slice(random_prompt(9), 0, [0, 1]),)))  # without work for the draft
    assert torch.isnan(runner.pool.draft.tensor).all()
    for rule in RULES:
        found = speculated(runner, random_prompt(21), rule)
        assert set(found.accepted) == {4}


@pytest.fixture(scope="module")
def tiny() -> Iterator[tuple[ModelRunner, RankRunner]]:
    """The shipped pair in one process, and over two ranks."""
    two = build_rank_runner(TINY, 2, options(TINY_DRAFT))
    try:
        yield alone(TINY, TINY_DRAFT), without_kv(two)
    finally:
        two.close()


@pytest.mark.nightly
def test_the_shipped_draft_model_keeps_its_acceptance(tiny: tuple[ModelRunner, RankRunner]) -> None:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    text = "<|user|>Copy this list: pear, apple, plum<|end|><|assistant|>"
    prompt = tokenizer.encode(text, add_special_tokens=False).ids
    assert assert_equal(*tiny, prompt) > STEPS


@pytest.mark.nightly
def test_a_handoff_moves_both_groups_between_any_ranks(
    tiny: tuple[ModelRunner, RankRunner],
) -> None:
    """The bytes of a block are all that moves; each head of both groups has a checksum."""
    prompt, theirs, ours = list(range(40, 61)), [4, 9, 2], [7, 6, 12]
    for granter, reader in (tiny, tiny[::-1], (tiny[1], tiny[1])):
        first = DraftedSequence(granter, prompt, [*theirs, 14, 15, 16, 17], RULES[1])
        first.prefill()
        reader.pool.bytes_view()[ours] = granter.pool.bytes_view()[theirs]
        sent = local_pool(granter.pool).checksums(theirs, [11] * 3)
        got = local_pool(reader.pool).checksums(ours, [11] * 3)
        assert np.array_equal(sent, got)
        assert sent.shape[1] == 4 + 2  # KV heads of the target and of the draft model
        second = DraftedSequence(reader, prompt, [*ours, 18, 19, 20, 21], RULES[1])
        second.output += first.output
        assert second.decode(STEPS) == first.decode(STEPS)
        assert (second.proposed, second.accepted) == (first.proposed, first.accepted)


@pytest.mark.nightly
def test_a_draft_that_was_left_behind_catches_up_over_ranks(
    tiny: tuple[ModelRunner, RankRunner],
) -> None:
    prompt = list(range(40, 61))
    behind = DraftedSequence(tiny[1], prompt, BLOCKS, RULES[1])
    behind.prefill()
    behind.plain(9)
    behind.decode(STEPS)
    steady = speculated(tiny[0], prompt, RULES[1])
    assert behind.output[:STEPS] == steady.output[:STEPS]


@pytest.mark.nightly
def test_compiled_passes_of_both_models_change_no_token(make: Make) -> None:
    """In bfloat16 each rank runs a decode step of either model in one call."""
    runner = make(TINY, TINY_DRAFT, dtype="bfloat16", block_size=16)
    prompt = list(range(40, 61))
    for rule in RULES:
        plain = DraftedSequence(runner, prompt, BLOCKS, rule)
        plain.prefill()
        found = speculated(runner, prompt, rule)
        assert found.output[:STEPS] == plain.plain(STEPS)
        assert sum(found.accepted) > 0


@pytest.mark.nightly
def test_a_trained_head_keeps_its_acceptance_over_ranks(tmp_path: Path, make: Make) -> None:
    pair = train_pair(tmp_path)
    wanted = alone(pair.target, pair.head, draft_kind="eagle3")
    found = make(pair.target, pair.head, draft_kind="eagle3")
    assert assert_equal(wanted, found, pair.prompts[0]) > STEPS // 2


@pytest.mark.nightly
def test_a_head_reads_the_whole_embedding_of_a_divided_target(
    qwen3: Reference, tmp_path: Path, make: Make
) -> None:
    """Its target's embedding is split over the ranks, and the head has none of its own."""
    shape = HeadShape(199, 64, (1, 2, 3), draft_vocab=60, own_embedding=False)
    embedding = qwen3.model.get_input_embeddings().weight
    head = save_head(ReferenceHead(shape, embedding), tmp_path / "head", "speculators")
    how = {"draft_kind": "eagle3"}
    one, two = alone(qwen3.folder, head, **how), make(qwen3.folder, head, **how)
    assert_equal(one, two, random_prompt(21))
    assert two.draft.head.weights.embedding.shape[0] == 199


@pytest.mark.nightly  # test_ranks.py has the same without proposals
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_lost_under_speculation_ends_the_step(make: Make, how: signal.Signals) -> None:
    runner = make(TINY, TINY_DRAFT)
    sequence = DraftedSequence(runner, list(range(40, 61)), BLOCKS, GREEDY)
    sequence.prefill()
    sequence.decode(4)
    os.kill(runner.group.process_ids[0], how)
    begun_s = time.monotonic()
    with pytest.raises(DeviceLost, match="rank 1"):
        sequence.decode(STEPS)
    assert time.monotonic() - begun_s < 6.0 * slowness()


def test_a_draft_that_does_not_fit_is_refused_beside_ranks(qwen3: Reference, make: Make) -> None:
    with pytest.raises(ModelError, match="vocabulary has 3712 tokens, not 199"):
        make(qwen3.folder, TINY_DRAFT)


@pytest.mark.nightly
@pytest.mark.parametrize("deterministic", [True, False])
def test_given_proposals_are_verified_over_ranks(
    qwen3: Reference, make: Make, deterministic: bool
) -> None:
    """As n-grams and suffixes propose: right ones, and wrong ones from some place on."""
    runner = build_rank_runner(
        qwen3.folder,
        2,
        EngineOptions(
            blocks=24, block_size=8, dtype="float32", threads=1, deterministic=deterministic
        ),
    )
    try:
        for rule in RULES:
            prompt = random_prompt(21)
            plain = DraftedSequence(runner, prompt, BLOCKS, rule)
            plain.prefill()
            wanted = plain.plain(STEPS)
            for right in range(5):
                given = DraftedSequence(runner, prompt, BLOCKS, rule)
                given.prefill()
                assert given.verify(wanted, right) == wanted
                assert right in given.accepted
    finally:
        runner.close()
