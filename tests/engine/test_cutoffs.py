"""Top-k, top-p and min-p held against their definitions, in torch and compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from baton.engine.cpu_draws.sampling_numba import compiled_draw, draw_and_cut
from baton.engine.sampling.noise import gumbel, noise_bits, stream_key
from baton.engine.sampling.sampling import torch_draw, truncate
from baton.engine.scheduling.batch import Draw
from baton.runtime.sampling import SamplingParams

BACKENDS = ["torch", "compiled"]
ROUNDING = 2e-6  # of float32 weights, summed in float64
RULES = [
    SamplingParams(top_k=1),
    SamplingParams(top_k=40, temperature=0.7),
    SamplingParams(top_k=100_000, temperature=1.9),
    SamplingParams(top_p=0.0),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_p=0.5, temperature=0.3),
    SamplingParams(top_p=0.95),
    SamplingParams(top_p=0.9999, temperature=2.0),
    SamplingParams(top_p=1 - 1e-12, temperature=2.0),
    SamplingParams(min_p=0.05),
    SamplingParams(min_p=1.0, temperature=1.4),
    SamplingParams(top_k=50, top_p=0.8, min_p=0.02, temperature=0.9),
    SamplingParams(top_k=3000, top_p=0.9999, temperature=2.0),
    SamplingParams(temperature=1.1),
]


def distributions():
    """Logits [vocab] by name: what clients meet, and what would be slow or wrong."""
    generator = torch.Generator().manual_seed(17)
    found = {
        f"random {vocab} by {spread}": torch.randn(vocab, generator=generator) * spread
        for vocab in (1, 2, 5, 2047, 2048, 2049, 5000)
        for spread in (0.01, 3.0, 40.0)
    }
    one = torch.tensor(1.0)
    found |= {
        "all equal": torch.full((4100,), -7.25),
        "all zero of both signs": torch.tensor([0.0, -0.0]).repeat(1500),
        "two values": torch.tensor([2.0, -1.0]).repeat(1500),
        "ties at every edge": torch.arange(3000).div(100, rounding_mode="floor").float(),
        "neighbours of one": torch.nextafter(one, 2 * one)
        .repeat(2000)
        .index_fill(0, torch.arange(0, 2000, 3), 1.0),
        "one far above": torch.zeros(3000).index_fill(0, torch.tensor([1234]), 9e4),
        "nearly all excluded": torch.full((3000,), -torch.inf).index_fill(
            0, torch.tensor([7, 2222]), 1.5
        ),
        "a line": torch.linspace(-20, 20, 6000),
        "tiny": torch.randn(3000, generator=generator) * 1e-38,
        "huge": torch.randn(3000, generator=generator) * 1e30,
    }
    return found


def cut(backend, logits, params):
    """The lowest logit over temperature that is kept."""
    if backend == "torch":
        kept = truncate(logits[None].clone(), [params])[0]
        return kept[kept > -torch.inf].min().item()
    found = draw_and_cut(logits[None], [Draw(0, 1, params)])[1].item()
    scaled = logits * torch.tensor(1 / params.temperature)
    return scaled[scaled >= found].min().item()


def judge(scaled, lowest, params):
    """What is wrong with keeping float32 `scaled` [vocab] down to `lowest`; empty if nothing is.
    By the definitions: sorted, in float64."""
    ordered = scaled.double().sort(descending=True).values
    floor = -torch.inf
    if 0 < params.top_k < len(scaled):
        floor = ordered[params.top_k - 1].item()
    if params.top_p < 1.0:
        among = ordered[ordered >= floor]
        weights = (among - among[0]).exp()
        goal = params.top_p * weights.sum()
        above, held = weights[among > lowest].sum(), weights[among >= lowest].sum()
        if not params.min_p and above >= goal * (1 + ROUNDING) and above > 0:
            return f"{above} of {goal} wanted lie above what was kept last"
        if not params.min_p and held < goal * (1 - ROUNDING):
            return f"what is kept holds {held}, less than {goal}"
    elif not params.min_p and lowest != (floor if floor > -torch.inf else ordered.min().item()):
        return f"{lowest} is kept, and the lowest to keep is {floor}"
    if lowest < floor:
        return f"{lowest} is kept, top-k ends at {floor}"
    if params.min_p:
        edge = ordered[0] + torch.tensor(params.min_p).log()
        if lowest < edge - ROUNDING * max(1.0, abs(edge)):
            return f"{lowest} is kept, min-p ends at {edge}"
    return ""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("params", RULES, ids=str)
def test_cutoffs_are_those_of_the_definitions(backend: str, params: SamplingParams) -> None:
    for name, logits in distributions().items():
        scaled = logits * torch.tensor(1 / params.temperature)
        if not scaled.sum().isfinite() and name != "nearly all excluded":
            continue
        if name == "nearly all excluded" and not (params.top_p < 1 or params.min_p):
            continue
        wrong = judge(scaled, cut(backend, logits, params), params)
        assert not wrong, f"{name}: {wrong}"


@pytest.mark.parametrize("params", RULES, ids=str)
def test_both_backends_cut_alike(params: SamplingParams) -> None:
    for name, logits in distributions().items():
        scaled = logits * torch.tensor(1 / params.temperature)
        if not scaled.sum().isfinite():
            continue
        one, two = (int((scaled >= cut(each, logits, params)).sum()) for each in BACKENDS)
        assert abs(one - two) <= 1 + len(set(logits.tolist())) * 0.001, name


def test_compiled_draws_are_the_highest_sums() -> None:
    """Every draw is the best sum of logit and noise among what is kept, noise made for all."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(len(RULES) * 30, 4500, generator=generator) * 2
    draws = [
        Draw(row % 3, (1 << 40) + row, replace(RULES[row % len(RULES)], seed=2**64 - 1 - row))
        for row in range(len(logits))
    ]
    tokens, cutoffs = draw_and_cut(logits, draws)
    for row, draw in enumerate(draws):
        scaled = logits[row] * torch.tensor(1 / draw.params.temperature)
        noise = gumbel(
            noise_bits(stream_key(draw.params.seed, draw.choice, draw.position), torch.arange(4500))
        )
        sums = torch.where(scaled >= cutoffs[row], scaled.double() + noise, -torch.inf)
        assert tokens[row] == sums.argmax(), RULES[row % len(RULES)]
    together = torch_draw(logits, draws)
    assert (together != tokens).sum() <= 1  # a near tie, at most


def test_a_compiled_draw_depends_on_its_row_alone() -> None:
    """Bit for bit: any batch, any slot, any number of threads."""
    logits = torch.randn(len(RULES), 3000, generator=torch.Generator().manual_seed(5)) * 3
    draws = [Draw(0, row, replace(each, seed=row)) for row, each in enumerate(RULES)]
    tokens, cutoffs = draw_and_cut(logits, draws)
    for row in range(len(draws)):
        alone = draw_and_cut(logits[row : row + 1], [draws[row]])
        assert alone[0][0] == tokens[row] and torch.equal(alone[1][0], cutoffs[row])
    order = torch.randperm(len(draws), generator=torch.Generator().manual_seed(6))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        mixed = draw_and_cut(logits[order], [draws[row] for row in order])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(mixed[0], tokens[order]) and torch.equal(mixed[1], cutoffs[order])


@pytest.mark.parametrize("draw", [torch_draw, compiled_draw], ids=BACKENDS)
def test_equal_logits_are_drawn_evenly(draw: Callable[..., torch.Tensor]) -> None:
    logits = torch.zeros(1000, 8)
    draws = [Draw(0, at, SamplingParams(top_k=3, top_p=0.99, seed=1)) for at in range(1000)]
    counts = torch.bincount(draw(logits, draws), minlength=8)
    assert counts.sum() == 1000 and counts.min() > 80
