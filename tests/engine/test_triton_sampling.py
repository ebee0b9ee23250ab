"""Draws on a GPU equal draws on a CPU."""

from __future__ import annotations

import pytest

from tests.support.json_values import JsonObject

NAMES = ["greedy", "plain", "top-k", "top-p", "min-p", "all", "nothing kept but the best"]
NAMES += ["nearly all", "all but one"]
EDGES = ["usual", "top-k 1", "top-k 2, hot", "few best, hot", "many best", "too many best"]
EDGES += ["too many best, hot", "more than there are", "all but one and nearly all", "top-p tiny"]
EDGES += ["top-p", "top-p, hot", "min-p", "plain", "plain, hot"]


@pytest.mark.parametrize("name", EDGES)
def test_rows_with_ties_flat_or_masked_are_those_of_the_cpu(
    draw_checks: dict[str, JsonObject], name: str
) -> None:
    found = draw_checks[f"draws, edges: {name}"]
    assert found["good"], found["said"]


def test_a_row_draws_the_same_however_many_programs_share_it(
    draw_checks: dict[str, JsonObject],
) -> None:
    found = draw_checks["draws: divided among any number of programs"]
    assert found["good"], found["said"]


def test_logits_that_overflow_float32_still_yield_tokens(
    draw_checks: dict[str, JsonObject],
) -> None:
    found = draw_checks["draws: too large for float32 over the temperature"]
    assert found["good"], found["said"]


@pytest.mark.parametrize("name", [*NAMES, "alone as in any slot of a batch"])
def test_a_draw_is_that_of_the_cpu(draw_checks: dict[str, JsonObject], name: str) -> None:
    found = draw_checks[f"draws: {name}"]
    assert found["good"], found["said"]


@pytest.mark.parametrize(
    "name",
    ["penalties and biases", "logprobs", "adjusted, with barred tokens", "masked by grammars"],
)
def test_adjustments_and_logprobs_are_those_of_the_cpu(
    draw_checks: dict[str, JsonObject], name: str
) -> None:
    found = draw_checks[f"draws: {name}"]
    assert found["good"], found["said"]


def test_one_broken_row_harms_no_other(draw_checks: dict[str, JsonObject]) -> None:
    found = draw_checks["draws: rows that are not finite are reported, the others unharmed"]
    assert found["good"], found["said"]
