"""Storms reach the budget of moves and the cap of ejection, and a breach of either is seen."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from baton.router.fleet.circuits import Circuits
from baton.simulation import lab
from baton.simulation.fleet.draw_scenario import (
    JOINING_SEED,
    REDIS_SEEDS,
    STORM_EVERY,
    STORM_SEED,
    TURNS_EVERY,
    TURNS_SEEDS,
    draw,
)
from baton.simulation.fleet.scenario import Fault
from baton.simulation.mutations import patches
from baton.simulation.mutations.mutations import MUTATIONS
from baton.simulation.mutations.patches import Break
from baton.simulation.mutations.regressions import PAST_BUGS

pytestmark = pytest.mark.usefixtures("quiet_logs")

STORMY = ("fails always", "no memory at all")
STORMS = range(STORM_SEED, 15 * STORM_EVERY, STORM_EVERY)


def test_one_seed_in_many_is_a_storm_that_spares_a_decode_worker() -> None:
    others = (*TURNS_SEEDS, *REDIS_SEEDS, JOINING_SEED)
    usual = [seed for seed in range(200) if seed % TURNS_EVERY not in others]
    many = [seed for seed in usual if len(draw(seed).asks) > 10]
    assert many == list(range(STORM_SEED, 200, STORM_EVERY))
    for seed in many:
        storm = draw(seed)
        assert storm == draw(seed) and storm.config.router.retry_floor <= 2
        faults = [event.does for event in storm.faults]
        assert all(isinstance(f, Fault) and f.what in STORMY for f in faults)
        failing = {name for fault in faults if isinstance(fault, Fault) for name in fault.targets}
        assert failing < set(storm.decode) and 1 <= len(failing) <= 2


def test_some_storms_have_a_failing_and_a_full_worker() -> None:
    both = [{e.does.what for e in draw(seed).faults} for seed in STORMS]
    assert 2 <= both.count(set(STORMY)) < len(STORMS)


def test_storms_use_the_budget_up_and_pass_no_bound() -> None:
    reached: Counter[str] = Counter()

    def counted(before: object) -> object:
        def passed_over(self: Circuits, fleet: dict[bytes, str], now_s: float) -> frozenset[bytes]:
            found: frozenset[bytes] = before(self, fleet, now_s)
            open_ = [boot for boot, one in self._circuits.items() if one.passed_over(now_s)]
            reached["cap"] += len(open_) > len(found)
            return found

        return passed_over

    watching = Break("", Circuits, "passed_over", counted)
    ends: Counter[str] = Counter()
    for seed in STORMS:
        outcome = lab.run(draw(seed), lambda: patches.applied(watching))
        assert outcome.breaches == [], seed
        ends.update(outcome.ends)
        reached["moves"] += outcome.migrations
    assert ends["Overloaded"] > 10 and ends["finished"] > ends["Overloaded"]
    assert reached["cap"] > 0 and reached["moves"] > 3 * len(STORMS)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (MUTATIONS["no-budget-of-moves"], " moves of "),
        (MUTATIONS["moves-beside-the-budget"], "is moved beside the budget"),
        (PAST_BUGS["memory-costs-others"].undo, "refuses with room: the worker failed"),
        (MUTATIONS["no-cap-of-ejection"], " decode workers passed over"),
    ],
)
def test_an_exceeded_bound_is_seen(broken: Break, words: str) -> None:
    breaches = (
        breach
        for seed in STORMS[:10]
        for breach in lab.run(draw(seed), partial(patches.applied, broken)).breaches
    )
    assert any(words in breach for breach in breaches)  # the first one ends the search
