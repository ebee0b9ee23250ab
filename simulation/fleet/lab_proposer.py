"""The proposer of a scenario's decode workers: the product's n-grams, or an oracle that errs.

An oracle has each answer as a run without faults gives it. Knows no world and no faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from baton.engine.speculation.ngram_proposer import NgramProposer
from baton.engine.speculation.proposer import Proposer
from baton.simulation.fleet.engine_kind import HASHES, EngineKind
from baton.simulation.fleet.history import Ask
from baton.simulation.fleet.oracle_proposer import OracleProposer
from baton.simulation.fleet.scenario import Scenario


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
