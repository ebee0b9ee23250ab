"""A proposer that knows how texts go on, and errs as often as it is asked to.

Implements `engine.speculation.proposer.Proposer`. It is given texts as plain decoding made them,
prompts included; a sequence is the first of these that begins with its tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence


class OracleProposer:
    """Each proposed token is the right one with probability `share`, independent of the others."""

    name = "ngram"  # a metric's label: no other is known

    def __init__(self, share: float = 1.0, seed: int = 0) -> None:
        self.share = share
        self.texts: list[list[int]] = []
        self.open = 0  # states that are not closed
        self._dice = random.Random(seed)

    def start(self, tenant: bytes, tokens: Sequence[int]) -> OracleState:
        self.open += 1
        return OracleState(self, tokens)

    def close(self) -> None:
        self.open -= 1

    def err(self, token: int) -> int:
        return token if self._dice.random() < self.share else token ^ 1


class OracleState:
    """One sequence."""

    def __init__(self, owner: OracleProposer, tokens: Sequence[int]) -> None:
        self._owner = owner
        self.tokens = list(tokens)
        self._closed = False

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens

    def propose(self, limit: int) -> list[int]:
        known = len(self.tokens)
        for text in self._owner.texts:
            if text[:known] == self.tokens:
                return [self._owner.err(token) for token in text[known : known + limit]]
        return []

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._owner.close()
