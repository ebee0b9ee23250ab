"""A worker that joins a loaded fleet: its share grows, is fair in time, and is never all.
On virtual time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from baton.router.dispatch.attempt import Attempt
from baton.router.fleet.slow_start import growing_share
from baton.router.fleet.worker_link import WorkerLink
from baton.simulation import lab
from baton.simulation.fleet.draw_scenario import JOINING_EVERY, JOINING_SEED, draw
from baton.simulation.fleet.history import FINISHED, Ask, History, serve
from baton.simulation.fleet.scenario import Fault
from baton.simulation.fleet.world import RouterProcess, World
from baton.simulation.invariants.shares import Shares
from baton.simulation.mutations import mutations
from baton.simulation.virtual import virtual_loop
from baton.simulation.virtual.virtual_loop import VirtualLoop
from tests.support.router_books import submitter_of

pytestmark = pytest.mark.usefixtures("quiet_logs")

PER_S = 12
SEEDS = [JOINING_SEED + JOINING_EVERY * number for number in range(3)]


class Load:
    """Three decode workers, two prefill workers, a router, and PER_S requests each second, which
    take two seconds each."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        self._dice = random.Random(2)  # prompts have no prefix in common
        config = draw(0).config
        router = replace(config.router, max_requests=200, placement="disaggregated")
        step = replace(config.step, max_sequences=32, max_queue=64)
        self.world = World(
            loop, replace(config, router=router, step=step), random.Random(1), step_s=0.04
        )
        self.breaches: list[str] = []
        self._shares = Shares(self.breaches)
        self.world.router_started = self._over
        self.histories: list[History] = []
        self.placed: list[tuple[str, str]] = []  # decode worker, and prefill worker asked first
        for name in ("p0", "p1"):
            self.world.start_worker(name, "prefill", 400)
        for name in ("d0", "d1", "d2"):
            self.world.start_worker(name, "decode", 400)
        self.world.start_router("r0")

    def _over(self, process: RouterProcess) -> None:
        self._shares.over_router(process)
        submitter = submitter_of(process.dispatcher)
        try_place = submitter.try_place

        def placed(attempt: Attempt) -> WorkerLink:
            link = try_place(attempt)
            boot = self.world.boots.get(attempt.prefill)
            name = boot.machine.name if boot else ""
            self.placed.append((link.worker_id, name))
            return link

        submitter.try_place = placed  # type: ignore[method-assign]  # wraps this instance alone

    async def second(self) -> list[tuple[str, str]]:
        """Ask PER_S requests within a second. Returns where they were placed."""
        before = len(self.placed)
        router = self.world.routers["r0"]
        for _ in range(PER_S):
            number = len(self.histories)
            prompt = tuple(self._dice.randrange(100) for _ in range(12))
            ask = Ask(router="r0", prompt=prompt, max_tokens=24, deadline_s=20.0)
            history = History(ask, number, asked_s=self.loop.world_s)
            self.histories.append(history)
            work = serve(router, history, lambda: self.loop.world_s)
            history.task = router.machine.spawn(work, history.request_id)
            await asyncio.sleep(1 / PER_S)
        return self.placed[before:]

    async def joined(self, name: str) -> None:
        fleet = self.world.routers["r0"].fleet
        while name not in {view.worker_id for view in fleet.views()}:
            await asyncio.sleep(0.01)

    async def end(self) -> None:
        await asyncio.sleep(6.0)
        assert {end for history in self.histories for end in history.ends} == {FINISHED}
        assert self.breaches == []


async def restarted(load: Load, name: str) -> tuple[list[int], float]:
    """Restart a worker under load. Returns its placements of each of 13 seconds from its return,
    and the fair share of a second."""
    await asyncio.sleep(1.0)
    for _ in range(5):
        await load.second()
    load.world.kill(name, silent=False)
    await load.second()
    load.world.restart(name)
    await load.joined(name)
    role = name[0]
    fair = PER_S / sum(worker.startswith(role) for worker in load.world.workers)
    pairs = [await load.second() for _ in range(13)]
    return [[pair[role == "p"] for pair in second].count(name) for second in pairs], fair


@pytest.mark.parametrize("name", ["d0", pytest.param("p0", marks=pytest.mark.nightly)])
def test_restarted_worker_has_its_fair_share_within_ten_seconds(name: str) -> None:
    async def main() -> None:
        load = Load()
        got, fair = await restarted(load, name)
        await load.end()
        for second in range(10):  # by the second, and all so far
            allowed = fair * sum(growing_share(each + 1) for each in range(second + 1))
            assert sum(got[: second + 1]) <= 2 + allowed, got
        assert got[0] <= 0.3 * fair + 1 and sum(got[8:12]) >= 0.9 * 4 * fair, got

    virtual_loop.run(main())


@pytest.mark.parametrize(
    "seed",
    [SEEDS[1], *(pytest.param(seed, marks=pytest.mark.nightly) for seed in SEEDS[::2])],
)
def test_no_seed_gives_a_new_worker_more_than_its_share(seed: int) -> None:
    scenario = draw(seed)
    (fault,) = scenario.faults
    assert isinstance(fault.does, Fault) and fault.does.kind in ("kill", "drain", "role")
    outcome = lab.run(scenario)
    assert outcome.breaches == [] and not outcome.void
    without = lab.run(scenario, mutations.named("no-slow-start"))
    (name,) = fault.does.targets
    assert any(f" {name} joined " in breach for breach in without.breaches)
