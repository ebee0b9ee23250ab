"""Fleets that two controllers change, to which and to whose calls everything happens."""

from __future__ import annotations

import pytest

from baton.simulation import lab
from baton.simulation.fleet.controlled_world import REDIS, STAGES, STEP_FAULTS
from baton.simulation.fleet.draw_scenario import CONTROLLED_EVERY, CONTROLLED_SEED, draw
from baton.simulation.fleet.scenario import Fault
from baton.simulation.mutations import mutations
from baton.simulation.mutations.control_mutations import OF_CONTROL
from baton.simulation.mutations.patches import broken_promises
from tests.support.controller_breaks import CONTROLLER_BREAKS

pytestmark = pytest.mark.usefixtures("quiet_logs")

SEEDS = [CONTROLLED_SEED + CONTROLLED_EVERY * number for number in range(200)]
SMOKE = (980, 2580, 3980)  # each has steps, of roles and of the number
SMOKE_BREAKS = {"remove-undrained-workers", "recall-no-memory", "obey-late-orders"}


def test_all_kinds_of_faults_befall_controllers() -> None:
    drawn = [event.does for seed in SEEDS for event in draw(seed).faults]
    faults = [fault for fault in drawn if isinstance(fault, Fault)]
    assert {fault.what for fault in faults if fault.kind == "redis"} == set(REDIS)
    found = {fault.what for fault in faults if fault.kind == "control"}
    leaders = {f"{how} {stage}" for how in ("killed", "paused") for stage in STAGES}
    assert found == leaders | set(STEP_FAULTS)


def test_a_fleet_serves_all_whatever_happens_to_controllers() -> None:
    for seed in SMOKE:
        outcome = lab.run(draw(seed))
        assert outcome.breaches == [], seed
        assert not outcome.void, seed
        assert outcome.orders >= 2, seed


@pytest.mark.nightly
@pytest.mark.parametrize("seed", SEEDS[:60])
def test_more_fleets_that_controllers_change(seed: int) -> None:
    assert lab.run(draw(seed)).breaches == []


@pytest.mark.parametrize(
    "name",
    [
        name if name in SMOKE_BREAKS else pytest.param(name, marks=pytest.mark.nightly)
        for name in sorted(OF_CONTROL)
    ],
)
def test_a_break_of_controllers_is_caught_for_what_it_breaks(name: str) -> None:
    seed, words = CONTROLLER_BREAKS[name]
    found = broken_promises(lab.run(draw(seed), mutations.named(name)).breaches)
    assert any(words in line for line in found), found


@pytest.mark.nightly
def test_a_run_with_controllers_is_the_same_each_time() -> None:
    first, second = list[str](), list[str]()
    for trace in (first, second):
        lab.run(draw(SEEDS[0]), trace=trace)
    assert first == second
