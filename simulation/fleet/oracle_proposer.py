"""The proposer of a scenario's decode workers: the product's n-grams, or an oracle that errs.

An oracle knows how texts go on, and errs as often as it is asked to. It is given texts as plain
decoding made them, prompts included; a sequence is the first of these that begins with its tokens.
Knows no world and no faults.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from baton.engine.speculation.ngram_proposer import NgramProposer
from baton.engine.speculation.proposer import Proposer
from baton.simulation.fleet.engine_kind import HASHES, EngineKind
from baton.simulation.fleet.history import Ask
from baton.simulation.fleet.scenario import Scenario


class OracleProposer:
    """Implements `Proposer`. Each proposed token is the right one with probability `share`,
    independent of the others."""

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


def proposer_of(scenario: Scenario, kind: EngineKind) -> Proposer | None:
    """Return the proposer that all decode workers of a scenario share; None: their engines have a
    draft model."""
    if scenario.proposer == "draft" and kind.name == HASHES.name:
        return None
    if scenario.proposer == "ngram":
        return NgramProposer()
    oracle = OracleProposer(scenario.right_share, scenario.seed)
    oracle.texts = list(_answers(scenario, kind))
    return oracle


def _answers(scenario: Scenario, kind: EngineKind) -> Iterator[list[int]]:
    """Yield each choice of each request behind its prompt, as a run without faults gives it."""
    for event in scenario.asks:
        assert isinstance(event.does, Ask)
        ask = event.does
        if not ask.grammar:
            ask = replace(ask, stops=())  # proposals go on behind a stop token
        for choice in range(ask.choices):
            yield [*ask.prompt, *(one.token for one in ask.drawn(choice, kind=kind))]
