"""Masked rows: what is not admitted is never drawn, and has no part in logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from baton.engine.cpu_draws.sampling_numba import compiled_draw
from baton.engine.sampling.sampling import sample, torch_draw
from baton.engine.scheduling.batch import Draw, extended
from baton.runtime.sampling import SamplingParams

VOCAB = 1003
WAYS = {"torch": torch_draw, "compiled": compiled_draw}


@dataclass
class Allowed:
    """Admits `tokens`; `read` are those that it was extended by."""

    tokens: Sequence[int]
    bits: int = VOCAB
    read: tuple[int, ...] = ()

    def bitmask(self) -> bytes:
        found = np.zeros(self.bits, bool)
        found[list(self.tokens)] = True
        return np.packbits(found, bitorder="little").tobytes()

    def extended(self, tokens: Sequence[int]) -> Allowed:
        return Allowed(self.tokens, self.bits, (*self.read, *tokens))


def draw(params: SamplingParams, allowed: Allowed | None, position: int = 0) -> Draw:
    return Draw(0, position, params, None, allowed)


def logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(5)) * 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bits", [VOCAB, 1024, 960])
def test_only_masked_rows_change(way: str, bits: int) -> None:
    given, scored = logits(3), SamplingParams(temperature=0.0, top_logprobs=1)
    draws = [
        draw(scored, None),
        draw(scored, Allowed([0, 31, 32, 700], bits)),
        draw(scored, Allowed(range(min(bits, VOCAB)), bits)),
    ]
    found = given.clone()
    WAYS[way](found, draws)
    assert torch.equal(found[0], given[0])
    assert found[1].isfinite().nonzero()[:, 0].tolist() == [0, 31, 32, 700]
    assert found[2].isfinite().sum() == min(bits, VOCAB)


@pytest.mark.parametrize("vocab", [1, 7, 16, 23, 2048, 2049, 4111])
def test_a_compiled_mask_is_read_without_a_write(vocab: int) -> None:
    """Greedy and random rows, masked and not, of vectors, blocks and their ends."""
    dice = torch.Generator().manual_seed(vocab)
    given = torch.randn(12, vocab, generator=dice).round(decimals=1)  # with equals
    admitted = torch.rand(12, vocab, generator=dice) < 0.3
    admitted[:, -1] |= ~admitted.any(dim=-1)
    draws = [
        draw(
            SamplingParams(temperature=0.0 if row % 2 else 0.8, top_k=5),
            None if row % 3 == 2 else Allowed(admitted[row].nonzero()[:, 0].tolist(), vocab),
            row,
        )
        for row in range(12)
    ]
    found = given.clone()
    tokens = compiled_draw(found, draws)
    assert torch.equal(found, given)
    assert torch.equal(tokens, torch_draw(given.clone(), draws))


def test_highest_of_equals_is_the_first_that_is_admitted() -> None:
    given = torch.full((1, VOCAB), -torch.inf)
    given[0, [5, 900]] = torch.tensor([0.0, -0.0])
    greedy = SamplingParams(temperature=0.0)
    for tokens, wanted in (([5, 900], 5), ([900], 900), ([7, 900], 900), ([7, 8], 7), ([], 0)):
        found = compiled_draw(given.clone(), [draw(greedy, Allowed(tokens))])
        assert found.tolist() == [wanted]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.5),
        SamplingParams(temperature=1.5, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=2.0, min_p=0.2, top_k=900),
    ],
)
def test_a_masked_draw_is_that_of_the_admitted_logits(way: str, params: SamplingParams) -> None:
    admitted = [3, 40, 41, 500, 900, 1002]
    given = logits(40)
    draws = [draw(params, Allowed(admitted), index) for index in range(40)]
    barred = [(token, -1e9) for token in range(VOCAB) if token not in admitted]
    other = replace(params, logit_bias=tuple(barred))
    plain = [draw(other, None, index) for index in range(40)]
    masked = sample(given.clone(), draws, None, WAYS[way])
    wanted = sample(given.clone(), plain, None, WAYS[way])
    assert [found.token for found in masked] == [found.token for found in wanted]
    assert {found.token for found in masked} <= set(admitted)


@pytest.mark.parametrize("way", WAYS)
def test_logprobs_are_of_the_admitted_tokens(way: str) -> None:
    given = logits(1)
    asked = draw(SamplingParams(temperature=0.0, top_logprobs=3), Allowed([7, 8]))
    (found,) = sample(given.clone(), [asked], None, WAYS[way])
    two = given[0, [7, 8]].log_softmax(0)
    assert found.logprob == pytest.approx(float(two.max()), abs=1e-5)
    assert [value for _, value in found.top[:2]] == pytest.approx(sorted(two.tolist())[::-1])
    assert found.top[2][1] == -torch.inf


@pytest.mark.parametrize("way", WAYS)
def test_a_barred_token_is_drawn_if_the_grammar_admits_no_other(way: str) -> None:
    barred = SamplingParams(temperature=1.0, min_tokens=5, barred=(9,)).at(0)
    for position in range(20):
        (found,) = sample(logits(1), [draw(barred, Allowed([9]), position)], None, WAYS[way])
        assert found.token == 9
    (found,) = sample(logits(1), [draw(barred, Allowed([9, 12]))], None, WAYS[way])
    assert found.token == 12


def test_an_extended_draw_has_the_mask_after_its_tokens() -> None:
    made = extended(draw(SamplingParams(), Allowed([1])), (4, 5))
    assert isinstance(made.allowed, Allowed) and made.allowed.read == (4, 5)
