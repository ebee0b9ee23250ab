"""Who draws what in an eager step on a device. The kernel itself is held by triton_parity."""

import pytest
import torch

from baton.engine import device_draws
from baton.engine.batch import Draw, SamplingParams, Slice, StepBatch
from baton.engine.device_draws import draw_on_device
from baton.engine.draw_plan import plan_draws
from baton.engine.step_layout import Bounds, lay_out

VOCAB = 50
GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=0.8, seed=3)
BIASED = SamplingParams(temperature=0.0, logit_bias=((7, 100.0),))
TOLD = SamplingParams(temperature=0.0, top_logprobs=2)


@pytest.fixture
def drawn_there(monkeypatch):
    """Rows that the device was given, and at which positions; its draw is the lowest logit."""
    seen = []

    def draw(logits, rules, tokens, finite):
        seen.append((logits.clone(), rules.position.tolist()))
        tokens.copy_(logits.argmin(dim=-1))

    monkeypatch.setattr(device_draws, "draw_tokens", draw)
    return seen


def plan(*params):
    slices = tuple(
        Slice([1], at, [at], tuple(Draw(choice, at + 1, p) for choice, p in enumerate(each)))
        for at, each in enumerate(params)
    )
    batch = StepBatch(slices)
    return plan_draws(batch, lay_out(batch, Bounds(9, 8, VOCAB, 100)), VOCAB)


def test_what_rules_say_is_drawn_there_the_rest_here(drawn_there):
    logits = torch.randn(3, VOCAB)
    drawn = draw_on_device(logits.clone(), plan((GREEDY,), (BIASED,), (RANDOM,)))
    assert [each.token for each in drawn] == [int(logits[0].argmin()), 7, int(logits[2].argmin())]
    ((rows, positions),) = drawn_there
    assert torch.equal(rows, logits[[0, 2]]) and positions == [1, 3]


def test_the_choices_of_a_slice_share_its_logits(drawn_there):
    logits = torch.randn(2, VOCAB)
    drawn = draw_on_device(logits, plan((RANDOM, RANDOM), (GREEDY,)))
    assert [each.choice for each in drawn] == [0, 1, 0]
    assert torch.equal(drawn_there[0][0], logits[[0, 0, 1]])
    assert drawn[0].token == drawn[1].token == int(logits[0].argmin())


def test_logprobs_are_the_hosts(drawn_there):
    logits = torch.randn(1, VOCAB)
    (drawn,) = draw_on_device(logits.clone(), plan((TOLD,)))
    assert drawn.token == int(logits.argmax()) and drawn.logprob is not None
    assert len(drawn.top) == 2 and drawn_there == []
