"""A slow worker under a load that lasts: passed over in time, and used again afterwards.
On virtual time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from baton.router.fleet.circuits import OPEN_S
from baton.simulation.fleet.draw_scenario import draw
from baton.simulation.fleet.history import FINISHED, Ask, History, serve
from baton.simulation.fleet.world import World
from baton.simulation.invariants.checks import Watch
from baton.simulation.virtual import virtual_loop
from baton.simulation.virtual.virtual_loop import VirtualLoop

pytestmark = pytest.mark.usefixtures("quiet_logs")

SLOW = "d1"
SLOWNESS = 10.0
OPENS_WITHIN_S = (
    3.0 + 0.5
)  # docs/reliability/promises.md, once its mean step is five times its fellows'
MEAN_S = 1.5  # for the mean of its steps to come to that
BACK_WITHIN_S = 1.2 * OPEN_S + 1.0
EVERY_S = 0.04


class Load:
    """A router, a prefill worker and as many decode workers; a request every EVERY_S."""

    def __init__(self, decodes: int) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        config = draw(0).config
        router = replace(config.router, max_requests=64, placement="local")
        config = replace(
            config,
            router=router,
            step=replace(config.step, max_sequences=16, max_queue=32),
        )
        self.world = World(loop, config, random.Random(1), step_s=0.01)
        self.watch = Watch(self.world)
        self.world.started, self.world.router_started = self.watch.over, self.watch.over_router
        self.histories: list[History] = []
        self.over = 0  # at most so many decode workers were passed over at once
        self.world.start_worker("p0", "prefill", 80)
        for number in range(decodes):
            self.world.start_worker(f"d{number}", "decode", 80)
        self.world.start_router("r0")

    def passed_over(self) -> set[str]:
        fleet = self.world.routers["r0"].fleet
        found = {e.worker_id for e in fleet.views() if e.boot_id in fleet.passed_over()}
        self.over = max(self.over, len(found))
        return found

    async def until(self, passed_over: set[str], within_s: float) -> float:
        """Ask until just these are passed over. Returns how long it took."""
        begun_s = self.loop.world_s
        while self.passed_over() != passed_over:
            assert self.loop.world_s - begun_s < within_s, self.passed_over()
            await self.ask()
        return self.loop.world_s - begun_s

    async def ask(self) -> None:
        router, number = self.world.routers["r0"], len(self.histories)
        prompt = tuple((number + index) % 100 for index in range(6))
        ask = Ask(router="r0", prompt=prompt, max_tokens=6, deadline_s=20.0)
        history = History(ask, number, asked_s=self.loop.world_s)
        self.histories.append(history)
        work = serve(router, history, lambda: self.loop.world_s)
        history.task = router.machine.spawn(work, history.request_id)
        await asyncio.sleep(EVERY_S)


def test_a_slow_worker_is_passed_over_in_time_and_used_again() -> None:
    async def main() -> None:
        load = Load(decodes=3)
        await asyncio.sleep(1.0)
        for _ in range(50):
            await load.ask()
            assert load.passed_over() == set()
        slow = load.world.workers[SLOW].machine
        slow.slowness = SLOWNESS
        await load.until({SLOW}, MEAN_S + OPENS_WITHIN_S)
        slow.slowness = 1.0
        await load.until(set(), BACK_WITHIN_S)
        before = load.world.workers[SLOW].engine.steps
        for _ in range(100):
            await load.ask()
        assert load.world.workers[SLOW].engine.steps > before + 50
        await asyncio.sleep(2.0)
        assert {end for history in load.histories for end in history.ends} == {FINISHED}
        assert load.over == 1 and load.watch.breaches == []

    virtual_loop.run(main())


def test_at_most_a_third_of_slow_workers_is_passed_over() -> None:
    async def main() -> None:
        load = Load(decodes=5)
        await asyncio.sleep(1.0)
        for name in ("d1", "d2"):
            load.world.workers[name].machine.slowness = SLOWNESS
        for _ in range(int((MEAN_S + OPENS_WITHIN_S) / EVERY_S)):
            load.passed_over()
            await load.ask()
        assert load.over == 1 and load.watch.breaches == []

    virtual_loop.run(main())
