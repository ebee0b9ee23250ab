"""The last prompts: the identities of their blocks, and where they were prefilled.

    moved    a prefill worker computed the prompt, and its decode worker has the KV
    failed   handoffs were tried, and the decode worker computed the prompt in the end
    (else)   the reason for which the prompt was placed on its decode worker alone

A fleet whose prefill workers help no prompt serves on, only slower: the console and `baton doctor`
warn of it. Totals since the start would hide it for ever behind one early handoff. Pure; the time
is given. Holds no token. Owned by the fleet.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

MAX_PROMPTS = 64
MAX_BLOCKS = 256  # of a prompt, the leading ones
WINDOW_S = 300.0
SLOT_S = 10.0  # prompts of so long are forgotten together


class RecentPrompts:
    """The prompts that were placed last, to draw their common prefixes."""

    def __init__(self) -> None:
        self._chains: deque[Sequence[bytes]] = deque(maxlen=MAX_PROMPTS)

    def add(self, identities: Sequence[bytes]) -> None:
        """Record a prompt by the identities of its blocks; one without a whole block is left out.
        The cost of a request: a copy of MAX_BLOCKS references."""
        if identities:
            self._chains.append(tuple(identities[:MAX_BLOCKS]))

    def __iter__(self) -> Iterator[Sequence[bytes]]:
        """Yield the prompts, the oldest first."""
        return iter(self._chains)


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
