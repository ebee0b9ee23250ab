"""Prefill workers are restarted while requests wait for room on a decode worker: their prompts are
computed by those that are there when their turn comes, and not chunk by chunk on the decode
worker. On virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from baton.runtime import handoff_metrics
from baton.runtime.config import Config, PoolConfig, RouterConfig, StepConfig, WorkerConfig
from baton.simulation.fleet.history import FINISHED, Ask, History, serve
from baton.simulation.fleet.rolling_restart import roll
from baton.simulation.fleet.world import World
from baton.simulation.virtual import virtual_loop
from baton.simulation.virtual.virtual_loop import VirtualLoop
from tests.support.metric_values import metric_value

PREFILLS = ("p0", "p1")
REASONS = ("placed", "no_candidate", "recompute")
CONFIG = Config(
    router=RouterConfig(placement="disaggregated"),
    pool=PoolConfig(block_size=4),
    step=StepConfig(prefill_tokens=32, chunk_tokens=16, local_prefill_tokens=8, max_sequences=1),
    worker=WorkerConfig(drain_s=0.5),
)


class Fleet:
    """A router, two prefill workers, and a decode worker that takes one request at a time."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.world = World(loop, CONFIG, random.Random(1), step_s=0.05)
        for name in PREFILLS:
            self.world.start_worker(name, "prefill", 64)
        self.world.start_worker("d0", "decode", 128)
        self.world.start_router("r0")
        self.asked: list[History] = []
        self._counted = self._local()

    def ask(self, first: int, max_tokens: int) -> None:
        loop, router = self.world.loop, self.world.routers["r0"]
        ask = Ask("r0", tuple(range(first, first + 40)), max_tokens, deadline_s=600.0)
        history = History(ask, len(self.asked))
        self.asked.append(history)
        history.task = router.machine.spawn(
            serve(router, history, lambda: loop.world_s), history.request_id
        )

    async def restart_prefills(self) -> None:
        """One after the other, and each is linked again."""
        for name in PREFILLS:
            before = self.world.workers[name].boot_id
            self.world.machine(name).spawn(roll(self.world, name), "drain")
            while self.world.workers[name].boot_id == before:
                await asyncio.sleep(0.05)
            await asyncio.sleep(1.0)
            assert self.world.routers["r0"].fleet.linked_counts()["prefill"] == len(PREFILLS)

    async def all_answered(self, within_s: float = 120) -> None:
        async with asyncio.timeout(within_s):
            while not all(history.ends for history in self.asked):
                await asyncio.sleep(0.05)
        for history in self.asked:
            assert history.ends == [FINISHED], history.detail
            assert history.tokens == [history.ask.expected(0)]

    def computed_here(self) -> dict[str, float]:
        """Prompts that the decode worker has computed itself, by why."""
        return {name: count - self._counted[name] for name, count in self._local().items()}

    def _local(self) -> dict[str, float]:
        return {name: metric_value(handoff_metrics.LOCAL_PREFILLS.labels(name)) for name in REASONS}


def on_fleet(test: Callable[[Fleet], Awaitable[None]]) -> None:
    async def main() -> None:
        fleet = Fleet()
        await asyncio.sleep(1)
        await test(fleet)

    virtual_loop.run(main())


@pytest.mark.parametrize("restarts", [1, 3])
def test_requests_waiting_in_restarts_use_the_new_workers(restarts: int) -> None:
    async def test(fleet: Fleet) -> None:
        fleet.ask(0, 400)
        await asyncio.sleep(0.2)
        for number in range(1, 4):
            fleet.ask(100 * number, 5)
        for _ in range(restarts):
            await fleet.restart_prefills()
        assert not any(history.ends for history in fleet.asked), "no request has waited"
        await fleet.all_answered()
        assert fleet.computed_here() == dict.fromkeys(REASONS, 0)
        assert [history.migrations for history in fleet.asked] == [0, 1, 1, 1]
        boots = [fleet.world.workers[name] for name in PREFILLS]
        assert sum(process.engine.steps for process in boots) >= 3

    on_fleet(test)


def test_a_returned_request_waits_through_the_next_restart_too() -> None:
    """Each of them is placed again once for each restart that it waited through."""

    async def test(fleet: Fleet) -> None:
        for number in range(3):
            fleet.ask(100 * number, 400)
        await fleet.restart_prefills()
        while not fleet.asked[0].ends:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        await fleet.restart_prefills()
        await fleet.all_answered()
        assert fleet.computed_here() == dict.fromkeys(REASONS, 0)
        assert max(history.migrations for history in fleet.asked) == 2

    on_fleet(test)


def test_a_router_with_a_stale_view_causes_no_endless_migration() -> None:
    """Its links stand, and the registry has forgotten every prefill worker."""

    async def test(fleet: Fleet) -> None:
        registry = fleet.world.registry
        for record in registry.workers():
            if record.role == "prefill":
                registry.withdraw(record.worker_id, record.boot_id)
        fleet.ask(0, 5)
        await fleet.all_answered(within_s=3)
        assert fleet.asked[0].migrations == 1
        assert fleet.computed_here() == {"placed": 1, "no_candidate": 0, "recompute": 0}

    on_fleet(test)
