"""What a worker's process watches while it serves: its announcement, its steps, its pool."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from baton.deploy.processes import worker_process
from baton.deploy.processes.worker_process import _watch_quarantine, _watch_steps
from baton.engine.scheduling.blocks import BlockPool, Hold
from baton.runtime.errors import EngineError
from baton.runtime.registry import MemoryRegistry, WorkerRecord
from baton.runtime.registry_client import ANSWER_S, InlineRegistry
from baton.runtime.worker import announcer
from tests.support.virtual_time import on_virtual_time

RECORD = WorkerRecord("decode-0", "b" * 32, "decode", "a:1", "a:2", "m", pid=1)


class FullDisk(MemoryRegistry):
    """Fails the first announcements, as a full disk would."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    def announce(self, record: WorkerRecord) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError(28, "No space left on device")
        super().announce(record)


@on_virtual_time
async def test_an_unwritable_registry_does_not_end_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(announcer, "ANNOUNCE_INTERVAL_S", 0.001)
    monkeypatch.setattr(announcer, "RETRY_S", 0.001)
    registry = FullDisk(failures=5)
    announcing = asyncio.create_task(announcer.announce(InlineRegistry(registry), RECORD))
    with capture_logs() as logs:
        async with asyncio.timeout(60):
            while not registry.workers():
                assert not announcing.done()
                await asyncio.sleep(0.001)
    announcing.cancel()
    await asyncio.wait({announcing})
    said, _ = logs  # once, and "worker registered"
    assert "No space left" in said["reason"]


@on_virtual_time
async def test_a_late_registration_is_no_slow_start() -> None:
    """The log has the seconds from the worker's being ready to its first entry, once a boot."""
    registry = FullDisk(failures=27)
    announcing = asyncio.create_task(announcer.announce(InlineRegistry(registry), RECORD))
    with capture_logs() as logs:
        await asyncio.sleep(60.0)
    announcing.cancel()
    await asyncio.wait({announcing})
    (said,) = [line for line in logs if line["event"] == "worker registered"]
    assert said["since_ready_s"] == pytest.approx(27 * announcer.RETRY_S)
    assert said["boot_id"] == RECORD.boot_id


class Hung(InlineRegistry):
    """Its file system does not answer."""

    def announce(self, record: WorkerRecord) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    def withdraw(self, worker_id: str, boot_id: str) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()


@on_virtual_time
async def test_a_hung_registry_delays_a_workers_end_by_a_moment() -> None:
    registry = Hung(MemoryRegistry())
    clock = asyncio.get_running_loop().time
    announcing = asyncio.create_task(announcer.announce(registry, RECORD))
    with capture_logs() as logs:
        await asyncio.sleep(10 * ANSWER_S)
        assert not announcing.done()
        announcing.cancel()
        await asyncio.wait({announcing})
        began_s = clock()
        await announcer.withdraw(registry, RECORD)
    assert clock() - began_s <= 1.01 * ANSWER_S
    assert [line["event"] for line in logs] == [
        "worker not announced",
        "worker not withdrawn",
    ]
    assert all("file system" in line["reason"] for line in logs)


class Health:
    """The part of `StepHealth` that the watch reads."""

    def __init__(self) -> None:
        self.fails: str | None = None

    def persistent_failure(self) -> str | None:
        return self.fails


@on_virtual_time
async def test_steps_that_keep_failing_end_the_worker_quickly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_process, "STEPS_POLL_S", 0.005)
    health, hurried = Health(), asyncio.Event()
    watching = asyncio.create_task(_watch_steps(health, 1.0, hurried.set))
    for _ in range(15):  # for less than that each time, and for longer in all
        health.fails = "no device"
        await asyncio.sleep(0.07)
        health.fails = None
        await asyncio.sleep(0.02)
    assert not watching.done()
    health.fails = "no device"
    with pytest.raises(
        EngineError, match="no device; no step or probe has succeeded for 1 s: the w"
    ):
        await asyncio.wait_for(watching, 30)
    assert hurried.is_set()


async def watched(pool: BlockPool, limit: float) -> asyncio.Task[None]:
    task = asyncio.create_task(_watch_quarantine(pool, limit, within_s=0.01))
    await asyncio.sleep(0.05)  # many looks; what is within the limit must pass them all
    return task


@on_virtual_time
async def test_a_worker_ends_when_too_much_is_in_quarantine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_process, "QUARANTINE_POLL_S", 0.001)
    pool = BlockPool(8, 4)
    blocks = pool.allocate(4, Hold.LEASED)
    task = await watched(pool, limit=0.25)
    pool.convert(blocks[:2], Hold.LEASED, Hold.QUARANTINED)
    await asyncio.sleep(0.05)
    assert not task.done()  # a quarter is not more than a quarter
    pool.convert(blocks[2:3], Hold.LEASED, Hold.QUARANTINED)
    with pytest.raises(EngineError, match="3 of 8 blocks are in quarantine"):
        await asyncio.wait_for(task, 30)


@on_virtual_time
async def test_a_quarantine_that_passes_ends_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router dies, and the READs of all its requests are cancelled at once."""
    monkeypatch.setattr(worker_process, "QUARANTINE_POLL_S", 0.001)
    pool = BlockPool(8, 4)
    task = await watched(pool, limit=0.25)
    for _ in range(4):  # in all for longer than a worker bears at once
        blocks = pool.allocate(8, Hold.QUARANTINED)
        await asyncio.sleep(0.005)
        pool.release(blocks, Hold.QUARANTINED)
        await asyncio.sleep(0.005)
    assert not task.done()
    task.cancel()
    await asyncio.wait({task})


@on_virtual_time
async def test_blocks_that_are_merely_in_use_end_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "QUARANTINE_POLL_S", 0.001)
    pool = BlockPool(8, 4)
    pool.allocate(8, Hold.USED)
    task = await watched(pool, limit=0.0)
    assert not task.done()
    task.cancel()
    await asyncio.wait({task})
