"""An upgrade to workers that exchange KV by another protocol, under load: each request's KV moves,
never between workers of two protocols, and no handshake has to refuse. On virtual time."""

from __future__ import annotations

import asyncio
import random

import pytest

from baton.kv_transfer import handshake
from baton.proto.handoff_pb2 import HandshakeMessage
from baton.runtime import handoff_metrics
from baton.runtime.config import Config, PoolConfig, RouterConfig, StepConfig, WorkerConfig
from baton.simulation.fleet.history import FINISHED, Ask, History, serve
from baton.simulation.fleet.rolling_restart import roll
from baton.simulation.fleet.world import World
from baton.simulation.virtual import virtual_loop
from baton.simulation.virtual.virtual_loop import VirtualLoop
from tests.support.metric_values import metric_value

ROLES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
# As docs/kubernetes.md: half of each pool, then the rest of the decode workers, then of the others.
ORDER = ("p1", "d1", "d0", "p0")
REASONS = ("placed", "no_candidate", "recompute")
ASK_EVERY_S = 0.2
CONFIG = Config(
    router=RouterConfig(placement="disaggregated"),
    pool=PoolConfig(block_size=4),
    step=StepConfig(prefill_tokens=32, chunk_tokens=16, local_prefill_tokens=8, max_sequences=4),
    worker=WorkerConfig(drain_s=5.0),
)


class Upgrade:
    """Two workers of each role, and a router that is asked all the time."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.world = World(loop, CONFIG, random.Random(1), step_s=0.02)
        self.asked: list[History] = []

    def start(self) -> None:
        for name, role in ROLES.items():
            self.world.start_worker(name, "prefill" if role == "prefill" else "decode", 128)
        self.world.start_router("r0")

    async def ask(self) -> None:
        loop, router = self.world.loop, self.world.routers["r0"]
        while True:
            first = 7 * len(self.asked) % 900
            ask = Ask("r0", tuple(range(first, first + 40)), 12, deadline_s=600.0)
            history = History(ask, len(self.asked))
            self.asked.append(history)
            history.task = router.machine.spawn(
                serve(router, history, lambda: loop.world_s), history.request_id
            )
            await asyncio.sleep(ASK_EVERY_S)

    async def replace(self, name: str) -> None:
        """Wait until another process serves under this name, as a StatefulSet does."""
        before = self.world.workers[name].boot_id
        self.world.machine(name).spawn(roll(self.world, name), "drain")
        while self.world.workers[name].boot_id == before:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)

    async def answered(self) -> None:
        async with asyncio.timeout(120):
            while not all(history.ends for history in self.asked):
                await asyncio.sleep(0.05)
        for history in self.asked:
            assert history.ends == [FINISHED], history.detail
            assert history.tokens == [history.ask.expected(0)]


def local_prefills() -> list[float]:
    return [metric_value(handoff_metrics.LOCAL_PREFILLS.labels(name)) for name in REASONS]


def test_kv_moves_throughout_between_alike_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: set[tuple[int, int]] = set()
    check = handshake.check

    def watched(mine: HandshakeMessage, theirs: HandshakeMessage) -> None:
        versions = (each.compatibility.protocol_version for each in (mine, theirs))
        compared.add((next(versions), next(versions)))
        check(mine, theirs)

    monkeypatch.setattr(handshake, "check", watched)
    before = local_prefills()

    async def main() -> None:
        upgrade = Upgrade()
        upgrade.start()
        await asyncio.sleep(1)
        asking = asyncio.create_task(upgrade.ask())
        monkeypatch.setattr(handshake, "PROTOCOL_VERSION", 2)  # of what starts from now on
        for name in ORDER:
            asked = len(upgrade.asked)
            await upgrade.replace(name)
            assert len(upgrade.asked) > asked
        asking.cancel()
        await upgrade.answered()

    virtual_loop.run(main())
    assert compared == {(1, 1), (2, 2)}
    assert local_prefills() == before
