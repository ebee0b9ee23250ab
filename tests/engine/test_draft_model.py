"""A draft model beside a target: what it proposes, from which KV, and which pairs are refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from baton.engine.scheduling.batch import DraftWork, Draw, Slice, StepBatch
from baton.engine.scheduling.token_history import PromptTokens, Text
from baton.runtime.errors import EngineError, ModelError
from baton.runtime.sampling import SamplingParams
from tests.support.model_story import ModelStory, random_prompt
from tests.support.small_models import Reference

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
EARLY = SamplingParams(temperature=0.7, seed=5, min_tokens=20, barred=tuple(range(0, 60, 3)))


class Pair(ModelStory):
    """A target and its draft model, and one sequence after another on both."""

    def __init__(self, target: Path, draft: Path, **how: Any) -> None:
        super().__init__(target, draft_folder=draft, backend="torch", **how)
        assert self.runner.draft is not None and self.runner.pool.draft is not None
        self.draft = self.runner.draft
        self.runner.pool.draft.tensor.fill_(float("nan"))  # what no step computed shows itself

    def draws(
        self, prompt: list[int], known: int, count: int, rule: SamplingParams
    ) -> tuple[Draw, ...]:
        """Draws of `count` positions behind the prompt and `known` tokens of output."""
        history = None
        if rule.needs_history:
            history = Text(PromptTokens(prompt), self.output).until(known)
        first = len(prompt) + known
        return tuple(
            Draw(0, first + index, rule.at(known + index), history) for index in range(count)
        )

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


def speculate(
    pair: Pair, prompt: list[int], steps: int, rule: SamplingParams, most: int = 4
) -> tuple[list[int], int, int]:
    """Decode with drafts of unlike lengths, some steps without any. Returns the output, and how
    many proposals were accepted of how many."""
    pair.output = []
    blocks = pair.blocks(len(prompt) + steps + 2 * most)
    text = Text(PromptTokens(prompt), pair.output)
    todo, start, kept_up, lengths = prompt, 0, 0, random.Random(1)
    accepted = proposed = 0
    while len(pair.output) < steps:
        count = lengths.randrange(most + 1) if start else 0
        end = start + len(todo)
        history = text.until(len(pair.output)) if rule.needs_history else None
        made = len(pair.output)
        draws = tuple(Draw(0, end + row, rule.at(made + row), history) for row in range(count + 1))
        work = None
        if not start or count:
            whole = [*prompt, *pair.output]
            work = DraftWork(whole[kept_up:start], count)
        item = Slice(todo, start, blocks, draws, draft=work)
        result = pair.runner.run(StepBatch((item,)))
        drawn = [each.token for each in result.drawn[0]]
        if work is not None:
            kept_up = start + len(todo) + max(0, min(len(drawn), count) - 1)
            assert len(result.proposed.get(0, ())) == count
        proposed, accepted = proposed + count, accepted + len(drawn) - 1
        pair.output += drawn
        todo, start = drawn[-1:], start + len(todo) + len(drawn) - 1
    return pair.output[:steps], accepted, proposed


@pytest.fixture
def twins(qwen3: Reference) -> Pair:
    """The draft is the target, so all that it proposes is right."""
    return Pair(qwen3.folder, qwen3.folder)


@pytest.fixture
def unlike(qwen3: Reference, references: Callable[[str], Reference]) -> Pair:
    return Pair(qwen3.folder, references("llama").folder)


@pytest.mark.parametrize("rule", [GREEDY, SEEDED, PENALIZED])
def test_a_draft_that_is_its_target_proposes_its_tokens(twins: Pair, rule: SamplingParams) -> None:
    prompt = random_prompt(21)
    output = list(twins.decode(prompt, 14, rule))
    for known in (1, 2, 5, 9):
        missing = known - 1  # the prompt was computed, no token of output was
        assert twins.propose(prompt, known, 5, missing, rule) == output[known : known + 5]


@pytest.mark.parametrize("rule", [GREEDY, SEEDED, PENALIZED, EARLY])
def test_a_draft_changes_no_token(unlike: Pair, rule: SamplingParams) -> None:
    prompt = random_prompt(19)
    plain = list(unlike.decode(prompt, 40, rule))
    output, accepted, proposed = speculate(unlike, prompt, 40, rule)
    assert output == plain
    assert 0 <= accepted < proposed  # of random models: some are wrong


@pytest.mark.parametrize("rule", [GREEDY, SEEDED, PENALIZED, EARLY])
def test_all_proposals_of_a_twin_are_accepted(twins: Pair, rule: SamplingParams) -> None:
    prompt = random_prompt(23)
    plain = list(twins.decode(prompt, 40, rule))
    output, accepted, proposed = speculate(twins, prompt, 40, rule)
    assert output == plain
    assert accepted == proposed > 20


def test_a_step_in_parts_keeps_its_proposals(twins: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out once: the halves propose and verify for themselves."""
    prompts = [random_prompt(length, seed=length) for length in (9, 14)]
    stories = []
    for prompt in prompts:
        output = list(twins.decode(prompt, 6, SEEDED))
        draws = twins.draws(prompt, 1, 4, SEEDED)
        work = DraftWork((), 3)
        stories.append(
            (Slice(output[:1], len(prompt), twins.blocks_held, draws, draft=work), output)
        )
    whole, failures = twins.draft.run, iter([MemoryError("no room")])

    def run(slices):
        for error in failures:
            raise error
        return whole(slices)

    monkeypatch.setattr(twins.draft, "run", run)
    result = twins.runner.run(StepBatch(tuple(item for item, _ in stories)))
    assert result.shortages == 1
    for index, (_, output) in enumerate(stories):
        assert list(result.proposed[index]) == output[1:4]
        assert [each.token for each in result.drawn[index]] == output[1:5]


def test_proposals_without_a_draft_model_are_refused(qwen3: Reference) -> None:
    alone = ModelStory(qwen3.folder, backend="torch")
    draws = tuple(Draw(0, 1 + row, GREEDY) for row in range(3))
    item = Slice([4], 0, alone.blocks(8), draws, draft=DraftWork((), 2))
    with pytest.raises(EngineError, match="no draft model is loaded"):
        alone.runner.run(StepBatch((item,)))


def test_the_shipped_draft_model_fits_its_target() -> None:
    """Greedy, of a prompt in the form that the pair was trained on."""
    models = Path(__file__).parents[2] / "models"
    pair = Pair(models / "baton-tiny", models / "baton-tiny-draft", dtype="bfloat16")
    tokenizer = Tokenizer.from_file(str(models / "baton-tiny" / "tokenizer.json"))
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(text).ids
    plain = list(pair.decode(prompt, 24, GREEDY))
    output, accepted, proposed = speculate(pair, prompt, 24, GREEDY)
    assert len(output) == len(plain) == 24
    assert accepted > 0.3 * proposed


def test_the_kv_of_accepted_proposals_needs_no_second_pass(twins: Pair) -> None:
    prompt = random_prompt(13)
    output = list(twins.decode(prompt, 14, SEEDED))
    assert twins.propose(prompt, 1, 4, 0, SEEDED) == output[1:5]
    # three of four accepted: the fourth token of output is the target's, none is missing
    assert twins.propose(prompt, 5, 3, 0, SEEDED) == output[5:8]
    # all three accepted: the KV of the last one is missing
    assert twins.propose(prompt, 9, 3, 1, SEEDED) == output[9:12]


def test_drafts_of_unlike_lengths_go_together(twins: Pair) -> None:
    stories = []
    for at, (length, count) in enumerate([(9, 3), (17, 1), (30, 5)]):
        prompt = random_prompt(length, seed=at)
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


def test_the_target_computes_the_same_beside_a_draft(unlike: Pair, qwen3: Reference) -> None:
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


def test_a_draft_ends_where_its_logits_are_not_finite(twins: Pair) -> None:
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


def test_a_slice_that_breaks_its_bounds_is_refused(twins: Pair) -> None:
    item = Slice([500], 0, twins.blocks(1), twins.draws([], 1, 2, GREEDY), draft=DraftWork((), 1))
    with pytest.raises(EngineError, match="exceeds the vocabulary of 199"):
        twins.draft.run([item])


def changed(folder: Path, to: Path, **fields: object) -> Path:
    shutil.copytree(folder, to)
    config = to / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    return to


def test_a_draft_with_another_vocabulary_is_refused(qwen3: Reference, tmp_path: Path) -> None:
    draft = changed(qwen3.folder, tmp_path / "draft", vocab_size=200)
    with pytest.raises(ModelError, match="vocabulary has 200 tokens, not 199"):
        Pair(qwen3.folder, draft)


def test_a_draft_with_too_short_a_context_is_refused(qwen3: Reference, tmp_path: Path) -> None:
    draft = changed(qwen3.folder, tmp_path / "draft", max_position_embeddings=128)
    with pytest.raises(ModelError, match="128 tokens of context, not 512"):
        Pair(qwen3.folder, draft)


def tokenizer(words: Sequence[str]) -> str:
    vocab = {word: index for index, word in enumerate(words)}
    return json.dumps({"model": {"vocab": vocab}, "added_tokens": []})


def test_a_draft_with_another_tokenizer_is_refused(qwen3: Reference, tmp_path: Path) -> None:
    target = changed(qwen3.folder, tmp_path / "target")
    draft = changed(qwen3.folder, tmp_path / "draft")
    (target / "tokenizer.json").write_text(tokenizer(["a", "b", "c", "d"]))
    (draft / "tokenizer.json").write_text(tokenizer(["a", "b", "e", "f"]))
    with pytest.raises(ModelError, match="its tokenizer differs, first in token 2"):
        Pair(target, draft)
    (draft / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        Pair(target, draft)


def test_a_draft_group_needs_room_in_the_pool(
    qwen3: Reference, references: Callable[[str], Reference]
) -> None:
    alone = ModelStory(qwen3.folder, backend="torch").runner
    pair = Pair(qwen3.folder, references("llama").folder).runner
    assert pair.memory is not None and alone.memory is not None
    assert pair.memory.block_bytes == pair.pool.block_bytes > alone.memory.block_bytes
    step = StepBatch((Slice(random_prompt(9), 0, [0, 1]),))
    pair.run(step)
    assert pair.pool.draft is not None
    assert torch.isnan(pair.pool.draft.tensor).all()  # a slice without draft work leaves it alone
