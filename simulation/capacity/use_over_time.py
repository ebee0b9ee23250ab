"""The time that a worker spends in steps, over the time of a simulation.

Windows of equal length, a fixed number of them: when time goes on beyond the last, two become one.
So memory is bounded, and the windows of two workers are multiples of each other.
"""

from __future__ import annotations

from collections.abc import Sequence

WINDOWS = 256
FIRST_WINDOW_S = 1 / 16


class UseOverTime:
    """`seconds[n]`: seconds of steps from n * `window_s` to (n + 1) * `window_s`."""

    def __init__(self) -> None:
        self.window_s = FIRST_WINDOW_S
        self.seconds = [0.0] * WINDOWS
        self.total_s = 0.0

    def add(self, start_s: float, seconds: float) -> None:
        """Count a step, or steps without a pause. O(windows that it covers)."""
        self.total_s += seconds
        end_s = start_s + seconds
        while end_s >= self.window_s * WINDOWS:
            self.seconds = _halved(self.seconds) + [0.0] * (WINDOWS // 2)
            self.window_s *= 2
        window_s = self.window_s
        first, last = int(start_s / window_s), int(end_s / window_s)
        if first == last:
            self.seconds[first] += seconds
            return
        self.seconds[first] += (first + 1) * window_s - start_s
        for window in range(first + 1, last):
            self.seconds[window] += window_s
        self.seconds[last] += end_s - last * window_s


def mean_use(workers: Sequence[UseOverTime], until_s: float) -> tuple[float, list[float]]:
    """Return the length of a window and the mean share of steps in each, up to `until_s`. The last
    window counts up to then alone."""
    window_s = max((each.window_s for each in workers), default=FIRST_WINDOW_S)
    sums = [0.0] * WINDOWS
    for each in workers:
        seconds = each.seconds
        for _ in range(round(window_s / each.window_s).bit_length() - 1):
            seconds = _halved(seconds)
        for window, value in enumerate(seconds):
            sums[window] += value
    shares = []
    for window, value in enumerate(sums):
        length_s = min(window_s, until_s - window * window_s)
        if length_s <= 0:
            break
        shares.append(value / (length_s * len(workers)))
    return window_s, shares


def _halved(seconds: Sequence[float]) -> list[float]:
    return [seconds[at] + seconds[at + 1] for at in range(0, len(seconds), 2)]
