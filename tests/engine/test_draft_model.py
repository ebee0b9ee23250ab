"""A draft model beside a target: what it proposes, from which KV, and which pairs are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from baton.engine.scheduling.batch import DraftWork, Draw, SamplingParams, Slice, StepBatch
from baton.engine.scheduling.token_history import PromptTokens, Text
from baton.runtime.errors import EngineError, ModelError
from tests.support.model_story import ModelStory, random_prompt

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.3, seed=11, top_p=0.95)
PENALIZED = SamplingParams(
    temperature=0.9,
    seed=3,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=0.2,
    logit_bias=((5, 2.0), (9, -4.0)),
    top_logprobs=2,
)


class Pair(ModelStory):
    """A target and its draft model, and one sequence after another on both."""

    def __init__(self, target: Path, draft: Path) -> None:
        super().__init__(target, draft_folder=draft, backend="torch")
        assert self.runner.draft is not None and self.runner.pool.draft is not None
        self.draft = self.runner.draft
        self.runner.pool.draft.tensor.fill_(float("nan"))  # what nobody computed shows itself

    def draws(
        self, prompt: list[int], known: int, count: int, rule: SamplingParams
    ) -> tuple[Draw, ...]:
        """Draws of `count` positions behind the prompt and `known` tokens of output."""
        history = None
        if rule.needs_history:
            history = Text(PromptTokens(prompt), self.output).until(known)
        first = len(prompt) + known
        return tuple(Draw(0, first + place, rule, history) for place in range(count))

    def decode(self, prompt: list[int], steps: int, rule: SamplingParams) -> list[int]:
        """The target's own output, one token a step; the draft sees the prompt alone."""
        self.blocks_held = self.blocks(len(prompt) + steps + 16)
        self.output: list[int] = []
        todo, start = prompt, 0
        for _ in range(steps):
            draft = None if start else DraftWork()
            draws = self.draws(prompt, len(self.output), 1, rule)
            item = Slice(todo, start, self.blocks_held, draws, draft=draft)
            if draft is not None:
                self.draft.run([item])
            (token,) = self.draw(item)
            self.output.append(token)
            todo, start = [token], start + len(todo)
        return self.output

    def propose(
        self, prompt: list[int], known: int, count: int, missing: int, rule: SamplingParams
    ) -> list[int]:
        """Proposals behind the first `known` tokens of `output`, `missing` of them unknown to
        the draft's KV."""
        tokens, end = [*prompt, *self.output[:known]], len(prompt) + known
        work = DraftWork(tokens[end - 1 - missing : end - 1], count)
        draws = self.draws(prompt, known, count + 1, rule)
        item = Slice(tokens[-1:], end - 1, self.blocks_held, draws, draft=work)
        (found,) = self.draft.run([item]).values()
        return list(found)


@pytest.fixture
def twins(qwen3) -> Pair:
    """The draft is the target, so all that it proposes is right."""
    return Pair(qwen3.folder, qwen3.folder)


@pytest.fixture
def unlike(qwen3, references) -> Pair:
    return Pair(qwen3.folder, references("llama").folder)


@pytest.mark.parametrize("rule", [GREEDY, SEEDED, PENALIZED])
def test_a_draft_that_is_its_target_proposes_its_tokens(twins, rule):
    prompt = random_prompt(21)
    output = list(twins.decode(prompt, 14, rule))
    for known in (1, 2, 5, 9):
        missing = known - 1  # the prompt was computed, no token of output was
        assert twins.propose(prompt, known, 5, missing, rule) == output[known : known + 5]


def test_the_kv_of_accepted_proposals_needs_no_second_pass(twins):
    prompt = random_prompt(13)
    output = list(twins.decode(prompt, 14, SEEDED))
    assert twins.propose(prompt, 1, 4, 0, SEEDED) == output[1:5]
    # three of four accepted: the fourth token of output is the target's, none is missing
    assert twins.propose(prompt, 5, 3, 0, SEEDED) == output[5:8]
    # all three accepted: the KV of the last one is missing
    assert twins.propose(prompt, 9, 3, 1, SEEDED) == output[9:12]


def test_drafts_of_unlike_lengths_go_together(twins):
    stories = []
    for place, (length, count) in enumerate([(9, 3), (17, 1), (30, 5)]):
        prompt = random_prompt(length, seed=place)
        output = list(twins.decode(prompt, 8, SEEDED))
        draws = twins.draws(prompt, 1, count + 1, SEEDED)
        work = DraftWork((), count)
        stories.append((Slice(output[:1], length, twins.blocks_held, draws, draft=work), output))
    chunk = Slice(random_prompt(20, seed=9), 0, twins.blocks(20), draft=DraftWork())
    silent = Slice([3], 0, twins.blocks(1))
    slices = [chunk, *(item for item, _ in stories), silent]
    proposed = twins.draft.run(slices)
    assert sorted(proposed) == [1, 2, 3]
    for index, (item, output) in enumerate(stories, start=1):
        assert item.draft is not None
        assert list(proposed[index]) == output[1 : 1 + item.draft.tokens]


def test_the_target_computes_the_same_beside_a_draft(unlike, qwen3):
    prompt = random_prompt(25)
    alone = ModelStory(qwen3.folder, backend="torch")
    expected = alone.greedy(prompt, alone.blocks(40), 12)
    assert unlike.decode(prompt, 12, GREEDY) == expected
    for known in range(1, 9):
        unlike.propose(prompt, known, 3, known - 1, GREEDY)
    stored = unlike.runner.pool.tensor[unlike.blocks_held[:3]]
    kept = alone.runner.pool.tensor
    assert unlike.runner.pool.block_bytes > alone.runner.pool.block_bytes
    assert stored.isfinite().sum() > 0 and kept.isfinite().sum() > 0


def test_a_draft_ends_where_its_logits_are_not_finite(twins):
    prompt = random_prompt(12)
    twins.decode(prompt, 3, GREEDY)
    good = Slice([4], 0, twins.blocks(8), twins.draws([], 1, 3, GREEDY), draft=DraftWork((), 2))
    assert twins.runner.pool.draft is not None
    twins.runner.pool.draft.tensor[twins.blocks_held[0]] = float("nan")
    draws = twins.draws(prompt, 1, 4, GREEDY)
    bad = Slice(twins.output[:1], 12, twins.blocks_held, draws, draft=DraftWork((), 3))
    proposed = twins.draft.run([bad, good])
    assert proposed[0] == ()
    assert len(proposed[1]) == 2


def test_a_slice_that_breaks_its_bounds_is_refused(twins):
    item = Slice([500], 0, twins.blocks(1), twins.draws([], 1, 2, GREEDY), draft=DraftWork((), 1))
    with pytest.raises(EngineError, match="outside the 199 known"):
        twins.draft.run([item])


def changed(folder: Path, to: Path, **fields: object) -> Path:
    shutil.copytree(folder, to)
    config = to / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    return to


def test_a_draft_with_another_vocabulary_is_refused(qwen3, tmp_path):
    draft = changed(qwen3.folder, tmp_path / "draft", vocab_size=200)
    with pytest.raises(ModelError, match="vocabulary has 200 tokens, not 199"):
        Pair(qwen3.folder, draft)


def test_a_draft_with_too_short_a_context_is_refused(qwen3, tmp_path):
    draft = changed(qwen3.folder, tmp_path / "draft", max_position_embeddings=128)
    with pytest.raises(ModelError, match="128 tokens of context, not 512"):
        Pair(qwen3.folder, draft)


def tokenizer(words: Sequence[str]) -> str:
    vocab = {word: place for place, word in enumerate(words)}
    return json.dumps({"model": {"vocab": vocab}, "added_tokens": []})


def test_a_draft_with_another_tokenizer_is_refused(qwen3, tmp_path):
    target = changed(qwen3.folder, tmp_path / "target")
    draft = changed(qwen3.folder, tmp_path / "draft")
    (target / "tokenizer.json").write_text(tokenizer(["a", "b", "c", "d"]))
    (draft / "tokenizer.json").write_text(tokenizer(["a", "b", "e", "f"]))
    with pytest.raises(ModelError, match="its tokenizer differs, first in token 2"):
        Pair(target, draft)
    (draft / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        Pair(target, draft)


def test_a_draft_group_needs_room_in_the_pool(qwen3, references):
    alone = ModelStory(qwen3.folder, backend="torch").runner
    pair = Pair(qwen3.folder, references("llama").folder).runner
    assert pair.memory is not None and alone.memory is not None
    assert pair.memory.block_bytes == pair.pool.block_bytes > alone.memory.block_bytes
    step = StepBatch((Slice(random_prompt(9), 0, [0, 1]),))
    pair.run(step)
    assert pair.pool.draft is not None
    assert torch.isnan(pair.pool.draft.tensor).all()  # a slice without draft work leaves it alone
