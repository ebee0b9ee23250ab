"""Routing against its definition, row by row; the grouped products against one row at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional

from baton.engine.cpu.linear import CpuMatrix
from baton.engine.model.experts import ExpertWeights, ListedExperts, mix, route
from baton.engine.spec.moe_spec import ExpertsSpec

HIDDEN, FFN, SHARED = 24, 16, 40


def swiglu(x):
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def spec_of(count=8, chosen=2, **how):
    return ExpertsSpec((True,), count, chosen, FFN, **how)


def plain_matrices(spec):
    torch.manual_seed(3)
    gate_up = torch.randn(spec.count, 2 * FFN, HIDDEN) * 0.3
    down = torch.randn(spec.count, HIDDEN, FFN) * 0.3
    return torch.randn(spec.count, HIDDEN), gate_up, down


def weights_of(spec, dtype=torch.float32, shared=False):
    gate, gate_up, down = plain_matrices(spec)
    both = (torch.randn(2 * SHARED, HIDDEN), torch.randn(HIDDEN, SHARED))
    return ExpertWeights(
        gate=CpuMatrix(gate),
        correction=None,
        experts=ListedExperts(
            tuple(CpuMatrix(matrix.to(dtype)) for matrix in gate_up),
            tuple(CpuMatrix(matrix.to(dtype)) for matrix in down),
        ),
        shared=tuple(CpuMatrix(matrix.to(dtype)) for matrix in both) if shared else None,
    )


def by_row(logits, spec, correction=None):
    """The definition for one row, in Python's own numbers: {expert: weight}."""
    if spec.scoring == "sigmoid":
        scores = [1 / (1 + 2.718281828459045**-x) for x in logits]
    else:
        total = sum(2.718281828459045**x for x in logits)
        scores = [2.718281828459045**x / total for x in logits]
    ranks = [s + (correction[i] if correction else 0) for i, s in enumerate(scores)]
    members = spec.count // spec.groups
    groups = [range(g * members, (g + 1) * members) for g in range(spec.groups)]
    groups.sort(key=lambda g: -sum(sorted(ranks[e] for e in g)[-spec.group_best :]))
    allowed = [expert for group in groups[: spec.chosen_groups] for expert in group]
    best = sorted(allowed, key=lambda expert: -ranks[expert])[: spec.chosen]
    total = sum(scores[e] for e in best) if spec.normalise else 1
    return {e: scores[e] / total * spec.scale for e in best}


ROUTINGS = {
    "softmax": spec_of(),
    "mixtral": spec_of(normalise=True),
    "one of many": spec_of(64, 1),
    "all": spec_of(4, 4, normalise=True),
    "scaled": spec_of(scale=16.0),
    "best group of each": spec_of(12, 3, groups=4, chosen_groups=2),
    "v3": spec_of(
        16,
        3,
        scoring="sigmoid",
        normalise=True,
        scale=2.5,
        correction=True,
        groups=4,
        chosen_groups=2,
        group_best=2,
    ),
    "sigmoid alone": spec_of(scoring="sigmoid", correction=True),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_is_its_definition(name: str) -> None:
    spec = ROUTINGS[name]
    torch.manual_seed(5)
    logits = torch.randn(50, spec.count) * 2
    correction = torch.randn(spec.count) * 0.5 if spec.correction else None
    chosen, weights = route(logits, spec, correction)
    assert chosen.shape == weights.shape == (50, spec.chosen)
    assert chosen.dtype == torch.int64
    for row in range(50):
        extra = correction.tolist() if correction is not None else None
        expected = by_row(logits[row].tolist(), spec, extra)
        found = dict(zip(chosen[row].tolist(), weights[row].tolist(), strict=True))
        assert found == pytest.approx(expected, rel=1e-5)


def test_correction_changes_the_choice_but_not_the_weights() -> None:
    spec = spec_of(4, 1, scoring="sigmoid", correction=True)
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    chosen, weights = route(logits, spec, torch.tensor([0.0, 0.0, 0.0, 5.0]))
    assert chosen.tolist() == [[3]]
    assert weights[0, 0].item() == pytest.approx(torch.tensor(-1.0).sigmoid().item())


def test_groups_exclude_the_best_expert_of_a_poor_group() -> None:
    spec = spec_of(6, 2, scoring="sigmoid", groups=2, chosen_groups=1, group_best=2)
    logits = torch.tensor([[9.0, -9.0, -9.0, 1.0, 1.5, -9.0]])
    assert sorted(route(logits, spec)[0][0].tolist()) == [3, 4]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_mix_is_the_weighted_sum_of_the_chosen(rows: int, shared: bool) -> None:
    spec = spec_of(normalise=True, scale=1.5)
    weights = weights_of(spec, shared=shared)
    gate, gate_up, down = plain_matrices(spec)
    x = torch.randn(rows, HIDDEN)
    chosen, shares = route(x @ gate.T, spec)
    out = mix(x, weights, spec, swiglu)
    assert out.dtype == x.dtype
    for row in range(rows):
        expected = torch.zeros(HIDDEN)
        for expert, share in zip(chosen[row].tolist(), shares[row], strict=True):
            expected += share * (down[expert] @ swiglu(gate_up[expert] @ x[row]))
        if shared:
            one, two = weights.shared
            expected += two(swiglu(one(x[row : row + 1])))[0]
        torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-5)


def test_mix_in_bfloat16_is_close_to_float32() -> None:
    spec = spec_of(normalise=True)
    x = torch.randn(40, HIDDEN).bfloat16()
    out = mix(x, weights_of(spec, torch.bfloat16), spec, swiglu)
    assert out.dtype == torch.bfloat16
    exact = mix(x.float(), weights_of(spec), spec, swiglu)
    torch.testing.assert_close(out.float(), exact, rtol=0.05, atol=0.02 * exact.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    spec = spec_of(normalise=True)
    weights = weights_of(spec, dtype)
    x = torch.randn(30, HIDDEN).to(dtype)
    together = mix(x, weights, spec, swiglu)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
    for rows in (slice(3, 4), slice(5, 12)):
        torch.testing.assert_close(mix(x[rows], weights, spec, swiglu), together[rows], **tolerance)


def test_a_row_that_is_not_finite_harms_no_other() -> None:
    spec = spec_of(normalise=True)
    weights = weights_of(spec)
    x = torch.randn(6, HIDDEN)
    before = mix(x, weights, spec, swiglu)
    x[2] = float("nan")
    after = mix(x, weights, spec, swiglu)
    kept = [0, 1, 3, 4, 5]
    assert not after[2].isfinite().any()
    torch.testing.assert_close(after[kept], before[kept])


def test_every_expert_runs_once_and_idle_ones_not_at_all() -> None:
    calls = []

    class Spy:
        def __init__(self, expert):
            self.expert = expert

        def __call__(self, x):
            calls.append((self.expert, len(x)))
            return torch.cat((x, x), dim=-1)

    listed = ListedExperts(tuple(Spy(expert) for expert in range(4)), (lambda x: x,) * 4)
    x = torch.randn(5, HIDDEN)
    chosen = torch.tensor([[2, 0], [0, 2], [2, 3], [3, 2], [2, 0]])
    out, order = listed.run(x, chosen, lambda pair: pair.chunk(2, dim=-1)[0])
    assert calls == [(0, 3), (2, 5), (3, 2)]
    assert chosen.flatten()[order].tolist() == [0] * 3 + [2] * 5 + [3] * 2
    assert torch.equal(out, x[order // 2])


@pytest.mark.parametrize("name", ["sigmoid alone", "v3", "softmax"])
def test_the_bits_of_a_row_do_not_depend_on_the_others(name: str) -> None:
    spec = ROUTINGS[name]
    correction = torch.zeros(spec.count) if spec.correction else None
    logits = torch.randn(1501, spec.count) * 2
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        chosen, weights = route(logits, spec, correction)
    finally:
        torch.set_num_threads(before)
    for first in range(0, 1501, 7):
        rows = slice(first, first + 7)
        some, shares = route(logits[rows], spec, correction)
        assert torch.equal(some, chosen[rows])
        assert torch.equal(shares, weights[rows])


@pytest.mark.parametrize("rows", [1, 9])
def test_parts_of_the_experts_add_up_to_the_mixture(rows: int) -> None:
    spec = spec_of(chosen=3)
    weights = weights_of(spec)
    x = torch.randn(rows, HIDDEN)
    parts = [
        mix(x, replace(weights, experts=part_of(weights.experts, held)), spec, swiglu)
        for held in (range(5), range(5, 8))
    ]
    torch.testing.assert_close(sum(parts), mix(x, weights, spec, swiglu))


def part_of(experts, held):
    kept = slice(held.start, held.stop)
    return ListedExperts(experts.gate_up[kept], experts.down[kept], held.start)


def test_a_row_without_experts_here_is_zero_and_runs_nothing() -> None:
    weights = weights_of(spec_of())
    part = part_of(weights.experts, range(2, 4))
    chosen = torch.tensor([[0, 1], [3, 7]])
    out, order = part.run(torch.full((2, HIDDEN), 2.0), chosen, swiglu)
    assert order[0] == 2 and not out[1:].any() and out[0].any()  # expert 3, of row 1
    nothing, _ = part.run(torch.full((1, HIDDEN), float("inf")), chosen[:1], swiglu)
    assert nothing.shape == (2, HIDDEN) and not nothing.any()


def test_a_rows_part_does_not_depend_on_other_rows() -> None:
    spec = spec_of(chosen=4)
    weights = weights_of(spec)
    half = replace(weights, experts=part_of(weights.experts, range(4)))
    x = torch.randn(7, HIDDEN)
    together = mix(x, half, spec, swiglu)
    for row in range(7):
        alone = mix(x[row : row + 1], half, spec, swiglu)
        torch.testing.assert_close(alone, together[row : row + 1])
