"""Rules held against transformers' logits processors; draws against the distribution."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import ModuleType

import pytest
import torch

import baton.engine.sampling.sampling as sampling
from baton.engine.sampling.noise import gumbel, noise_bits, stream_key
from baton.engine.sampling.sampling import adjust, sample, truncate
from baton.engine.scheduling.batch import Draw
from baton.engine.scheduling.token_history import history_of
from baton.runtime.sampling import SamplingParams

PLAIN = SamplingParams(temperature=1.0)
GREEDY = SamplingParams(temperature=0.0)
VOCAB = 2500


@pytest.fixture(scope="module")
def processors() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.generation import logits_process
    return logits_process


@pytest.fixture
def logits() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(4, VOCAB, generator=generator) * 3


def kept(logits, params):
    return truncate(logits.clone(), [params] * len(logits)) > -torch.inf


@pytest.mark.parametrize("k", [1, 2, 50, 2499, 2500, 9999])
def test_top_k_as_transformers(processors: ModuleType, logits: torch.Tensor, k: int) -> None:
    expected = processors.TopKLogitsWarper(k)(None, logits.clone()) > -torch.inf
    assert torch.equal(kept(logits, replace(PLAIN, top_k=k)), expected)


@pytest.mark.parametrize("p", [0.01, 0.3, 0.9, 0.99])
def test_top_p_as_transformers(processors: ModuleType, logits: torch.Tensor, p: float) -> None:
    expected = processors.TopPLogitsWarper(p)(None, logits.clone()) > -torch.inf
    assert torch.equal(kept(logits, replace(PLAIN, top_p=p)), expected)


@pytest.mark.parametrize("p", [0.999, 0.99999])
def test_top_p_near_one_by_exact_sums(logits: torch.Tensor, p: float) -> None:
    """Here transformers' own single-precision sums are a few tokens off."""
    values, order = logits.double().softmax(dim=-1).sort(dim=-1, descending=True)
    keep = values.cumsum(dim=-1) - values < p
    expected = torch.zeros_like(keep).scatter(1, order, keep)
    assert (kept(logits, replace(PLAIN, top_p=p)) != expected).sum() <= 1


def test_top_p_where_the_first_candidates_hold_too_little(processors: ModuleType) -> None:
    flat = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1)) * 0.01
    expected = processors.TopPLogitsWarper(0.9)(None, flat.clone()) > -torch.inf
    found = kept(flat, replace(PLAIN, top_p=0.9))
    assert (found != expected).sum() <= 2  # rounding of two thousand summed terms
    assert found.sum() > 4000


@pytest.mark.parametrize("p", [0.001, 0.05, 0.5, 1.0])
def test_min_p_as_transformers(processors: ModuleType, logits: torch.Tensor, p: float) -> None:
    expected = processors.MinPLogitsWarper(p)(None, logits.clone()) > -torch.inf
    assert torch.equal(kept(logits, replace(PLAIN, min_p=p)), expected)


def test_all_rules_together_as_transformers(processors: ModuleType, logits: torch.Tensor) -> None:
    params = SamplingParams(temperature=0.7, top_k=40, top_p=0.8, min_p=0.02)
    expected = processors.TemperatureLogitsWarper(0.7)(None, logits.clone())
    for rule in (
        processors.TopKLogitsWarper(40),
        processors.TopPLogitsWarper(0.8),
        processors.MinPLogitsWarper(0.02),
    ):
        expected = rule(None, expected)
    torch.testing.assert_close(truncate(logits.clone(), [params] * 4), expected)


def test_rules_are_per_row(logits: torch.Tensor) -> None:
    rules = [replace(PLAIN, top_k=3), PLAIN, replace(PLAIN, top_p=0.5), replace(PLAIN, min_p=0.3)]
    together = truncate(logits.clone(), rules)
    for row, params in enumerate(rules):
        alone = truncate(logits[row : row + 1].clone(), [params])
        torch.testing.assert_close(together[row : row + 1], alone)
    assert (together > -torch.inf).sum(dim=-1).tolist()[:2] == [3, VOCAB]


def test_ties_at_the_edge_all_stay() -> None:
    tied = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert kept(tied, replace(PLAIN, top_k=2)).tolist() == [[False, True, True, True, False]]


def test_top_p_of_nearly_nothing_keeps_the_best(logits: torch.Tensor) -> None:
    found = kept(logits, replace(PLAIN, top_p=1e-9))
    assert torch.equal(found.int().argmax(dim=-1), logits.argmax(dim=-1))
    assert found.sum(dim=-1).tolist() == [1, 1, 1, 1]


def test_repetition_penalty_as_transformers(processors: ModuleType, logits: torch.Tensor) -> None:
    history = [5, 9, 5, 2000, 17]
    rule = processors.RepetitionPenaltyLogitsProcessor(1.4)
    expected = rule(torch.tensor([history] * 4), logits.clone())
    params = replace(GREEDY, repetition_penalty=1.4)
    adjust(logits, [Draw(0, 5, params, history_of(history, 2))] * 4)
    torch.testing.assert_close(logits, expected)


def test_frequency_and_presence_count_the_output_alone(logits: torch.Tensor) -> None:
    before = logits.clone()
    params = replace(GREEDY, frequency_penalty=0.5, presence_penalty=0.25)
    adjust(logits, [Draw(0, 6, params, history_of([1, 1, 7, 8, 8, 9], 3))] * 4)
    expected = before.clone()
    expected[:, 8] -= 0.5 * 2 + 0.25
    expected[:, 9] -= 0.5 * 1 + 0.25
    torch.testing.assert_close(logits, expected)


def test_penalties_without_output_yet(logits: torch.Tensor) -> None:
    before = logits.clone()
    params = replace(GREEDY, frequency_penalty=0.5, presence_penalty=0.25)
    adjust(logits, [Draw(0, 3, params, history_of([1, 1, 7], 3))] * 4)
    assert torch.equal(logits, before)


def test_logit_bias_decides(logits: torch.Tensor) -> None:
    params = replace(GREEDY, logit_bias=((77, 100.0), (78, -100.0)))
    assert [drawn.token for drawn in sample(logits, [Draw(0, 1, params)] * 4)] == [77] * 4


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(2, 50)
    logits[:, [13, 14, 40]] = 1.0
    assert [drawn.token for drawn in sample(logits, [Draw(0, 1, GREEDY)] * 2)] == [13, 13]


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-6])
def test_next_to_no_temperature_is_greedy(logits: torch.Tensor, temperature: float) -> None:
    best = logits.argmax(dim=-1).tolist()
    params = replace(PLAIN, temperature=temperature, seed=9)
    assert [drawn.token for drawn in sample(logits, [Draw(0, 1, params)] * 4)] == best


def test_no_draws() -> None:
    assert sample(torch.zeros(0, 10), []) == []


def test_a_draw_does_not_depend_on_slot_or_batch(logits: torch.Tensor) -> None:
    params = [
        replace(PLAIN, seed=1, top_p=0.9),
        replace(PLAIN, seed=2),
        replace(GREEDY, top_logprobs=2),
        replace(PLAIN, seed=4, top_k=9, temperature=1.7),
    ]
    draws = [Draw(row, 40 + row, each) for row, each in enumerate(params)]
    together = sample(logits.clone(), draws)
    backwards = sample(logits.flip(0), draws[::-1])[::-1]
    alone = [sample(logits[row : row + 1].clone(), [draw])[0] for row, draw in enumerate(draws)]
    assert [drawn.token for drawn in together] == [drawn.token for drawn in backwards]
    assert [drawn.token for drawn in together] == [drawn.token for drawn in alone]
    assert [drawn.choice for drawn in together] == [0, 1, 2, 3]


def test_seed_choice_and_position_each_matter(logits: torch.Tensor) -> None:
    row = logits[:1] * 0.1
    bases = [(7, 0, 5), (8, 0, 5), (7, 1, 5), (7, 0, 6)]
    found = [
        sample(row.clone(), [Draw(choice, position, replace(PLAIN, seed=seed))])[0].token
        for seed, choice, position in bases
    ]
    assert len(set(found)) == 4


def test_rounding_of_logits_rarely_changes_a_draw(logits: torch.Tensor) -> None:
    draws = [Draw(0, position, replace(PLAIN, seed=3)) for position in range(500)]
    rows = logits[:1].expand(500, -1)
    noisy = rows + torch.randn(rows.shape, generator=torch.Generator().manual_seed(5)) * 1e-5
    one = [drawn.token for drawn in sample(rows.clone(), draws)]
    two = [drawn.token for drawn in sample(noisy, draws)]
    assert sum(a != b for a, b in zip(one, two, strict=True)) <= 1
    assert len(set(one)) > 20


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    draws = [Draw(0, position, replace(PLAIN, seed=11)) for position in range(20_000)]
    rows = probabilities.log().expand(20_000, -1).clone()
    counts = torch.bincount(torch.tensor([drawn.token for drawn in sample(rows, draws)]))
    torch.testing.assert_close(counts / 20_000, probabilities, rtol=0, atol=0.012)


def test_the_bound_never_hides_the_winner(logits: torch.Tensor) -> None:
    """The draw is the highest sum over all tokens, as if noise were made for each."""
    for position in range(200):
        row = logits[position % 4] * (0.05 + position / 100)
        key = stream_key(6, 1, position)
        sums = row.double() + gumbel(noise_bits(key, torch.arange(VOCAB)))
        draw = Draw(1, position, replace(PLAIN, seed=6))
        assert sample(row[None].clone(), [draw])[0].token == sums.argmax().item()


def by_itself(kept, draw):
    """The token that one row draws: its noise alone, made for every token."""
    key = stream_key(draw.params.seed, draw.choice, draw.position)
    return (kept.double() + gumbel(noise_bits(key, torch.arange(len(kept))))).argmax().item()


@pytest.mark.parametrize("at_once", [1, 3000, 1 << 30])
def test_rows_drawn_together_draw_what_each_draws_by_itself(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Whole vocabularies, a few tokens and one; rows in many groups and in one."""
    monkeypatch.setattr(sampling, "_DRAW_LOGITS", at_once)
    rules = [
        PLAIN,
        replace(PLAIN, temperature=0.7, top_k=40),
        replace(PLAIN, temperature=3.0, top_p=0.95),
        replace(PLAIN, top_k=1),
        replace(PLAIN, temperature=1.3, min_p=0.05),
    ]
    logits = torch.randn(300, VOCAB, generator=torch.Generator().manual_seed(8)) * 2
    draws = [
        Draw(row % 4, 3 * row, replace(rules[row % len(rules)], seed=2**63 + row))
        for row in range(len(logits))
    ]
    rows = truncate(logits.clone(), [draw.params for draw in draws])
    expected = [by_itself(kept, draw) for kept, draw in zip(rows, draws, strict=True)]
    assert [drawn.token for drawn in sample(logits, draws)] == expected
    assert len(set(expected)) > 100


def test_of_equal_sums_the_lowest_token_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "gumbel", lambda bits: torch.zeros(bits.shape).double())
    monkeypatch.setattr(sampling, "gumbel_bound", lambda bits: torch.ones(bits.shape))
    logits = torch.zeros(4, 50)
    logits[[1, 3], 7:] = 2.0
    draws = [Draw(0, row, replace(PLAIN, top_k=40 * (row > 1))) for row in range(4)]
    assert [drawn.token for drawn in sample(logits, draws)] == [0, 7, 0, 7]


def test_truncated_tokens_are_never_drawn(logits: torch.Tensor) -> None:
    draws = [Draw(0, position, replace(PLAIN, top_k=5, seed=2)) for position in range(300)]
    best = set(logits[0].topk(5).indices.tolist())
    rows = logits[:1].expand(300, -1).clone()
    assert {drawn.token for drawn in sample(rows, draws)} <= best


def test_logprobs_are_before_temperature_and_truncation(logits: torch.Tensor) -> None:
    params = SamplingParams(temperature=0.3, top_k=1, top_logprobs=3, logit_bias=((4, 2.0),))
    biased = logits[0].clone()
    biased[4] += 2.0
    expected = biased.log_softmax(dim=-1)
    (drawn,) = sample(logits[:1], [Draw(0, 1, params)])
    assert drawn.logprob == pytest.approx(expected[drawn.token].item(), abs=1e-5)
    values, ids = expected.topk(3)
    assert [token for token, _ in drawn.top] == ids.tolist()
    assert [value for _, value in drawn.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_only_where_asked(logits: torch.Tensor) -> None:
    asked = [None, 0, 2, 5]
    draws = [Draw(0, 1, replace(GREEDY, top_logprobs=count)) for count in asked]
    found = sample(logits, draws)
    assert [drawn.logprob is None for drawn in found] == [True, False, False, False]
    assert [len(drawn.top) for drawn in found] == [0, 0, 2, 5]


def test_more_logprobs_than_tokens() -> None:
    (drawn,) = sample(torch.zeros(1, 3), [Draw(0, 1, replace(GREEDY, top_logprobs=20))])
    assert len(drawn.top) == 3
