"""TTFT, ITL and goodput of the last minutes, one point a second.

Each point is of the WINDOW_S seconds before it: percentiles are interpolated between the bounds of
the metrics' buckets, so they are as coarse as those. Pure but for `read_totals`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from baton.router.console.metric_values import by_label, cumulative_counts, sum_of
from baton.runtime import metrics

WINDOW_S = 10.0
MAX_POINTS = 600

Point = list[float | None]
# of a point, in this order; times in milliseconds, rates a second
FIELDS = (
    "time", "ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "goodput", "output", "ended", "failed",
    "active",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Totals:
    """The counts of the metrics so far. `ttft` and `itl` are cumulative counts of buckets."""

    ttft: Sequence[float]
    itl: Sequence[float]
    goodput_tokens: float = 0.0
    output_tokens: float = 0.0
    ended: float = 0.0
    failed: float = 0.0
    active: float = 0.0


def read_totals() -> Totals:
    """Return the totals of this process."""
    ended = by_label(metrics.REQUESTS)
    return Totals(
        ttft=cumulative_counts(metrics.TTFT)[1],
        itl=cumulative_counts(metrics.ITL)[1],
        goodput_tokens=by_label(metrics.GOODPUT_TOKENS)[""],
        output_tokens=sum_of(metrics.OUTPUT_TOKENS),
        ended=sum(ended.values()),
        failed=ended["failed"],
        active=by_label(metrics.ACTIVE_REQUESTS)[""],
    )


class LatencyHistory:
    """`ttft_bounds` and `itl_bounds` are the upper bounds of the buckets in seconds."""

    def __init__(self, ttft_bounds: Sequence[float], itl_bounds: Sequence[float]) -> None:
        self._ttft_bounds, self._itl_bounds = ttft_bounds, itl_bounds
        self._totals: deque[tuple[float, Totals]] = deque()
        self.points: deque[Point] = deque(maxlen=MAX_POINTS)

    def add(self, now_s: float, wall_s: float, now: Totals) -> Point:
        """Record the totals at `now_s` of a monotonic clock, and return the new point."""
        self._totals.append((now_s, now))
        while len(self._totals) > 2 and now_s - self._totals[1][0] >= WINDOW_S:
            self._totals.popleft()
        begun_s, before = self._totals[0]
        seconds = max(1e-9, now_s - begun_s)
        ttft = [a - b for a, b in zip(now.ttft, before.ttft, strict=True)]
        itl = [a - b for a, b in zip(now.itl, before.itl, strict=True)]
        rates = (
            now.goodput_tokens - before.goodput_tokens,
            now.output_tokens - before.output_tokens,
            now.ended - before.ended,
            now.failed - before.failed,
        )
        point: Point = [
            round(wall_s, 1),
            *(_ms(percentile(self._ttft_bounds, ttft, share)) for share in (0.5, 0.99)),
            *(_ms(percentile(self._itl_bounds, itl, share)) for share in (0.5, 0.99)),
            *(round(each / seconds, 2) if begun_s < now_s else 0.0 for each in rates),
            now.active,
        ]
        self.points.append(point)
        return point


def percentile(bounds: Sequence[float], cumulative: Sequence[float], share: float) -> float | None:
    """Return the value that `share` of the observations do not exceed, interpolated within its
    bucket; the lower bound of a bucket without an upper one. None without observations."""
    whole = cumulative[-1]
    if whole <= 0:
        return None
    rank = share * whole
    index = next(at for at, count in enumerate(cumulative) if count >= rank)
    below, low = (cumulative[index - 1], bounds[index - 1]) if index else (0.0, 0.0)
    if bounds[index] == float("inf"):
        return low
    inside = (rank - below) / max(1e-9, cumulative[index] - below)
    return low + inside * (bounds[index] - low)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 2)
