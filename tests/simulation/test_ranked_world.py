"""Worlds of workers with ranks: one that is lost ends its worker, and costs no answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from baton.engine.ranks.loading import HUNG_S
from baton.engine.scheduling.batch import Draw, Slice, StepBatch
from baton.runtime.errors import DeviceLost
from baton.runtime.sampling import SamplingParams
from baton.simulation import lab
from baton.simulation.fleet.draw_scenario import RANKED_EVERY, RANKED_SEEDS, draw
from baton.simulation.fleet.faults import RANK_HUNG_S
from baton.simulation.fleet.hash_engine import RECORD_BYTES, HashEngine, record
from baton.simulation.fleet.history import Ask
from baton.simulation.fleet.scenario import Event, Fault, Proposing, Scenario
from baton.simulation.fleet.world import World
from tests.support.virtual_time import on_virtual_time

pytestmark = pytest.mark.usefixtures("quiet_logs")

SEEDS = [seed for seed in range(600) if seed % RANKED_EVERY in RANKED_SEEDS]
STRUCK_S = 0.15


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the workers that are started, in their order."""
    found: list[str] = []
    start = World.start_worker

    def noted(world: World, name: str, *more: object) -> object:
        found.append(name)
        return start(world, name, *more)

    monkeypatch.setattr(World, "start_worker", noted)
    return found


def one_rank(fault: Fault, proposer: Proposing | None = None) -> Scenario:
    """A small fleet of ranked workers under load, and one of their ranks that is struck."""
    made = replace(draw(SEEDS[0]), routers=("r0",), prefill={"p0": 80}, decode={"d0": 80, "d1": 80})
    events = [
        Event(0.1 + n / 100, Ask("r0", tuple(range(n, n + 18)), max_tokens=24, deadline_s=20))
        for n in range(6)
    ]
    later = Event(STRUCK_S + 4, Ask("r0", tuple(range(18)), max_tokens=4, deadline_s=20))
    events = sorted([*events, Event(STRUCK_S, fault), later], key=lambda event: event.at_s)
    return replace(made, events=tuple(events), step_s=0.003, proposer=proposer)


@pytest.mark.parametrize("worker", ["d0", "p0"])
@pytest.mark.parametrize(("what", "for_s"), [("dies", 0.0), ("stops", 6.0)])
def test_a_lost_rank_replaces_its_worker_and_costs_no_answer(
    worker: str, what: str, for_s: float, starts: list[str]
) -> None:
    outcome = lab.run(one_rank(Fault("rank", (worker,), for_s, what)))
    assert outcome.breaches == [] and outcome.ends == {"finished": 7}
    assert starts == ["p0", "d0", "d1", worker]


def test_a_rank_that_stops_briefly_ends_no_worker(starts: list[str]) -> None:
    outcome = lab.run(one_rank(Fault("rank", ("d0",), 0.4, "stops")))
    assert outcome.breaches == [] and outcome.ends == {"finished": 7}
    assert starts == ["p0", "d0", "d1"]


@pytest.mark.parametrize("worker", ["d0", "p0"])
def test_a_rank_lost_beside_a_draft_model_costs_no_answer(worker: str, starts: list[str]) -> None:
    """Its draft model has computed what the step under way was to verify."""
    outcome = lab.run(one_rank(Fault("rank", (worker,), 0.0, "dies"), "draft"))
    assert outcome.breaches == [] and outcome.ends == {"finished": 7}
    assert starts == ["p0", "d0", "d1", worker]


def test_ranked_fleets_speculate_by_either_proposer() -> None:
    assert {draw(seed).proposer for seed in SEEDS} == {None, "oracle", "draft"}


def test_ranks_of_each_role_die_and_stop() -> None:
    faults = [event.does for seed in SEEDS for event in draw(seed).faults]
    struck = {(fault.targets[0][0], fault.what) for fault in faults if isinstance(fault, Fault)}
    assert struck == {(role, what) for role in "pd" for what in ("dies", "stops")}
    assert {draw(seed).ranks for seed in SEEDS} == {2}
    assert RANK_HUNG_S == HUNG_S


@on_virtual_time
async def test_a_broken_step_leaves_a_torn_block() -> None:
    """What the missing rank would have written is not there."""
    pool = np.zeros((4, 2 * 2 * RECORD_BYTES), dtype=np.uint8)
    engine = HashEngine(pool, block_size=2, slabs=2, vocab_size=9, step_s=lambda batch: 1.0)
    draw_one = Draw(0, 2, SamplingParams(temperature=0.0))
    step = engine.submit(StepBatch((Slice([5, 6], 0, [1], (draw_one,)),)))
    await asyncio.sleep(0.5)
    engine.lose(DeviceLost("a rank ended"))
    with pytest.raises(DeviceLost):
        await step.result()
    with pytest.raises(DeviceLost):
        await engine.submit(StepBatch((Slice([5], 0, [2]),))).result()
    await engine.close()
    first, second = pool[1].reshape(2, -1)
    assert first.tobytes() == record(5, 0, 0) + record(6, 1, 0) and not second.any()
