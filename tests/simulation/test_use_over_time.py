"""The share of steps over time equals that of a plain count, whatever the windows became."""

from __future__ import annotations

import random

import pytest

from baton.simulation.capacity.use_over_time import FIRST_WINDOW_S, WINDOWS, UseOverTime, mean_use


def drawn_steps(seed: int, until_s: float) -> list[tuple[float, float]]:
    """Steps one after the other, with pauses."""
    rng, now_s, steps = random.Random(seed), 0.0, []
    while now_s < until_s:
        seconds = min(rng.expovariate(1 / 0.3), until_s - now_s)
        steps.append((now_s, seconds))
        now_s += seconds + rng.choice([0.0, rng.expovariate(1.0)])
    return steps


def share(steps: list[tuple[float, float]], start_s: float, end_s: float) -> float:
    inside = (max(0.0, min(s + d, end_s) - max(s, start_s)) for s, d in steps)
    return sum(inside) / (end_s - start_s)


@pytest.mark.parametrize("until_s", [0.5, 15.9, 40.0, 700.0])
def test_shares_are_those_of_a_plain_count(until_s: float) -> None:
    logs = [drawn_steps(seed, until_s * length) for seed, length in ((1, 1.0), (2, 0.2), (3, 0.7))]
    workers = []
    for steps in logs:
        workers.append(UseOverTime())
        for start_s, seconds in steps:
            workers[-1].add(start_s, seconds)
    window_s, shares = mean_use(workers, until_s)
    assert len(shares) <= WINDOWS and window_s * len(shares) >= until_s - 1e-9
    for window, found in enumerate(shares):
        start_s = window * window_s
        end_s = min(start_s + window_s, until_s)
        if end_s - start_s > 1e-6:
            expected = sum(share(steps, start_s, end_s) for steps in logs) / 3
            assert found == pytest.approx(expected, abs=1e-6)
    for worker, steps in zip(workers, logs, strict=True):
        assert worker.total_s == pytest.approx(sum(seconds for _, seconds in steps))
        assert sum(worker.seconds) == pytest.approx(worker.total_s)


def test_a_step_longer_than_all_windows_is_kept_whole() -> None:
    worker = UseOverTime()
    worker.add(3.0, 10 * FIRST_WINDOW_S * WINDOWS)
    assert sum(worker.seconds) == pytest.approx(10 * FIRST_WINDOW_S * WINDOWS)


def test_no_worker_and_no_time_have_no_windows() -> None:
    assert mean_use([UseOverTime()], 0.0)[1] == []
