"""How long a worker is overdue: it has work, and no step ends. What routers judge a hang by.

    a step runs, for as long as a step like it may               less than 0
    it still runs                                                since then
    work is here and no step runs, from one look to the next     since the first look

The loop that tells this may be well while the device, or the planning of steps, is not. Pure:
time is given. Owned by a worker's loop.
"""

from __future__ import annotations

import math


class Watermark:
    def __init__(self) -> None:
        self._unplanned_since_s: float | None = None

    def past_due_s(self, now_s: float, *, due_s: float | None, has_work: bool) -> float:
        """`due_s`: when the running step should long have been over, None if none runs;
        `has_work`: whether a step ought to run. To be asked often, as with every heartbeat.
        Before it is due, less than 0; infinitely where nothing is."""
        if due_s is not None or not has_work:
            self._unplanned_since_s = None
            return now_s - due_s if due_s is not None else -math.inf
        if self._unplanned_since_s is None:
            self._unplanned_since_s = now_s
        return now_s - self._unplanned_since_s

    def stood_still(self, seconds: float) -> None:
        """Of the time until now, which is nobody's who should have planned."""
        if self._unplanned_since_s is not None:
            self._unplanned_since_s += seconds
