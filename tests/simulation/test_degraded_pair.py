"""A pair that reads slowly: its decode worker avoids it while there is another prefill worker."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from baton.kv_transfer.memory_mover import Attempt, Fate
from baton.kv_transfer.peers.bandwidth_probe import READ_BLOCKS
from baton.simulation.fleet.draw_scenario import draw
from baton.simulation.fleet.history import FINISHED, Ask, History, serve
from baton.simulation.fleet.world import World
from baton.simulation.virtual import virtual_loop
from baton.simulation.virtual.virtual_loop import VirtualLoop

pytestmark = pytest.mark.usefixtures("quiet_logs")

FAST_READ_S, FLOOR_READ_S, SLOW_READ_S = 0.001, 0.01, 0.05


class Scene:
    """d0 reads slowly from p0, and fast from p1."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        config = draw(0).config
        router = replace(config.router, max_requests=64, placement="disaggregated")
        self.world = World(loop, config, random.Random(1))
        size = READ_BLOCKS * self.world.kind.block_bytes(config.pool.block_size)
        floor_gb_per_s = size / FLOOR_READ_S / 1e9
        handoff = replace(config.handoff, preflight_floor_gb_per_s=floor_gb_per_s)
        self.world.config = replace(config, router=router, handoff=handoff)
        self.world.start_worker("p0", "prefill", 80)
        self.world.start_worker("p1", "prefill", 80)
        self.world.start_worker("d0", "decode", 80)
        self.slow = (self.boot("d0"), self.boot("p0"))
        self.world.exchange.decide = self._fate
        self.world.start_router("r0")
        self.asked = 0

    def boot(self, name: str) -> bytes:
        return self.world.workers[name].boot_id

    def _fate(self, attempt: Attempt) -> Fate:
        slow = (attempt.reader, attempt.granter) == self.slow
        return Fate(delay_s=SLOW_READ_S if slow else FAST_READ_S)

    async def granters(self, requests: int) -> set[bytes]:
        """Serve requests one after the other. Returns whose blocks were read for them."""
        before = len(self.world.reads)
        router = self.world.routers["r0"]
        for _ in range(requests):
            prompt = tuple((7 * self.asked + index) % 100 for index in range(24))
            ask = Ask(router="r0", prompt=prompt, max_tokens=4, deadline_s=20.0)
            history = History(ask, self.asked, asked_s=self.loop.world_s)
            self.asked += 1
            await router.machine.spawn(
                serve(router, history, lambda: self.loop.world_s), history.request_id
            )
            assert set(history.ends) == {FINISHED}
            await asyncio.sleep(1.0)  # for the next load report
        attempts = [read.attempt for read in self.world.reads[before:]]
        return {attempt.granter for attempt in attempts if attempt.checksummed}

    def marks(self) -> frozenset[bytes]:
        (view,) = [e for e in self.world.routers["r0"].fleet.views() if e.role == "decode"]
        return frozenset(view.degraded)


def test_a_slow_pair_is_avoided_until_there_is_no_other() -> None:
    async def main() -> None:
        scene = Scene()
        await asyncio.sleep(1.0)
        assert scene.boot("p0") in await scene.granters(1)
        assert scene.marks() == {scene.boot("p0")}
        assert await scene.granters(5) == {scene.boot("p1")}
        scene.world.kill("p1", silent=False)
        await asyncio.sleep(5.0)
        assert await scene.granters(2) == {scene.boot("p0")}

    virtual_loop.run(main())


def test_pair_that_became_fast_is_used_again_after_a_minute() -> None:
    """Its connection was never lost."""

    async def main() -> None:
        scene = Scene()
        await asyncio.sleep(1.0)
        assert scene.boot("p0") in await scene.granters(1)
        assert scene.marks() == {scene.boot("p0")}
        scene.slow = (b"", b"")
        await asyncio.sleep(50.0)
        assert scene.marks() == {scene.boot("p0")}
        await asyncio.sleep(30.0)
        assert scene.marks() == frozenset()
        assert scene.boot("p0") in await scene.granters(4)

    virtual_loop.run(main())
