"""The draws of an eager step on a device: what its kernels are given, and what becomes of it."""

from __future__ import annotations

import math

import pytest
import torch

from baton.engine.execution import device_kernels
from baton.engine.execution.device_kernels import sample_on_device
from baton.engine.model.step_layout import Bounds, lay_out
from baton.engine.sampling.draw_plan import plan_draws
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.engine.scheduling.token_history import history_of
from baton.runtime.sampling import SamplingParams
from tests.support import torch_kernels

VOCAB = 50
GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=0.8, seed=3)
BIASED = SamplingParams(temperature=0.0, logit_bias=((7, 100.0),))
LOGGED = SamplingParams(temperature=0.0, top_logprobs=2)
REPEATED = SamplingParams(temperature=0.0, frequency_penalty=2.0)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Positions that were drawn; a draw is the highest logit."""
    seen = []

    def draw(logits, rules, tokens, finite, masks):
        torch_kernels.mask(logits, masks)
        seen.append(rules.position.tolist())
        tokens.copy_(logits.argmax(dim=-1))

    monkeypatch.setattr(device_kernels, "draw_tokens", draw)
    monkeypatch.setattr(device_kernels, "adjust_logits", torch_kernels.adjust)
    monkeypatch.setattr(device_kernels, "find_logprobs", torch_kernels.find_logprobs)
    return seen


def plan(*params):
    slices = tuple(
        Slice(
            [1],
            at,
            [at],
            tuple(
                Draw(choice, at + 1, p, history_of([1, 2, 9, 9, 9], 2) if p.needs_history else None)
                for choice, p in enumerate(each)
            ),
        )
        for at, each in enumerate(params)
    )
    batch = StepBatch(slices)
    return plan_draws(batch, lay_out(batch, Bounds(9, 8, VOCAB, 100)), VOCAB)


def test_a_bias_changes_its_own_row_alone(kernels: list[list[int]]) -> None:
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    drawn = sample_on_device(logits, plan((GREEDY,), (BIASED,), (RANDOM,)))
    assert [each.token for each in drawn] == [int(before[0].argmax()), 7, int(before[2].argmax())]
    assert torch.equal(logits[[0, 2]], before[[0, 2]]) and kernels == [[1, 2, 3]]


def test_the_choices_of_a_slice_share_its_logits(kernels: list[list[int]]) -> None:
    logits = torch.randn(2, VOCAB)
    logits[0, 9] = logits[0].max() + 1
    drawn = sample_on_device(logits.clone(), plan((RANDOM, REPEATED), (GREEDY,)))
    assert [each.choice for each in drawn] == [0, 1, 0]
    assert drawn[0].token == 9 and drawn[1].token != 9  # the penalty is one choice's alone
    assert drawn[2].token == int(logits[1].argmax())


def test_logprobs_are_of_those_that_ask(kernels: list[list[int]]) -> None:
    logits = torch.randn(2, VOCAB)
    plain, drawn = sample_on_device(logits.clone(), plan((GREEDY,), (LOGGED,)))
    wanted = logits[1].log_softmax(-1).topk(2)
    assert plain.logprob is None and plain.top == ()
    assert drawn.logprob == pytest.approx(float(wanted.values[0]))
    assert [token for token, _ in drawn.top] == wanted.indices.tolist()


def test_more_best_tokens_than_the_model_has_are_all_of_them(kernels: list[list[int]]) -> None:
    asked = SamplingParams(temperature=0.0, top_logprobs=64)
    (drawn,) = sample_on_device(torch.randn(1, VOCAB), plan((asked,)))
    assert len(drawn.top) == VOCAB


def test_a_barred_token_has_no_probability(kernels: list[list[int]]) -> None:
    barred = SamplingParams(temperature=0.0, min_tokens=1, barred=(4,), top_logprobs=VOCAB).at(0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 9.0
    (drawn,) = sample_on_device(logits, plan((barred,)))
    assert drawn.token != 4 and drawn.top[-1] == (4, -math.inf)
