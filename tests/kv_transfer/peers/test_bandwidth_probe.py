"""First contact: measured once, blocks returned, and a stuck READ kept in quarantine."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from structlog.testing import capture_logs

from baton.engine.scheduling.blocks import BlockPool, Hold
from baton.kv_transfer import preflight
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.memory_mover import Fate, MemoryExchange, MemoryMover
from baton.kv_transfer.peers import bandwidth_probe
from baton.kv_transfer.peers.bandwidth_probe import BandwidthProbe
from baton.kv_transfer.preflight import PreflightFailed, PreflightReport
from baton.runtime import handoff_metrics
from tests.support.metric_values import metric_value
from tests.support.waiting import eventually

pytestmark = pytest.mark.timed

OWN, PEER = b"o" * 16, b"p" * 16


class Bench:
    def __init__(self, floor_gb_per_s: float = 0.0, blocks: int = 16) -> None:
        self.exchange = MemoryExchange()
        self.pool = BlockPool(blocks, 4)
        own = MemoryMover(HostPool(np.zeros((blocks, 64), np.uint8), 2), OWN, self.exchange)
        peer = MemoryMover(HostPool(np.ones((4, 64), np.uint8), 2), PEER, self.exchange)
        self.mover, self.peer = own, peer.describe()
        self.contact = BandwidthProbe(own, self.pool, floor_gb_per_s)

    async def check(self) -> None:
        await self.mover.connect(self.peer)
        await self.contact.check("prefill-0", self.peer)


def met(state: str) -> float:
    return metric_value(handoff_metrics.PEERS.labels(state))


async def test_a_good_peer_is_measured_and_every_block_released() -> None:
    bench, before = Bench(), met("good")
    await bench.check()
    assert bench.exchange.reads > 1 and met("good") == before + 1
    assert bench.pool.counts().free == 16


async def test_a_peer_below_the_floor_is_marked() -> None:
    bench, before = Bench(floor_gb_per_s=1e9), met("degraded")
    await bench.check()
    assert met("degraded") == before + 1
    (mark,) = bench.contact.degraded()
    assert (mark.worker_id, mark.boot_id) == ("prefill-0", PEER) and 0 < mark.gb_per_s < 1e9


async def test_a_mark_ends_when_measured_as_good_or_forgotten() -> None:
    bench = Bench(floor_gb_per_s=1e9)
    await bench.check()
    bench.contact.floor_gb_per_s = 0.0  # the pair has become fast enough
    await bench.check()
    assert bench.contact.degraded() == []
    bench.contact.floor_gb_per_s = 1e9
    await bench.check()
    bench.contact.forget(PEER)
    assert bench.contact.degraded() == []


async def test_a_transport_is_as_measured_until_the_peer_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    await bench.mover.connect(bench.peer)
    assert bench.contact.transport(PEER) == "the memory mover"  # before it is measured

    async def over_shared_memory(*_: object, **__: object) -> PreflightReport:
        name = "shared memory, a transport of UCX's choice (a hint)"
        return PreflightReport(name, 5.0, 0.1, 64, False, "host to host")

    monkeypatch.setattr(bandwidth_probe, "measure", over_shared_memory)
    await bench.check()
    assert bench.contact.transport(PEER) == "shared memory"
    bench.contact.forget(PEER)
    assert bench.contact.transport(PEER) == "the memory mover"


async def test_marks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth_probe, "MAX_DEGRADED_PEERS", 1)
    bench = Bench(floor_gb_per_s=1e9)
    await bench.check()
    other = MemoryMover(HostPool(np.ones((4, 64), np.uint8), 2), b"q" * 16, bench.exchange)
    await bench.mover.connect(other.describe())
    await bench.contact.check("prefill-1", other.describe())
    assert [mark.worker_id for mark in bench.contact.degraded()] == ["prefill-1"]


async def test_a_full_pool_leaves_the_measurement_out() -> None:
    bench = Bench(blocks=2)
    held = bench.pool.allocate(2, Hold.USED)
    await bench.check()
    assert bench.exchange.reads == 0
    bench.pool.release(held, Hold.USED)


async def test_an_unreadable_peer_is_refused_and_its_reads_quarantined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "READ_TIMEOUT_S", 0.02)
    bench = Bench()
    bench.exchange.decide = lambda attempt: Fate(stuck=True)
    before = metric_value(handoff_metrics.QUARANTINED_BLOCKS)
    with capture_logs() as logs, pytest.raises(PreflightFailed):
        await bench.check()
    counts = bench.pool.counts()
    assert counts.quarantined == 4 and counts.leased == 0
    assert metric_value(handoff_metrics.QUARANTINED_BLOCKS) == before + 4
    assert [(line["event"], line["worker"], line["blocks"]) for line in logs] == [
        ("blocks quarantined", "prefill-0", 4)
    ]
    bench.exchange.release_stuck()
    await asyncio.sleep(0)
    assert bench.pool.counts().free == 16
    assert metric_value(handoff_metrics.QUARANTINED_BLOCKS) == before


async def test_a_cancelled_check_keeps_its_blocks_until_its_read_lands() -> None:
    bench = Bench()
    bench.exchange.decide = lambda attempt: Fate(stuck=True)
    check = asyncio.create_task(bench.check())
    while not bench.exchange.stuck:
        await asyncio.sleep(0)
    check.cancel()
    await asyncio.wait({check})
    assert bench.pool.counts().leased == 4  # a READ may still write into them
    bench.exchange.decide = lambda attempt: Fate()
    bench.exchange.release_stuck()
    await eventually(lambda: bench.pool.counts().free == 16, 5)
