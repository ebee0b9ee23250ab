"""What the lab takes for a breach of the controllers' promises, and what a fault excuses.

Fleets run on virtual time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from baton.runtime.registry import Role
from baton.simulation.control.controlled_fleet import LabControllers
from baton.simulation.control.order_desk import DrainOrder, Order, RoleOrder
from baton.simulation.fleet.draw_scenario import draw
from baton.simulation.fleet.scenario import ControlPlan, Fault
from baton.simulation.fleet.world import World
from baton.simulation.invariants.control import ControlRules
from baton.simulation.virtual import virtual_loop
from baton.simulation.virtual.virtual_loop import VirtualLoop

NAMES = ("p0", "d0", "d1")
RESTARTED_S = 20.0  # an order is over by then

pytestmark = pytest.mark.usefixtures("quiet_logs")


class Scene:
    """A fleet without controllers: the test orders. `homes` are roles of a supervisor's start."""

    def __init__(self, homes: dict[str, Role]) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.world = World(loop, draw(0).config, random.Random(1))
        self.world.share_registry()
        self.breaches: list[str] = []
        self.fleet = LabControllers(self.world, ControlPlan(NAMES, 1, 6, 0.5), homes)
        self.rules = ControlRules(self.world, self.fleet, self.breaches)
        for name in NAMES:
            self.world.start_worker(name, "prefill" if name == "p0" else "decode", 16)

    def boot_id(self, name: str) -> str:
        return self.world.workers[name].record.boot_id

    def order(self, name: str, order: Order) -> None:
        self.fleet.desk.answer(self.world.workers[name], order)

    async def drain(self, name: str) -> None:
        """Order a worker to drain, and wait for its next boot."""
        self.order(name, DrainOrder(self.boot_id(name)))
        await asyncio.sleep(RESTARTED_S)

    def kill(self, name: str) -> Callable[[], None]:
        """Kill a worker, and return what starts it again."""
        return self.fleet.strike(Fault("control", (name,), 1.0, "worker killed"))

    async def restart(self, name: str) -> None:
        """Kill a worker and start it again."""
        back = self.kill(name)
        await asyncio.sleep(1.0)
        back()
        await asyncio.sleep(1.0)

    def remove_last(self) -> None:
        pool = self.fleet.pool
        pool.resize(pool.count(), pool.count().asked - 1)


def on_loop(test: Callable[[Scene], Awaitable[None]], **homes: Role) -> None:
    async def main() -> None:
        await test(Scene(homes))

    virtual_loop.run(main())


def test_a_role_that_a_fault_has_emptied_is_excused() -> None:
    async def test(scene: Scene) -> None:
        backs = [scene.kill("d0"), scene.kill("d1")]
        await asyncio.sleep(1.0)
        for back in backs:
            back()
        await asyncio.sleep(1.0)
        assert scene.breaches == []
        assert scene.rules.excuse(0.5, 0.6) and not scene.rules.excuse(10.0, 11.0)

    on_loop(test)


def test_an_excuse_ends_once_the_killed_worker_is_back() -> None:
    async def test(scene: Scene) -> None:
        await scene.restart("d0")
        await scene.drain("d1")
        assert scene.breaches == []
        scene.kill("p0")  # of the other role
        scene.order("d0", DrainOrder(scene.boot_id("d0")))
        scene.order("d1", DrainOrder(scene.boot_id("d1")))
        assert any("d1 is drained, the last decode worker" in each for each in scene.breaches)
        await asyncio.sleep(0.3)
        assert any("no decode worker is left" in each for each in scene.breaches)
        now_s = scene.world.loop.world_s
        assert not scene.rules.excuse(now_s, now_s), "no fault has killed a decode worker"

    on_loop(test)


def test_a_role_is_excused_until_it_has_a_worker_again() -> None:
    """The killed worker comes back in the other role."""

    async def test(scene: Scene) -> None:
        await scene.restart("p0")
        assert scene.world.workers["p0"].role == "decode"
        await asyncio.sleep(1.0)
        assert scene.breaches == []
        scene.order("d1", RoleOrder(scene.boot_id("d1"), "prefill", 1))
        await asyncio.sleep(RESTARTED_S)
        assert scene.world.workers["d1"].role == "prefill"
        scene.order("d1", RoleOrder(scene.boot_id("d1"), "decode", 1))
        (breach,) = scene.breaches
        assert "d1 is made a decode worker, the last prefill worker" in breach

    on_loop(test, p0="decode")


def test_a_worker_that_changes_its_role_may_not_be_removed() -> None:
    async def test(scene: Scene) -> None:
        scene.order("d1", RoleOrder(scene.boot_id("d1"), "prefill", 1))
        scene.remove_last()
        (breach,) = scene.breaches
        assert "d1 is removed, and had no order to drain" in breach

    on_loop(test)


@pytest.mark.parametrize("boots", [1, 2])
def test_the_next_boot_of_a_drained_worker_may_be_removed(boots: int) -> None:
    """It is there again before the number falls; the boot after it has had no order."""

    async def test(scene: Scene) -> None:
        first = scene.boot_id("d1")
        await scene.drain("d1")
        assert scene.boot_id("d1") != first
        if boots > 1:
            await scene.restart("d1")
        scene.remove_last()
        words = ["the controllers: d1 is removed, and had no order to drain"]
        assert scene.breaches == (words if boots > 1 else [])

    on_loop(test)


def test_a_number_has_another_version_once_a_worker_drains() -> None:
    """As a StatefulSet, whose status counts the pods that are ready."""

    async def test(scene: Scene) -> None:
        versions = [scene.fleet.pool.count().version]
        scene.order("d1", DrainOrder(scene.boot_id("d1")))
        await asyncio.sleep(0.01)
        versions.append(scene.fleet.pool.count().version)
        await asyncio.sleep(RESTARTED_S)
        versions.append(scene.fleet.pool.count().version)
        scene.kill("d0")
        versions.append(scene.fleet.pool.count().version)
        assert len(set(versions)) == 4

    on_loop(test)
