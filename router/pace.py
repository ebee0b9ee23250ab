"""How long a request that comes now would be on a worker: its place in the line, times the pace.

    expected = ceil((there already + placed since + 1) / at once) * at once * seconds per end
               - since the report

Those that a worker serves at once may have begun together, and end together: the place is rounded
up to whole rounds. A pace is taken only while requests wait there: else it is that of the
arrivals, and says nothing of what the worker could do. It is taken from one report of new ends to
another, so that ends in groups do not count once too often. Between two lines, when nobody waits,
the last pace is remembered for a while: a burst is a line before the worker can say so.

A worker's ends are those of all routers' requests. Pure: time is given. Owned by the worker's link.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from baton.proto import worker_pb2

WINDOW_ENDS = 16  # that a pace is taken of, the latest
FEWEST_ENDS = 4
WINDOW_LOADS = 256
REMEMBERED_S = 10.0


@dataclass(frozen=True, slots=True)
class _Ends:
    """A report that told of new ones, while somebody waited."""

    at_s: float
    ended: int


class Pace:
    """Of one boot of one worker."""

    def __init__(self) -> None:
        self._ends: deque[_Ends] = deque(maxlen=WINDOW_LOADS)
        self._load = worker_pb2.Load()
        self._load_s = 0.0
        self._pace_s = 0.0  # seconds per end; 0: not known
        self._pace_until_s = 0.0
        self._at_once = 1  # requests, when somebody last waited

    def report(self, load: worker_pb2.Load, now_s: float) -> None:
        """What the worker says of itself, as often as it does."""
        if load.ended < self._load.ended:  # it has been started anew
            self._pace_s, self._at_once = 0.0, 1
            self._ends.clear()
        self._load, self._load_s = load, now_s
        if load.waiting:
            self._at_once = max(1, load.running + load.fetching)
            self._take(load.ended, now_s)
        else:
            self._at_once = max(self._at_once, load.running + load.fetching)
            self._ends.clear()

    def expected_s(self, placed: int, now_s: float) -> float:
        """Until the end of one more request; `placed` were sent there since the last report.
        0 where nobody waits, or where too few have ended yet while somebody did."""
        load = self._load
        place = load.running + load.fetching + load.waiting + placed + 1
        if now_s > self._pace_until_s or not (load.waiting or place > self._at_once):
            return 0.0
        ends = math.ceil(place / self._at_once) * self._at_once
        return max(0.0, ends * self._pace_s - (now_s - self._load_s))

    def _take(self, ended: int, now_s: float) -> None:
        ends = self._ends
        if not ends or ended > ends[-1].ended:
            ends.append(_Ends(now_s, ended))
        while len(ends) > 2 and ended - ends[1].ended >= WINDOW_ENDS:
            ends.popleft()
        first, last = ends[0], ends[-1]
        if last.ended - first.ended >= FEWEST_ENDS:
            self._pace_s = (last.at_s - first.at_s) / (last.ended - first.ended)
            self._pace_until_s = now_s + REMEMBERED_S
