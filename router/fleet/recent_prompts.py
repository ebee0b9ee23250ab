"""The identities of the blocks of the last prompts that were placed, to draw their common prefixes.
Holds no token. Owned by the fleet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

MAX_PROMPTS = 64
MAX_BLOCKS = 256  # of a prompt, the leading ones


class RecentPrompts:
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
