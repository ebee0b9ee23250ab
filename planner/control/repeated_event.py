"""An event that a loop would log in each of its turns: it is logged when it says something else,
and once in REPEAT_S. Pure: time is given."""

from __future__ import annotations

import math

REPEAT_S = 60.0


class RepeatedEvent:
    """One for each event that a loop repeats."""

    def __init__(self) -> None:
        self._said: object = None
        self._logged_s = -math.inf

    def should_log(self, said: object, now_s: float) -> bool:
        """Return whether to log that the event says `said`. If so, it counts as logged."""
        if said == self._said and now_s - self._logged_s < REPEAT_S:
            return False
        self._said, self._logged_s = said, now_s
        return True
