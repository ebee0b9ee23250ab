"""Means and quantiles of times, of a simulation or of measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
from numpy.typing import NDArray

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def latency_of(values: Iterable[float], counts: Iterable[int] | None = None) -> Latency | None:
    """Return mean and quantiles of seconds, each counted once or as often as `counts` says; None
    without a value."""
    seconds = np.fromiter(values, dtype=np.float64)
    if not len(seconds):
        return None
    weights = np.ones(len(seconds), np.int64) if counts is None else np.fromiter(counts, np.int64)
    mean = float(np.average(seconds, weights=weights))
    p50, p90, p99 = weighted_quantiles(seconds, weights, QUANTILES)
    return Latency(mean, p50, p90, p99, float(seconds.max()))


def weighted_quantiles(
    values: NDArray[np.float64], counts: NDArray[np.int64], shares: Sequence[float]
) -> list[float]:
    """Return for each share the smallest value that at least this share of the counts do not
    exceed."""
    order = np.argsort(values, kind="stable")
    below = np.cumsum(counts[order])
    indices = np.searchsorted(below, np.asarray(shares) * below[-1], side="left")
    return [float(values[order[min(index, len(order) - 1)]]) for index in indices]


def latency_lines(latencies: Mapping[str, Latency | None]) -> list[str]:
    """Return a table in milliseconds, one line for each name."""
    columns = "".join(f"{each.name:>12}" for each in fields(Latency))
    lines = [f"{'ms':<12}{columns}"]
    for name, latency in latencies.items():
        cells = [f"{1000 * each:>12.1f}" for each in asdict(latency).values()] if latency else ["-"]
        lines.append(f"{name:<12}{''.join(cells)}")
    return lines
