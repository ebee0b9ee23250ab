"""Where the prompts of the last minutes were prefilled, and whether their KV moved.

    moved    a prefill worker computed the prompt, and its decode worker has the KV
    failed   handoffs were tried, and the decode worker computed the prompt in the end
    (else)   the reason for which the prompt was placed on its decode worker alone

A fleet whose prefill workers help no prompt serves on, only slower: the console and `baton doctor`
warn of it. Totals since the start would hide it for ever behind one early handoff. Pure; the time
is given. Owned by the fleet.
"""

from __future__ import annotations

from collections import Counter, deque

WINDOW_S = 300.0
SLOT_S = 10.0  # prompts of so long are forgotten together


class RecentPrefills:
    def __init__(self) -> None:
        self._slots: deque[tuple[float, Counter[str]]] = deque()  # by their begin, oldest first

    def add(self, outcome: str, now_s: float) -> None:
        """Record a prompt whose prefill has ended."""
        if not self._slots or now_s - self._slots[-1][0] >= SLOT_S:
            self._slots.append((now_s, Counter()))
            self._forget(now_s)
        self._slots[-1][1][outcome] += 1

    def counts(self, now_s: float) -> dict[str, int]:
        """Return the number of prompts of the last WINDOW_S seconds by outcome, without zeros."""
        self._forget(now_s)
        return dict(sum((counter for _, counter in self._slots), Counter[str]()))

    def _forget(self, now_s: float) -> None:
        while self._slots and now_s - self._slots[0][0] > WINDOW_S:
            self._slots.popleft()
