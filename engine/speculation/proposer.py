"""The `Proposer` seam: guesses at the next tokens of a sequence, which a later step verifies.

A guess changes no token: the target draws each position itself, and proposals are accepted while
they equal its draws. So a proposer may be wrong, and its state may be lost, at the cost of speed
alone. Proposers that need no device implement this seam; the decode loop calls them between steps,
so each method states what it costs. Nothing here is safe to call from two threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class ProposerState(Protocol):
    """A proposer's view of one sequence."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append verified tokens of the output. Costs a constant for each, amortised."""
        ...

    def propose(self, limit: int) -> list[int]:
        """Return at most `limit` tokens that may follow; none where nothing is likely. Costs at
        most a constant and a constant for each token of `limit`, whatever the sequence is."""
        ...

    def close(self) -> None:
        """Release what the sequence holds, at a constant cost. Idempotent."""
        ...


class Proposer(Protocol):
    """Makes the state of each sequence. `name` labels metrics: a word from a fixed set."""

    @property
    def name(self) -> str: ...

    def start(self, tenant: bytes, tokens: Sequence[int]) -> ProposerState:
        """Begin a sequence that has `tokens`. Sorts them once by numpy: milliseconds for 131,072.
        What one tenant's sequences contain is never proposed to those of another."""
        ...
