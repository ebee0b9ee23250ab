"""Virtual time: actions in the order of their time, and of their entry where that is equal."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class EventQueue:
    """`now_s` is the time of the action that runs. Knows no asyncio: an action returns at once."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._entries = 0
        self._actions: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Run an action at a time, which is now at the earliest."""
        self._entries += 1
        heapq.heappush(self._actions, (max(time_s, self.now_s), self._entries, action))

    def step(self) -> bool:
        """Run the next action; False if there is none."""
        if not self._actions:
            return False
        self.now_s, _, action = heapq.heappop(self._actions)
        action()
        return True
