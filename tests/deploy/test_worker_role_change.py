"""A worker process that changes its role: with the same engine, and only when nothing may land."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import grpc.aio
import httpx
import numpy as np
import pytest

from baton.deploy.processes import worker_process
from baton.deploy.processes.worker_process import (
    first_step,
)
from baton.engine.scheduling.blocks import BlockPool, Hold
from baton.runtime.errors import EngineError
from baton.simulation.fleet.hash_engine import HashEngine, block_bytes
from tests.support.machine_speed import slowness
from tests.support.worker_process_scene import OK, generate, next_record, send_order, started


async def test_a_worker_changes_its_role_and_back_with_the_same_engine() -> None:
    _, serving, registry = started("decode")
    async with asyncio.timeout(100 * slowness()), httpx.AsyncClient(timeout=60) as client:
        first = await next_record(registry, serving)
        role, tokens = await generate(first.address, 6)
        assert (role, len(tokens)) == ("decode", 6)
        admin = f"http://{first.admin_address}"
        assert await send_order(first, "decode") is OK  # it is one
        assert await send_order(first, "prefill") is OK
        second = await next_record(registry, serving, other_than=first.boot_id)
        assert (second.role, second.admin_address) == ("prefill", first.admin_address)
        assert (await client.get(f"{admin}/audit")).json()["role"] == "prefill"
        assert (await generate(second.address, 6))[0] == "prefill"
        before = replace(first, address=second.address)
        for other in (before, replace(second, worker_id="decode-1")):  # not this boot, or worker
            assert await send_order(other, "decode") is grpc.StatusCode.UNAVAILABLE
        assert await send_order(second, "decode") is OK
        third = await next_record(registry, serving, other_than=second.boot_id)
        assert len({first.boot_id, second.boot_id, third.boot_id}) == 3
        assert await generate(third.address, 6) == ("decode", tokens)
        assert await send_order(third) is OK
        await serving
    assert registry.workers() == []


async def test_a_role_does_not_change_over_reads_that_may_still_land(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their blocks would be another's. The process ends, to be started again."""
    pools: list[BlockPool] = []

    class Kept(BlockPool):
        def __init__(self, total: int, block_size: int, tenant_share: float) -> None:
            super().__init__(total, block_size, tenant_share)
            pools.append(self)

    monkeypatch.setattr(worker_process, "BlockPool", Kept)
    process, serving, registry = started("decode")
    async with asyncio.timeout(60 * slowness()):
        await next_record(registry, serving)
        pools[0].allocate(1, Hold.QUARANTINED)
        process.change_role("prefill")
        with pytest.raises(EngineError, match="1 blocks have not ended: the role cannot change"):
            await serving
    assert registry.workers() == [] and len(pools) == 1


async def test_a_role_begins_with_a_step_that_ends_well() -> None:
    array = np.zeros((4, block_bytes(16, 1)), dtype=np.uint8)
    engine = HashEngine(array, block_size=16, slabs=1, vocab_size=50)
    pool = BlockPool(4, 16)
    await first_step(engine, pool)
    assert engine.steps == 1 and pool.counts().free == 4
    engine.break_slices = {0}
    with pytest.raises(EngineError, match="not finite"):
        await first_step(engine, pool)
