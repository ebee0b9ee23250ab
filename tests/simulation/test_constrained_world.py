"""Worlds of requests with grammars and workers that speculate: what they exercise, what is seen."""

from __future__ import annotations

import pytest

from baton.decode_worker.sequences import Sequence
from baton.decode_worker.speculator import Speculator
from baton.engine.scheduling.batch import Drawn, Slice
from baton.runtime.grammar.choice_masks import ChoiceMasks
from baton.runtime.grammar.grammar_text import choice_grammar
from baton.simulation import lab
from baton.simulation.fleet.draw_scenario import CONSTRAINED_EVERY, CONSTRAINED_SEEDS, draw
from baton.simulation.fleet.engine_kind import VOCAB
from baton.simulation.fleet.history import FINISHED, Ask, History
from baton.simulation.fleet.lab_vocabulary import END
from baton.simulation.fleet.scenario import Fault
from baton.simulation.invariants.grammars import outside_grammar

pytestmark = pytest.mark.usefixtures("quiet_logs")

FIRST = range(1200)
SEEDS = [seed for seed in FIRST if seed % CONSTRAINED_EVERY in CONSTRAINED_SEEDS]
WITH_MIGRATION = 99  # of an answer that had tokens


def test_speculating_workers_are_struck_in_each_way() -> None:
    kinds, proposers = set(), set()
    for seed in SEEDS:
        scenario = draw(seed)
        assert scenario == draw(seed) and scenario.constrained and len(scenario.decode) == 2
        proposers.add(scenario.proposer)
        for event in scenario.faults:
            assert isinstance(event.does, Fault)
            assert not set(scenario.decode).isdisjoint(event.does.targets)
            kinds.add((event.does.kind, event.does.what if event.does.kind == "withhold" else ""))
    assert {kind for kind, _ in kinds} == {"kill", "pause", "drain", "hang", "withhold"}
    assert {what for _, what in kinds} > {"outputs", "submit", "cancel"}
    assert proposers == {"oracle", "ngram", "draft"}


@pytest.mark.parametrize("proposer", ["oracle", "draft"])
def test_proposals_within_grammars_are_accepted_and_rejected(
    proposer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted: list[int] = []
    rejected: list[int] = []
    judge = Speculator.judge

    def counted(
        self: Speculator, sequence: Sequence, item: Slice, drawn: tuple[Drawn, ...], *more: object
    ) -> object:
        run = judge(self, sequence, item, drawn, *more)
        if sequence.masks is not None:
            accepted.append(run.accepted)
            rejected.append(run.proposed - run.accepted)
        return run

    monkeypatch.setattr(Speculator, "judge", counted)
    seeds = [seed for seed in SEEDS if draw(seed).proposer == proposer][:3]
    outcomes = [lab.run_seed(seed) for seed in seeds]
    assert all(outcome.breaches == [] for outcome in outcomes)
    assert sum(accepted) > 20 and sum(rejected) > 20


def test_an_answer_with_tokens_migrates_within_its_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[int] = []
    begin = ChoiceMasks.__init__

    def noted(self: ChoiceMasks, grammar: object, output: list[int], *more: object) -> None:
        begun.append(len(output))
        begin(self, grammar, output, *more)

    monkeypatch.setattr(ChoiceMasks, "__init__", noted)
    outcome = lab.run_seed(WITH_MIGRATION)
    assert outcome.breaches == [] and outcome.migrations and any(begun)


def test_a_wrong_mask_is_a_breach_whatever_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that admits more than its grammar shows where no such token is drawn."""
    compute = ChoiceMasks.bits

    def wider(self: ChoiceMasks, length: int, tail: tuple[int, ...]) -> bytes | None:
        bits = compute(self, length, tail)
        return bits if bits is None or length < 3 else bytes([*bits[:-1], bits[-1] | 0x80])

    monkeypatch.setattr(ChoiceMasks, "bits", wider)
    outcome = lab.run_seed(WITH_MIGRATION)
    assert any("not that of the grammar" in breach for breach in outcome.breaches)


@pytest.mark.parametrize(
    ("text", "ends", "seen"),
    [
        ("yes", True, ""),
        ("ye", False, ""),
        ("ye", True, "stops within its grammar"),
        ("yesno", False, "does not admit"),
    ],
)
def test_an_answer_outside_its_grammar_is_named(text: str, ends: bool, seen: str) -> None:
    ask = Ask("r0", (1,), max_tokens=9, stops=(END,), grammar=choice_grammar(["yes", "no"]))
    history = History(ask, 0)
    history.tokens = [[*text.encode(), *([END] if ends else [])]]
    history.end(FINISHED, 1.0)
    found = " ".join(outside_grammar(history, VOCAB))
    assert seen in found and bool(found) == bool(seen)


def test_another_engine_runs_such_a_seed_without_grammars() -> None:
    class Other:
        name = "model"
        block_bytes = staticmethod(lambda size: 64 * size)

    scenario = draw(SEEDS[0]).computed_by(Other())
    asks = [event.does for event in scenario.asks]
    assert not scenario.constrained and not any(isinstance(a, Ask) and a.grammar for a in asks)
