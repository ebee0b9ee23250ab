"""Fleets that meet over a Redis server, to which everything happens that is drawn for it."""

from __future__ import annotations

import pytest

from baton.simulation import lab
from baton.simulation.fleet.draw_scenario import REDIS_EVERY, REDIS_SEEDS, draw
from baton.simulation.fleet.redis_faults import KINDS
from baton.simulation.fleet.scenario import Fault
from baton.simulation.mutations import mutations
from baton.simulation.mutations.membership_mutations import OF_MEMBERSHIP
from baton.simulation.mutations.patches import broken_promises

pytestmark = pytest.mark.usefixtures("quiet_logs")

SEEDS = [seed for seed in range(50 * REDIS_EVERY) if seed % REDIS_EVERY in REDIS_SEEDS]
CAUGHT_BY = {
    "forget-in-an-outage": (37, "forgot d0"),
    "take-unsigned-entries": (104, "which no worker announced"),
    "count-replayed-entries": (197, "after that boot's end"),
    "announce-once": (37, "is not announced again"),
    "ready-without-workers": (24, "is ready and has no link to a decode worker"),
}


def test_a_fleet_serves_all_whatever_happens_to_its_registry() -> None:
    drawn = [event.does for seed in SEEDS for event in draw(seed).faults]
    faults = [fault for fault in drawn if isinstance(fault, Fault)]
    assert {fault.what for fault in faults if fault.kind == "redis"} == set(KINDS)
    assert {"kill", "drain", "reset", "pause"} <= {fault.kind for fault in faults}
    for seed in SEEDS[:14]:
        outcome = lab.run(draw(seed))
        assert outcome.breaches == [], seed
        assert not outcome.void, seed


@pytest.mark.nightly
@pytest.mark.parametrize("seed", SEEDS[14:40])
def test_more_fleets_on_a_registry_with_faults(seed: int) -> None:
    assert lab.run(draw(seed)).breaches == []


@pytest.mark.parametrize("name", sorted(OF_MEMBERSHIP))
def test_a_break_of_the_registry_is_caught_for_what_it_breaks(name: str) -> None:
    seed, words = CAUGHT_BY[name]
    found = broken_promises(lab.run(draw(seed), mutations.named(name)).breaches)
    assert any(words in line for line in found), found


def test_a_run_is_the_same_each_time() -> None:
    first, second = list[str](), list[str]()
    for trace in (first, second):
        lab.run(draw(SEEDS[1]), trace=trace)
    assert first == second
