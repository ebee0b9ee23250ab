"""The benchmark of the console judges the CPU time of the router in each round by itself."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

import benchmarks.console.__main__ as benchmark
from benchmarks.console.__main__ import TURNS, ConsoleRound, Kind, figures, one_round
from benchmarks.figures.report import Figure
from benchmarks.overload import LoadResults

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


async def test_a_stream_that_ends_is_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its later part would have no reader, whose cost it states."""

    async def ended(url: str, key: str) -> None:
        """Return as the router closes the stream."""

    async def state_s(routed: Any) -> float:
        return 0.0

    monkeypatch.setattr(benchmark, "read_stream", ended)
    monkeypatch.setattr(benchmark, "_state_s", state_s)
    routed: Any = SimpleNamespace(admin_address="127.0.0.1:1", router_cpu_s=lambda: 0.0)
    options = argparse.Namespace(seconds=9.0, key="k")
    browser: Any = None  # only a page needs one
    with pytest.raises(RuntimeError, match="the console's stream ended"):
        await one_round(routed, LoadResults(), browser, "reader", options)


def test_no_kind_always_comes_first() -> None:
    assert {turn[0] for turn in TURNS} == {"page", "reader", "none"}
    assert all(sorted(turn) == sorted(TURNS[0]) for turn in TURNS)
