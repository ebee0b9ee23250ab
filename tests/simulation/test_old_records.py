"""A record of a worker that is gone, at an address that another worker has by now."""

from __future__ import annotations

import asyncio
import random

from baton.runtime.registry import WorkerRecord
from baton.simulation.fleet.draw_scenario import draw
from baton.simulation.fleet.history import FINISHED, Ask, History, serve
from baton.simulation.fleet.world import World
from baton.simulation.virtual import virtual_loop
from baton.simulation.virtual.virtual_loop import VirtualLoop


def test_a_record_of_another_worker_costs_its_requests_nothing() -> None:
    """As where a port is used again before the old announcement has faded."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        world = World(loop, draw(0).config, random.Random(1), step_s=0.02)
        for name, role in (("p0", "prefill"), ("d0", "decode")):
            world.start_worker(name, role, 32)
        for name, role in (("p9", "prefill"), ("d9", "decode")):
            world.registry.announce(WorkerRecord(name, "9" * 32, role, "d0", "", "hash", 1))
        router = world.start_router("r0")
        await asyncio.sleep(1)
        assert router.fleet.linked_counts() == {"prefill": 1, "decode": 1}
        asks = [Ask("r0", tuple(range(20)), 60, seed=number) for number in range(3)]
        histories = [History(ask, number) for number, ask in enumerate(asks)]
        serving = [serve(router, history, lambda: loop.world_s) for history in histories]
        await asyncio.gather(*serving)
        for history in histories:
            assert history.ends == [FINISHED] and history.migrations == 0, history.detail
            assert history.tokens == [history.ask.expected(0)]

    virtual_loop.run(main())
