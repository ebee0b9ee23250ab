"""Log-probabilities of a prompt's tokens held against transformers, whole and in chunks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from baton.engine.sampling import prompt_scoring
from baton.engine.scheduling.batch import Scoring, Slice, StepBatch
from tests.support.model_story import ModelStory, greedy_slice, random_prompt
from tests.support.small_models import Reference

LENGTH, TOP = 90, 3


@pytest.fixture(params=["llama", "gemma2", "mixtral"])
def reference(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> Reference:
    return references(request.param)


def slices_of(tokens, blocks, ends):
    start = 0
    for end in ends:
        targets = tokens[start + 1 : end + 1]
        yield Slice(tokens[start:end], start, blocks, scoring=Scoring(targets, TOP))
        start = end


@pytest.mark.parametrize("ends", [[LENGTH], [1, 2, 17, 64, LENGTH]])
def test_scores_are_those_of_transformers(
    reference: Reference, ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_scoring, "_PART_LOGITS", 7 * 199)  # some rows at once
    reported, tokens = ModelStory(reference.folder), random_prompt(LENGTH)
    found = [
        reported.runner.run(StepBatch((piece,))).scores[0]
        for piece in slices_of(tokens, reported.blocks(LENGTH), ends)
    ]
    wanted = reference.logits(tokens)[:-1].log_softmax(dim=-1)
    own = wanted.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    ours = torch.tensor([value for part in found for value in part.logprobs])
    assert torch.allclose(ours, own, atol=1e-3)
    best = wanted.topk(TOP, dim=-1)
    tops = torch.tensor([value for part in found for value in part.top_logprobs])
    assert torch.allclose(tops.view(-1, TOP), best.values, atol=1e-3)
    ids = torch.tensor([token for part in found for token in part.top_tokens]).view(-1, TOP)
    assert (ids == best.indices).float().mean() > 0.95  # but where two are as good
    ranks = torch.tensor([rank for part in found for rank in part.ranks])
    theirs = 1 + (wanted > own[:, None]).sum(dim=-1)
    assert (ranks - theirs).abs().max() <= 1 and (ranks == theirs).float().mean() > 0.9


def test_scoring_changes_no_draw_beside_it(references: Callable[[str], Reference]) -> None:
    reference = references("llama")
    reported, tokens = ModelStory(reference.folder), random_prompt(40)
    plain = reported.draw(greedy_slice(tokens, 0, reported.blocks(40)))
    drawing = greedy_slice(tokens, 0, reported.blocks(40))
    scored = Slice(tokens, 0, reported.blocks(40), scoring=Scoring(tokens[1:], 0))
    result = reported.runner.run(StepBatch((scored, drawing)))
    assert [result.drawn[1][0].token] == plain
    assert set(result.scores) == {0} and len(result.scores[0].logprobs) == 39
    assert result.scores[0].top_tokens == []


def test_numbers_that_are_not_finite_are_no_scores(
    references: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = ModelStory(references("llama").folder)
    logits = reported.runner.decoder.logits
    monkeypatch.setattr(
        reported.runner.decoder, "logits", lambda rows: logits(rows).fill_(torch.inf)
    )
    tokens = random_prompt(20)
    scored = Slice(tokens, 0, reported.blocks(20), scoring=Scoring(tokens[1:], 0))
    result = reported.runner.run(StepBatch((scored,)))
    assert result.broken == {0} and not result.scores
