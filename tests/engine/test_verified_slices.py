"""Slices that verify proposals: the tokens of plain decoding, on each CPU backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import pytest
import torch

from baton.engine.execution.divided_step import run_divided
from baton.engine.scheduling.batch import Draw, Drawn, Slice, StepBatch, StepResult
from baton.engine.scheduling.token_history import PromptTokens, Text
from baton.engine.scheduling.verification import with_proposals
from baton.runtime.sampling import SamplingParams
from tests.support.decoder_probe import parts_of
from tests.support.model_story import ModelStory, random_prompt
from tests.support.small_models import Reference

PROMPT, STEPS, MOST = 21, 24, 5


class Backend(TypedDict, total=False):
    backend: str
    dtype: str
    deterministic: bool
    kv_dtype: str


BACKENDS: list[Backend] = [
    {"backend": "torch"},
    {"backend": "numba"},
    {"dtype": "bfloat16"},
    {"dtype": "float32", "deterministic": True},
    {"dtype": "bfloat16", "deterministic": True},
    {"dtype": "bfloat16", "kv_dtype": "int8"},
]
RULES = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=3, top_p=0.9, top_logprobs=2),
    SamplingParams(
        temperature=0.8,
        seed=4,
        frequency_penalty=0.5,
        presence_penalty=0.4,
        repetition_penalty=1.2,
        logit_bias=((5, 2.0), (7, -100.0)),
    ),
]


class Choice:
    """One sequence on a runner."""

    def __init__(self, story: ModelStory, params: SamplingParams, number: int = 0) -> None:
        self.story, self.params, self.number = story, params, number
        self.prompt, self.output = random_prompt(PROMPT, seed=number), list[int]()
        self.text = Text(PromptTokens(self.prompt), self.output)
        self.drawn: list[Drawn] = []
        self.blocks = story.blocks(PROMPT + STEPS + MOST + 1)
        self.take(story.runner.run(StepBatch((self.slice(self.prompt, 0),))).drawn[0])

    def take(self, drawn: tuple[Drawn, ...]) -> None:
        self.drawn += drawn
        self.output += [each.token for each in drawn]

    def slice(self, tokens: list[int], start: int, draws: int = 1) -> Slice:
        history = self.text.until(len(self.output)) if self.params.needs_history else None
        first = start + len(tokens)
        params = self.params
        made = tuple(Draw(self.number, first + i, params, history) for i in range(draws))
        return Slice(tokens, start, tuple(self.blocks), made)

    def next(self, proposals: list[int]) -> Slice:
        known = self.slice(self.output[-1:], PROMPT + len(self.output) - 1, len(proposals) + 1)
        return with_proposals(known, proposals) if proposals else known


def plainly(story: ModelStory, params: SamplingParams, number: int) -> list[Drawn]:
    choice = Choice(story, params, number)
    while len(choice.output) < STEPS:
        choice.take(story.runner.run(StepBatch((choice.next([]),))).drawn[0])
    return choice.drawn


def known(drawn: list[Drawn]) -> list[tuple[int, object]]:
    return [(each.token, each.logprob and pytest.approx(each.logprob, abs=5e-2)) for each in drawn]


@pytest.mark.parametrize("how", BACKENDS, ids=str)
def test_tokens_equal_those_of_plain_decoding(
    references: Callable[[str], Reference], how: Backend
) -> None:
    """Drafts of each length, with the first wrong token at each place, beside plain slices."""
    folder = references("qwen3").folder
    story = ModelStory(folder, **how)
    wanted = [plainly(story, params, number) for number, params in enumerate(RULES)]
    choices = [Choice(story, params, number) for number, params in enumerate(RULES)]
    for step in range(100):
        live = [choice for choice in choices if len(choice.output) < STEPS]
        if not live:
            break
        slices = []
        for choice in live:
            length, right = (step + choice.number) % MOST, (3 * step + choice.number) % (MOST + 1)
            at = len(choice.output)
            proposals = [each.token for each in wanted[choice.number][at : at + length]]
            if right < len(proposals):
                proposals[right] = (proposals[right] + 1) % 199
            slices.append(choice.next(proposals))
        result = story.runner.run(StepBatch((*slices, Slice(random_prompt(9), 0, story.blocks(9)))))
        assert not result.broken
        for choice, item, drawn in zip(live, slices, result.drawn, strict=False):
            assert 1 <= len(drawn) <= item.proposed + 1
            choice.take(drawn)
    for choice, expected in zip(choices, wanted, strict=True):
        assert known(choice.drawn[:STEPS]) == known(expected[:STEPS])
        assert [each.token for each in choice.drawn[:STEPS]] == [
            each.token for each in expected[:STEPS]
        ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_bits_of_a_slice_of_one(
    references: Callable[[str], Reference], dtype: str
) -> None:
    story = ModelStory(references("qwen3").folder, dtype=dtype, deterministic=True)
    tokens, params = random_prompt(30), RULES[0]
    alone, together = story.blocks(40), story.blocks(40)
    for blocks in (alone, together):
        story.logits(Slice(tokens, 0, blocks))
    proposals = [7, 8, 9, 10]
    wanted = [
        story.logits(Slice([token], 30 + at, alone))[0] for at, token in enumerate([6, *proposals])
    ]
    draws = tuple(Draw(0, 31 + row, params) for row in range(5))
    item = with_proposals(Slice([6], 30, together, draws), proposals)
    beside = Slice(random_prompt(11), 0, story.blocks(11))
    assert torch.equal(story.logits(beside, item)[1], torch.cat(wanted))
    memory = story.runner.pool.memory
    assert torch.equal(memory[list(alone[:4])], memory[list(together[:4])])


def test_a_proposal_that_is_not_finite_breaks_nothing(
    references: Callable[[str], Reference],
) -> None:
    """Plain decoding would not have computed it; where it would, its own step breaks."""
    story = ModelStory(references("qwen3").folder)
    choice = Choice(story, RULES[0])
    (first,) = story.runner.run(StepBatch((choice.next([]),))).drawn[0]
    parts_of(story.runner.decoder).weights.embedding[150] = float("nan")
    wrong = 150 if first.token != 150 else 151
    result = story.runner.run(StepBatch((choice.next([wrong, 3]),)))
    assert (result.drawn, result.broken) == (((first,),), frozenset())
    parts_of(story.runner.decoder).weights.embedding[first.token] = float("nan")
    result = story.runner.run(StepBatch((choice.next([first.token, 3]),)))
    assert (result.drawn, result.broken) == (((first,),), frozenset())
    choice.take((first,))
    assert story.runner.run(StepBatch((choice.next([3]),))).broken == {0}


def test_a_step_that_does_not_fit_verifies_in_parts(
    references: Callable[[str], Reference],
) -> None:
    story = ModelStory(references("qwen3").folder)
    choices = [Choice(story, params, number) for number, params in enumerate(RULES)]
    items = [choice.next([1, 2]) for choice in choices]
    wanted = story.runner.run(StepBatch(tuple(items)))

    def short(batch: StepBatch) -> StepResult:
        if len(batch.slices) > 1:
            raise MemoryError
        return story.runner.run(batch)

    found = run_divided(short, StepBatch(tuple(items)))
    assert [[each.token for each in row] for row in found.drawn] == [
        [each.token for each in row] for row in wanted.drawn
    ]
