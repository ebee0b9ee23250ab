"""Counts of tokens, kept from draw to draw: equal to those of the whole text, whatever happened."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from baton.engine.sampling.sampling import adjust
from baton.engine.scheduling.batch import Draw
from baton.engine.scheduling.token_history import (
    History,
    PromptTokens,
    Text,
    TokenCounts,
    history_of,
)
from baton.runtime.sampling import SamplingParams

VOCAB = 50
PENALTIES = SamplingParams(
    temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.7
)


def penalised(history: History) -> torch.Tensor:
    logits = torch.linspace(-3, 3, VOCAB)[None].clone()
    adjust(logits, [Draw(0, len(history), PENALTIES, history)])
    return logits


def by_definition(prompt: list[int], output: list[int]) -> torch.Tensor:
    """One token after the other, in plain arithmetic."""
    logits = torch.linspace(-3, 3, VOCAB)[None].clone()
    for token in {*prompt, *output}:
        value = logits[0, token].item()
        logits[0, token] = value * 1.3 if value < 0 else value / 1.3
    for token in set(output):
        logits[0, token] -= 0.4 * output.count(token) + 0.7
    return logits


@pytest.mark.parametrize("seed", range(20))
def test_counts_kept_from_draw_to_draw_equal_whole_ones(seed: int) -> None:
    """Steps ahead, steps run twice, and a text that other choices share the prompt of."""
    dice = random.Random(seed)
    prompt = [dice.randrange(VOCAB) for _ in range(dice.randrange(40))]
    shared, outputs = PromptTokens(prompt), [list[int]() for _ in range(3)]
    texts = [Text(shared, output) for output in outputs]
    for _ in range(40):
        text, output = dice.choice(list(zip(texts, outputs, strict=True)))
        token = dice.randrange(VOCAB)
        ahead = dice.random() < 0.5  # the draw comes before its owner has heard of the token
        if not ahead:
            output.append(token)
        history = text.until(len(output))
        history = history.extended(token) if ahead else history
        for _ in range(dice.choice((1, 1, 2))):
            found = penalised(history)
            wanted = by_definition(prompt, [*output, token] if ahead else output)
            torch.testing.assert_close(found, wanted)
        if ahead:
            output.append(token)


def test_a_view_does_not_see_what_was_appended_later() -> None:
    output = [3, 3]
    text = Text(PromptTokens([1, 2]), output)
    before = text.until(2)
    output.append(4)
    assert list(before) == [1, 2, 3, 3] and len(before) == 4 and before.prompt_tokens == 2
    assert before.counts().tokens.tolist() == [3]
    assert text.until(3).counts().tokens.tolist() == [3, 4]
    assert before.counts().tokens.tolist() == [3]  # counted from the start: that is rare


def test_a_draw_counts_the_new_token_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No work grows with the context: neither the prompt nor the output is read again."""
    added, whole = list[int](), list[int]()
    add = TokenCounts.add

    def noted(self: TokenCounts, token: int) -> None:
        added.append(token)
        add(self, token)

    monkeypatch.setattr(TokenCounts, "add", noted)
    unique = np.unique

    def noted_unique(tokens: object, **named: object) -> object:
        whole.append(len(tokens))
        return unique(tokens, **named)

    monkeypatch.setattr(np, "unique", noted_unique)
    output = [1, 2, 3]
    text = Text(PromptTokens(list(range(40))), output)
    text.until(3).counts()
    assert sorted(whole) == [3, 40] and added == []
    for token in range(5):
        output.append(token)
        penalised(text.until(len(output)))
    assert len(whole) == 2 and added == [0, 1, 2, 3, 4]


def test_a_whole_text_is_divided_at_its_boundary() -> None:
    history = history_of([5, 6, 7, 7], 2)
    assert list(history) == [5, 6, 7, 7] and history.prompt_tokens == 2
    assert history.counts().tokens.tolist() == [7] and history.counts().fresh.tolist() == [7]


@pytest.mark.parametrize("seed", range(20))
def test_rejected_proposals_are_not_counted(seed: int) -> None:
    """Each step counts what is known and then its proposals, row by row; some are accepted."""
    dice = random.Random(seed)
    prompt, output = [dice.randrange(8) for _ in range(10)], list[int]()
    text = Text(PromptTokens(prompt), output)
    for _ in range(30):
        history = text.until(len(output))
        proposed = [dice.randrange(8) for _ in range(dice.randrange(5))]
        for row in range(len(proposed) + 1):
            found = penalised(history)
            torch.testing.assert_close(found, by_definition(prompt, [*output, *proposed[:row]]))
            if row < len(proposed):
                history = history.extended(proposed[row])
        accepted = dice.randrange(len(proposed) + 1)
        output += [*proposed[:accepted], dice.randrange(8)]


def test_counting_proposals_costs_no_more_than_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list[int]()
    unique = np.unique

    def noted_unique(tokens: object, **named: object) -> object:
        whole.append(len(tokens))
        return unique(tokens, **named)

    monkeypatch.setattr(np, "unique", noted_unique)
    output = list(range(30))
    text = Text(PromptTokens([1]), output)
    for token in range(5):
        history = text.until(len(output))
        for proposal in (3, 99, 4):
            history.counts()
            history = history.extended(proposal)
        output += [3, token]
    assert len(whole) == 2  # the prompt and the output, once
