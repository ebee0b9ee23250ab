"""How long a request that comes now would be on a worker: its place in the line, times the pace.

    expected = (there already + placed since + 1) * seconds per end - since the report

Known only while requests wait there: else the pace is that of the arrivals, and says nothing of
what the worker could do. A worker's ends are those of all routers' requests. Pure: time is given.
Owned by the worker's link.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from baton.proto import worker_pb2

WINDOW_ENDS = 16  # that a pace is taken of, the latest
FEWEST_ENDS = 4
WINDOW_LOADS = 256


@dataclass(frozen=True, slots=True)
class _Report:
    at_s: float
    ended: int
    there: int


class Pace:
    """Of one boot of one worker."""

    def __init__(self) -> None:
        self._reports: deque[_Report] = deque(maxlen=WINDOW_LOADS)

    def report(self, load: worker_pb2.Load, now_s: float) -> None:
        """What the worker says of itself, as often as it does."""
        reports = self._reports
        if not load.waiting or (reports and load.ended < reports[-1].ended):
            reports.clear()
        if load.waiting:
            there = load.running + load.fetching + load.waiting
            reports.append(_Report(now_s, load.ended, there))
        while len(reports) > 2 and load.ended - reports[1].ended >= WINDOW_ENDS:
            reports.popleft()

    def expected_s(self, placed: int, now_s: float) -> float:
        """Until the end of one more request; `placed` were sent there since the last report.
        0 where nobody waits, or too few have ended since somebody does."""
        if not self._reports:
            return 0.0
        first, last = self._reports[0], self._reports[-1]
        ends = last.ended - first.ended
        if ends < FEWEST_ENDS:
            return 0.0
        pace_s = (last.at_s - first.at_s) / ends
        return max(0.0, (last.there + placed + 1) * pace_s - (now_s - last.at_s))
