"""Two routers over a simulated Redis server share circuits and load hints, and lose them alone."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from baton.router.fleet.circuits import STRIKES, SUSPECTED_STRIKES, Circuits
from baton.router.fleet.other_routers import LIFETIME_S
from baton.router.fleet.state_sharing import REPEAT_S, SHARE_S
from baton.simulation import lab
from baton.simulation.fleet.draw_scenario import draw
from baton.simulation.fleet.world import RouterProcess, World
from baton.simulation.mutations import mutations
from baton.simulation.virtual import virtual_loop
from baton.simulation.virtual.virtual_loop import VirtualLoop

pytestmark = pytest.mark.usefixtures("quiet_logs")

SOON_S = 2 * SHARE_S + 0.1
FORGED_SEED, REPLAYED_SEED = 104, 304


class Scene:
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        config = draw(0).config
        config = replace(config, router=replace(config.router, max_requests=64))
        self.world = World(loop, config, random.Random(1))
        self.world.share_registry()
        for name in ("d0", "d1", "d2"):
            self.world.start_worker(name, "decode", 80)
        self.routers = [self.world.start_router(name) for name in ("r0", "r1")]

    def boot(self, name: str) -> bytes:
        return self.world.workers[name].boot_id

    def circuits(self, number: int) -> Circuits:
        return self.routers[number].fleet.circuits

    def fail(self, number: int, name: str, times: float) -> None:
        """Record so many failures of a worker at one router."""
        for _ in range(int(times)):
            self.circuits(number).record_failure(self.boot(name), self.now_s(self.routers[number]))

    def now_s(self, router: RouterProcess) -> float:
        return router.machine.context.run(asyncio.get_running_loop().time)


def test_failures_at_one_router_open_the_others_circuit_sooner() -> None:
    async def main() -> None:
        scene = Scene()
        await asyncio.sleep(3.0)
        scene.fail(0, "d0", STRIKES)
        await asyncio.sleep(SOON_S)
        assert scene.circuits(1).suspected == {scene.boot("d0")}
        assert scene.circuits(1).failing() == []  # not without a failure of its own
        scene.fail(1, "d0", SUSPECTED_STRIKES)
        scene.fail(1, "d1", SUSPECTED_STRIKES)
        assert scene.circuits(1).failing() == [scene.boot("d0")]

    virtual_loop.run(main())


def test_lost_server_loses_the_sharing_alone() -> None:
    async def main() -> None:
        scene = Scene()
        await asyncio.sleep(3.0)
        scene.fail(0, "d0", STRIKES)
        await asyncio.sleep(SOON_S)
        shared = scene.world.shared
        assert shared is not None
        shared.server.kill()
        await asyncio.sleep(LIFETIME_S + 1.0)
        assert scene.circuits(1).suspected == frozenset()
        assert scene.circuits(0).failing() == [scene.boot("d0")]
        scene.fail(1, "d1", STRIKES)
        assert scene.circuits(1).failing() == [scene.boot("d1")]
        assert all(len(router.fleet.views()) == 3 for router in scene.routers)
        shared.server.start()
        await asyncio.sleep(REPEAT_S + 3.0)
        assert scene.circuits(1).suspected == {scene.boot("d0")}
        assert scene.circuits(0).suspected == {scene.boot("d1")}

    virtual_loop.run(main())


def test_router_that_ends_is_forgotten_with_its_suspicions() -> None:
    async def main() -> None:
        scene = Scene()
        await asyncio.sleep(3.0)
        scene.fail(0, "d0", STRIKES)
        await asyncio.sleep(SOON_S)
        scene.world.kill("r0", silent=False)
        await asyncio.sleep(LIFETIME_S + 1.0)
        assert scene.circuits(1).suspected == frozenset()

    virtual_loop.run(main())


def test_placements_of_one_router_cost_at_the_other() -> None:
    async def main() -> None:
        scene = Scene()
        await asyncio.sleep(3.0)
        hinted = set()
        for _ in range(20):  # until the worker's own report says it
            link = scene.routers[0].fleet.link("d0")
            assert link is not None
            link.placed_requests, link.placed_tokens = 5, 500
            await asyncio.sleep(0.05)
            views = {view.worker_id: view.hinted for view in scene.routers[1].fleet.views()}
            hinted.add(views["d0"])
            assert views["d1"] == views["d2"] == (0, 0)
        assert hinted == {(0, 0), (5, 500)}
        await asyncio.sleep(2.0)
        assert {view.hinted for view in scene.routers[1].fleet.views()} == {(0, 0)}

    virtual_loop.run(main())


@pytest.mark.parametrize(
    ("seed", "name"),
    [(FORGED_SEED, "take-unsigned-reports"), (REPLAYED_SEED, "count-replayed-reports")],
)
def test_forged_and_copied_reports_count_for_nothing(seed: int, name: str) -> None:
    assert lab.run(draw(seed)).breaches == []
    without = lab.run(draw(seed), mutations.named(name)).breaches
    assert any(
        " of a report" in breach or "a report that none sent" in breach for breach in without
    )
