"""The measured seconds of a step by its number of rows: a table that never falls as rows grow.

    seconds                    ╭── beyond the largest bucket: the slope between the last two
       │              •──•────•
       │   •────•────╯           one decaying mean for each bucket of rows, made monotone by
       │   4    8   12  16       pooling neighbours; between them, straight lines

Fed with the results of steps that decode; knows no clock. A bucket that no step has reached for
`FORGET_STEPS` observations is dropped, so that one slow step does not bar its size for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

FORGET_STEPS = 1024
_NEWEST_WEIGHT = 0.2  # of a new observation in its bucket's mean
_OUTLIER = 2.0  # times the mean: more than that counts as that
# With one bucket known: share of its seconds that grows with the rows. Half is between a device
# that memory limits (none) and one that arithmetic limits (all).
_ASSUMED_GROWTH = 0.5


@dataclass(slots=True)
class _Bucket:
    rows: float  # decaying means
    seconds: float
    observed_at: int
    observations: int = 1


class StepCosts:
    """Seconds by rows. An observation and an estimate cost O(buckets), some forty."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._observed = 0
        self._table: tuple[Floats, Floats] | None = None

    def __bool__(self) -> bool:
        """Whether any step was observed."""
        return bool(self._buckets)

    def observe(self, rows: int, seconds: float) -> None:
        """Add one step. Rows of less than one and seconds that are not positive are refused."""
        if rows < 1 or not 0 < seconds < float("inf"):
            raise ValueError(f"a step of {rows} rows took {seconds} s")
        self._observed += 1
        key = _bucket(rows)
        bucket = self._buckets.get(key)
        if bucket is None:
            self._buckets[key] = _Bucket(rows, seconds, self._observed)
        else:
            bucket.observed_at = self._observed
            bucket.observations += 1
            # the first few weigh alike: the first of all may have compiled a kernel
            weight = max(_NEWEST_WEIGHT, 1 / bucket.observations)
            seconds = min(seconds, _OUTLIER * bucket.seconds)
            bucket.rows += weight * (rows - bucket.rows)
            bucket.seconds += weight * (seconds - bucket.seconds)
        self._forget()
        self._table = None

    def seconds(self, rows: ArrayLike) -> Floats:
        """Estimate steps of so many rows. Zero while no step was observed."""
        wanted = np.asarray(rows, dtype=np.float64)
        if not self._buckets:
            return np.zeros_like(wanted)
        known_rows, known_s = self._monotone()
        found = np.interp(wanted, known_rows, known_s)
        beyond = np.maximum(wanted - known_rows[-1], 0.0)
        return np.asarray(found + beyond * self._slope(known_rows, known_s))

    def _slope(self, rows: Floats, seconds: Floats) -> float:
        """Seconds for each row beyond the largest bucket."""
        if len(rows) == 1:
            return float(_ASSUMED_GROWTH * seconds[0] / rows[0])
        return float((seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2]))

    def _forget(self) -> None:
        old = self._observed - FORGET_STEPS
        for key in [key for key, bucket in self._buckets.items() if bucket.observed_at <= old]:
            del self._buckets[key]

    def _monotone(self) -> tuple[Floats, Floats]:
        """Rows and seconds of the buckets; neighbours that fall are pooled into their mean."""
        if self._table is None:
            buckets = [self._buckets[key] for key in sorted(self._buckets)]
            pools: list[tuple[float, int]] = []  # mean of seconds, buckets
            for bucket in buckets:
                mean, count = bucket.seconds, 1
                while pools and pools[-1][0] > mean:
                    lower, more = pools.pop()
                    mean = (mean * count + lower * more) / (count + more)
                    count += more
                pools.append((mean, count))
            seconds = [mean for mean, count in pools for _ in range(count)]
            self._table = np.array([bucket.rows for bucket in buckets]), np.array(seconds)
        return self._table


def _bucket(rows: int) -> int:
    """Return the bucket of `rows`: each up to 8, then 8 of them for each doubling."""
    if rows <= 8:
        return rows
    shift = rows.bit_length() - 4
    return (shift << 4) + (rows >> shift)
