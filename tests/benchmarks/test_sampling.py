"""The benchmark of draws, on a small vocabulary: every kind is drawn, and judged by argmax."""

from __future__ import annotations

from benchmarks import sampling


def test_every_kind_has_its_ratio_to_argmax() -> None:
    seconds = sampling.measure(rows=3, vocab=300, rounds=1)
    assert set(sampling.kinds(300)) < set(seconds) and min(seconds.values()) > 0
    figures = {figure.name: figure for figure in sampling.figures(seconds)}
    wide = figures["wide_over_argmax"]
    assert wide.value == seconds["wide"] / seconds["argmax"] and wide.holds is not None
    assert figures["sorted_wide_over_argmax"].holds is None


def test_a_sort_as_dear_as_before_would_not_hold() -> None:
    (wide,) = (
        figure
        for figure in sampling.figures({"argmax": 0.024, "wide": 2.64})
        if figure.name == "wide_over_argmax"
    )
    assert wide.holds is False
