"""Waits between attempts: each twice as long as the one before, up to a longest, and jittered.

So that routers which lost a worker at the same moment do not come back at the same moment.
Pure: randomness is given. Owned by whoever tries.
"""

from __future__ import annotations

import random


class Backoff:
    def __init__(self, first_s: float, longest_s: float, rng: random.Random) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._rng = rng
        self._next_s = first_s

    def next_s(self) -> float:
        """How long to wait now: from half of the full wait to all of it."""
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return wait_s * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._next_s = self._first_s
