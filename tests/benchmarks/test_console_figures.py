"""The benchmark of the console judges the CPU time of the router in each round by itself."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.console.__main__ import TURNS, ConsoleRound, Kind, figures
from benchmarks.figures.report import Figure

OPTIONS = argparse.Namespace(rate=100.0)
PAGE = {"frames_per_s": 36.0, "longest_ms": 50.0, "workers": 64.0, "requests": 9.0}
IDLE_S = (1.0, 1.1, 0.9, 1.0, 1.2)  # of the rounds without: the machine varies by more than 1 %


def one(kind: Kind, cpu_s: float) -> ConsoleRound:
    return ConsoleRound(kind, 1000, 10.0, cpu_s, 0.002, PAGE if kind == "page" else {})


def judged(reader: tuple[float, ...]) -> dict[str, Figure]:
    """The figures of five rounds in which the reader costs these shares more."""
    rounds = [
        each
        for idle_s, share in zip(IDLE_S, reader, strict=True)
        for each in (one("page", 1.05 * idle_s), one("reader", share * idle_s), one("none", idle_s))
    ]
    return {figure.name: figure for figure in figures(rounds, OPTIONS)}


@pytest.mark.parametrize(
    ("reader", "holds"),
    [((1.0, 1.005, 1.008, 0.99, 1.02), True), ((1.0, 1.02, 1.02, 0.99, 1.03), False)],
)
def test_the_cost_is_judged_within_each_round(reader: tuple[float, ...], holds: bool) -> None:
    found = judged(reader)
    assert found["router_cpu_ratio"].holds is holds
    assert found["router_cpu_ratio"].value == pytest.approx(sorted(reader)[2])
    assert "limit: at most 1.01; rounds: 0.990 to" in found["router_cpu_ratio"].beside
    assert found["browser_cpu_ratio"].holds is None
    assert found["browser_cpu_ratio"].value == pytest.approx(1.05)
    assert found["idle_cpu_ratio"].value == pytest.approx(1.2 / 0.9)


def test_no_kind_always_comes_first() -> None:
    assert {turn[0] for turn in TURNS} == {"page", "reader", "none"}
    assert all(sorted(turn) == sorted(TURNS[0]) for turn in TURNS)
