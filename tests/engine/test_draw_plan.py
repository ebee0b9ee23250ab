from __future__ import annotations

import pytest
import torch

from baton.engine.model.step_layout import Bounds, lay_out
from baton.engine.sampling.draw_plan import plan_draws
from baton.engine.scheduling.batch import Draw, Drawn, Slice, StepBatch
from baton.runtime.sampling import SamplingParams

BOUNDS = Bounds(blocks=20, block_size=4, vocab_size=50, max_context=30)
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.7, top_logprobs=2)
BIASED = SamplingParams(temperature=0.0, logit_bias=((49, 1.0),))
WRONG = SamplingParams(temperature=0.0, logit_bias=((3, 1.0), (50, 1.0)))


def planned(*slices):
    batch = StepBatch(slices)
    return plan_draws(batch, lay_out(batch, BOUNDS), BOUNDS.vocab_size)


def item(length, *params, start=0):
    draws = tuple(Draw(choice, start + length, p) for choice, p in enumerate(params))
    return Slice([1] * length, start, list(range(10)), draws)


def drawn(*tokens):
    return [Drawn(0, token) for token in tokens]


def test_rows_are_the_last_of_each_slice_that_draws() -> None:
    plan = planned(item(3, GREEDY), item(1, GREEDY), item(2), item(1, WARM, start=8))
    assert plan.drawing == [0, 1, 3]
    assert plan.rows.tolist() == [4, 0, 1]  # slices of one token come first
    assert plan.counts == [1, 1, 1]
    assert (plan.groups.adjusted, plan.groups.random, plan.groups.with_logprobs) == (
        [],
        [2],
        [2],
    )


def test_each_choice_has_a_copy_of_the_row() -> None:
    plan = planned(item(1, GREEDY), item(3, WARM, BIASED, GREEDY))
    logits = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    rows = plan.logit_rows(logits)
    assert rows.tolist() == [[1.0, 2.0]] + [[3.0, 4.0]] * 3
    rows[1].zero_()
    assert rows[2].tolist() == [3.0, 4.0]
    assert (plan.groups.adjusted, plan.groups.random) == ([2], [1])
    assert plan.by_slice(drawn(5, 6, 7, 8)) == (tuple(drawn(5)), tuple(drawn(6, 7, 8)))


def test_single_draws_need_no_copy() -> None:
    plan = planned(item(1, GREEDY), item(1, GREEDY))
    logits = torch.zeros(2, 3)
    assert plan.logit_rows(logits) is logits


def test_a_bias_on_an_unknown_token_refuses_its_slice_alone() -> None:
    plan = planned(item(1, GREEDY), item(1, GREEDY, WRONG), item(1, BIASED))
    assert plan.refused == {1}
    assert plan.drawing == [0, 2]
    assert plan.by_slice(drawn(4, 9)) == (tuple(drawn(4)), (), tuple(drawn(9)))


def test_slices_may_be_left_out_later() -> None:
    plan = planned(item(1, GREEDY), item(2, WARM, WARM), item(1), item(1, BIASED))
    assert plan.without({2}) is plan  # it draws nothing
    rest = plan.without({0, 1})
    assert (rest.drawing, rest.counts, len(rest.draws)) == ([3], [1], 1)
    assert rest.rows.tolist() == [2]
    assert rest.groups.adjusted == [0]
    assert rest.by_slice(drawn(8)) == ((), (), (), tuple(drawn(8)))


def test_nothing_to_draw() -> None:
    plan = planned(item(3), item(1))
    assert (plan.draws, plan.drawing, plan.refused) == ([], [], set())
    assert plan.by_slice([]) == ((), ())


def verifying(*proposals, start=0, params=GREEDY):
    draws = tuple(Draw(0, start + 1 + row, params) for row in range(len(proposals) + 1))
    tokens = [1, *proposals]
    return Slice(tokens, start, list(range(10)), draws, proposed=len(proposals))


def test_a_slice_that_verifies_draws_from_each_row() -> None:
    plan = planned(item(3, GREEDY), item(1, WARM, WARM), verifying(7, 8, start=4))
    assert plan.rows.tolist() == [6, 0, 1, 2, 3]
    assert (plan.drawing, plan.counts) == ([0, 1, 2, 2, 2], [1, 2, 1, 1, 1])
    found = plan.by_slice(drawn(1, 2, 3, 7, 9, 4))
    assert found == (tuple(drawn(1)), tuple(drawn(2, 3)), tuple(drawn(7, 9)))


@pytest.mark.parametrize(
    ("finite", "kept", "lost"),
    [
        ([False, True, True, True], [False, True, True, True], {0}),
        ([True, False, True, True], [True, False, False, False], {1}),
        ([True, True, False, True], [True, True, False, False], set()),
        ([True, True, True, False], [True, True, True, False], set()),
    ],
)
def test_a_non_finite_proposal_ends_the_rows_of_its_slice(
    finite: list[bool], kept: list[bool], lost: set[int]
) -> None:
    rest, rows, broken = planned(item(1, GREEDY), verifying(7, 8, start=4)).finite_rows(finite)
    assert (rows, broken) == (kept, lost)
    assert len(rest.draws) == sum(kept)
    assert rest.by_slice(drawn(*[7] * sum(kept)))[1] == tuple(drawn(*[7] * sum(kept[1:])))[:2]
