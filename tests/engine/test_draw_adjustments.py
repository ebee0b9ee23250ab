"""Penalties and biases of draws as lists."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine.sampling.draw_adjustments import FORBIDDEN_TOKEN_BIAS, Adjustments, max_entries
from baton.engine.scheduling.batch import Draw
from baton.engine.scheduling.token_history import PromptTokens, Text
from baton.runtime.sampling import SamplingParams

ALL = SamplingParams(
    repetition_penalty=1.5,
    frequency_penalty=0.25,
    presence_penalty=-0.5,
    logit_bias=((9, 1.5), (4, -1.0), (9, 0.25)),
)


def text(prompt, output):
    return Text(PromptTokens(prompt), output)


def lists(adjustments, row):
    ends = adjustments.bounds[:, row].tolist()
    return [
        list(
            zip(
                adjustments.tokens[first:end].tolist(),
                adjustments.amounts[first:end].tolist(),
                strict=True,
            )
        )
        for first, end in zip(ends, ends[1:], strict=False)
    ]


def test_lists_are_seen_counted_and_biased_tokens() -> None:
    draws = [None, Draw(0, 6, ALL, text([5, 7, 5], [8, 5, 8]).until(3)), Draw(0, 1, ALL)]
    found = Adjustments.of(draws)
    assert lists(found, 0) == [[], [], []]
    seen, counted, biased = lists(found, 1)
    assert [token for token, _ in seen] == [5, 7, 8]
    assert counted == [(5, 1.0), (8, 2.0)]
    assert biased == [(4, -1.0), (9, 1.75)]  # each token once
    assert lists(found, 2) == [[], [], biased]
    assert found.penalties.T.tolist() == [[1, 0, 0], [1.5, 0.25, -0.5], [1, 0, 0]]
    assert found.pending_token.tolist() == [-1] * 3


@pytest.mark.parametrize(
    ("params", "sizes"),
    [
        (SamplingParams(), [0, 0, 0]),
        (SamplingParams(repetition_penalty=1.1), [3, 0, 0]),
        (SamplingParams(presence_penalty=0.1), [0, 2, 0]),
        (SamplingParams(logit_bias=((1, 2.0),)), [0, 0, 1]),
    ],
)
def test_a_row_has_entries_of_what_it_asks_for(params: SamplingParams, sizes: list[int]) -> None:
    history = text([5, 7, 5], [8, 5, 8]).until(3) if params.needs_history else None
    found = Adjustments.of([Draw(0, 6, params, history)])
    assert [len(each) for each in lists(found, 0)] == sizes


def test_room_suffices_for_one_more_token() -> None:
    shared = text([5, 7], [8])
    draws = [None, Draw(0, 3, ALL, shared.until(1)), Draw(0, 3, SamplingParams())]
    most = max_entries(draws)
    later = [Draw(0, 4, ALL, shared.until(1).extended(3))]
    assert len(Adjustments.of(draws).tokens) <= len(Adjustments.of(later).tokens) <= most
    assert max_entries([None, draws[2]]) == 0


def test_choices_of_a_prompt_count_their_own_output() -> None:
    prompt = PromptTokens([5])
    draws = [Draw(n, 3, ALL, Text(prompt, [n, n]).until(2)) for n in range(2)]
    found = Adjustments.of(draws)
    assert [lists(found, row)[1] for row in range(2)] == [[(0, 2.0)], [(1, 2.0)]]


def test_barred_tokens_have_a_finite_bias() -> None:
    barred = SamplingParams(logit_bias=((3, 5.0),), min_tokens=1, barred=(3, 4)).at(0)
    ((_, _, biased),) = [lists(Adjustments.of([Draw(0, 1, barred)]), 0)]
    assert biased == [(token, float(np.float32(FORBIDDEN_TOKEN_BIAS))) for token in (3, 4)]
