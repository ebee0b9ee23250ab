"""Draws on a GPU equal draws on a CPU."""

import pytest

NAMES = ["greedy", "plain", "top-k", "top-p", "min-p", "all", "nothing kept but the best"]
NAMES += ["nearly all", "all but one"]


@pytest.mark.parametrize("name", [*NAMES, "alone as in any slot of a batch"])
def test_a_draw_is_that_of_the_cpu(draw_checks, name):
    found = draw_checks[f"draws: {name}"]
    assert found["good"], found["said"]


@pytest.mark.parametrize(
    "name",
    ["penalties and biases", "logprobs", "adjusted, with barred tokens", "masked by grammars"],
)
def test_adjustments_and_logprobs_are_those_of_the_cpu(draw_checks, name):
    found = draw_checks[f"draws: {name}"]
    assert found["good"], found["said"]


def test_one_broken_row_harms_no_other(draw_checks):
    found = draw_checks["draws: rows that are not finite are reported, the others unharmed"]
    assert found["good"], found["said"]
