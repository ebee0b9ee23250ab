"""`python -m benchmarks.simulator`: what it makes of measured layouts."""

from __future__ import annotations

import pytest

from benchmarks.simulator.__main__ import (
    LAYOUTS,
    TIMING,
    LayoutOutcome,
    TimePair,
    middle_of,
    slowness,
)

REAL = TimePair(0.2, 0.5, 0.06)


def test_the_middle_round_of_each_time_counts() -> None:
    rounds = [TimePair(0.1, 0.9, 0.05), TimePair(0.3, 0.5, 0.06), TimePair(0.2, 0.4, 0.9)]
    assert middle_of(rounds) == REAL


def test_a_layout_shows_its_worst_error_beside_its_times() -> None:
    made, exact = TimePair(0.22, 0.5, 0.057), TimePair(0.21, 0.5, 0.06)
    found = LayoutOutcome(LAYOUTS[1], real=[REAL], made=[made], exact=[exact], own_fits=[TIMING])
    figure = found.figure()
    assert figure.name == "layout_1_prefill_3_decode"
    assert figure.value == pytest.approx(0.1)
    assert "TTFT 200.0 (rounds 200.0 to 200.0; 220.0 simulated, 210.0 with" in figure.beside
    assert figure.beside.endswith("steps took longer than meant by chunk +0.0%, decode +0.0%")
    assert found.errors.tpot_s == pytest.approx(0.05)


def test_only_what_no_round_measured_is_an_error() -> None:
    low, high = TimePair(0.2, 0.5, 0.06), TimePair(0.3, 0.6, 0.07)
    made = [TimePair(0.24, 0.66, 0.054)]
    found = LayoutOutcome(LAYOUTS[1], real=[high, low], made=made, exact=made)
    beyond = found.errors_beyond_spread
    assert beyond.ttft_s == 0.0
    assert beyond.ttft_p99_s == pytest.approx(0.1)
    assert beyond.tpot_s == pytest.approx(0.1)


def test_slow_steps_are_stated() -> None:
    slow = [TIMING.scaled(factor) for factor in (1.0, 1.1, 1.5)]
    text = slowness(slow)
    assert text.count("+10.0%") == 2
