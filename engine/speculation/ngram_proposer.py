"""Proposes what followed the last tokens where they occurred before in the same sequence.

Prompt lookup decoding (A. Saxena, 2023): good for summaries, edits and code, where an answer quotes
its prompt. Shares nothing between sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.speculation.suffix_index import LONGEST_MATCH, NOWHERE, SuffixIndex

SEQUENCE_TOKENS = 1 << 17  # that are searched: the newest ones


class NgramProposer:
    """Takes the longest match, and of equally long ones the newest."""

    name = "ngram"

    def start(self, tenant: bytes, tokens: Sequence[int]) -> NgramState:
        return NgramState(tokens)


class NgramState:
    """One sequence. `extend` costs O(1) a token, `propose` one search and O(1) a token."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.index = SuffixIndex(SEQUENCE_TOKENS)
        self._last = NOWHERE
        self._tail: list[int] = []
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self._last = self.index.append(tokens, self._last)
        self._tail = [*self._tail, *tokens[-LONGEST_MATCH:]][-LONGEST_MATCH:]

    def propose(self, limit: int) -> list[int]:
        matches = self.index.matches(self._tail)
        if not matches:
            return []
        position = max(matches, key=lambda match: match.length).position
        proposed: list[int] = []
        repeated = 0  # where the text ends, its continuation goes on as it began
        while len(proposed) < limit:
            position = self.index.after(position) if position != NOWHERE else NOWHERE
            if position != NOWHERE:
                proposed.append(self.index.token(position))
            else:
                proposed.append(proposed[repeated])
                repeated += 1
        return proposed

    def close(self) -> None:
        """Nothing is shared, so there is nothing to release."""
