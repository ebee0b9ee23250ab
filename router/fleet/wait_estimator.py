"""How long a request that comes now would be on a worker: its place in the line, times the pace.

    expected = (requests there already + placed since + 1 + half of those served at once)
               * seconds per end - since the report

Half, because those that are served at once may have begun together, and then end together: its
place is between one that is called at each end and one that waits for a whole round. Known only
while requests wait there: else the pace is that of the arrivals, and says nothing of what the
worker could do. The pace of a line is remembered for the next one, until that has ends of its own.

Ends are those of whole requests, by whichever router; whoever left or failed has made room, but
does not count. Pure: time is given. Owned by the worker's link.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from baton.proto import worker_pb2

WINDOW_ENDS = 16  # that a pace is taken of, the latest, or two rounds if those are more
FEWEST_ENDS = 4  # or a quarter of a round
REMEMBERED_S = 10.0


@dataclass(frozen=True, slots=True)
class _Ends:
    """So many there were in all; taken when a line began, and at each report of new ones."""

    at_s: float
    count: int


class Pace:
    """Of one boot of one worker."""

    def __init__(self) -> None:
        self._line: deque[_Ends] = deque()  # empty where nobody waits
        self._load = worker_pb2.Load()
        self._load_s = 0.0
        self._pace_s = 0.0  # seconds per end
        self._known_until_s = 0.0

    def report(self, load: worker_pb2.Load, now_s: float) -> None:
        """What the worker says of itself, as often as it does."""
        if load.served < self._load.served:  # it has been started anew
            self._known_until_s = 0.0
            self._line.clear()
        self._load, self._load_s = load, now_s
        if load.waiting:
            self._take(load.served, now_s)
        else:
            self._line.clear()

    def expected_s(self, placed: int, now_s: float) -> float:
        """Until the end of one more request; `placed` were sent there since the last report.
        0 where nobody waits, or too few have ended since somebody does."""
        line = self.line(placed)
        return 0.0 if line is None or now_s > line[1] else max(0.0, line[0] - now_s)

    def line(self, placed: int) -> tuple[float, float] | None:
        """When one more request would end there, and until when that is known; None where nobody
        waits. Changes with a report, and with `placed` alone."""
        load = self._load
        if not load.waiting:
            return None
        place = load.requests + placed + 1
        ends_s = self._load_s + (place + load.at_once / 2) * self._pace_s
        return ends_s, self._known_until_s

    def _take(self, served: int, now_s: float) -> None:
        """From one report of new ends to another: of a group that ends together, none counts
        whose time lies before."""
        line, at_once = self._line, self._load.at_once
        if not line or served > line[-1].count:
            line.append(_Ends(now_s, served))
        while len(line) > 2 and served - line[1].count >= max(WINDOW_ENDS, 2 * at_once):
            line.popleft()
        ends = line[-1].count - line[0].count
        if ends >= max(FEWEST_ENDS, at_once // 4):
            self._pace_s = (line[-1].at_s - line[0].at_s) / ends
            self._known_until_s = now_s + REMEMBERED_S
