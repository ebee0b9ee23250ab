"""What is wrong with the registry is reported once, and that it is over; it ends no router."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from baton.router.fleet.registry_watcher import ANSWER_WAIT_S, RegistryWatcher
from baton.runtime import metrics
from baton.runtime.registry import DirectoryRegistry, MemoryRegistry, WorkerRecord
from baton.runtime.registry_client import InlineRegistry
from tests.support.metric_values import metric_value
from tests.support.virtual_time import on_virtual_time

ONE = WorkerRecord("decode-0", "a" * 32, "decode", "127.0.0.1:1", "127.0.0.1:2", "m", 10)
LOOKS = 5


async def looked(watcher: RegistryWatcher, times: int = LOOKS) -> list[EventDict]:
    """What was logged."""
    with capture_logs() as logs:
        for _ in range(times):
            await watcher.workers()
    return logs


async def test_a_bad_entry_is_logged_when_it_changes_or_leaves() -> None:
    registry = MemoryRegistry()
    watcher = RegistryWatcher(InlineRegistry(registry))
    registry.announce(ONE)
    registry.announce(replace(ONE, worker_id="decode-1", boot_id="xyz"))
    (said,) = await looked(watcher)
    assert (said["worker_id"], said["log_level"]) == ("decode-1", "warning")
    assert "boot id" in said["reason"] and list(await watcher.workers()) == [ONE]
    registry.announce(replace(ONE, worker_id="decode-1", role="router"))
    (said,) = await looked(watcher)
    assert "no role 'router'" in said["reason"]
    registry.announce(replace(ONE, worker_id="decode-1"))
    (said,) = await looked(watcher)
    assert (said["worker_id"], said["log_level"]) == ("decode-1", "info")
    assert said["event"] == "registry entry recovered" and await looked(watcher) == []


async def test_another_token_is_logged_once_and_not_at_each_renewal(tmp_path: Path) -> None:
    watcher = RegistryWatcher(InlineRegistry(DirectoryRegistry(tmp_path, tokens=("ours",))))
    theirs = DirectoryRegistry(tmp_path, tokens=("theirs",))
    said = []
    for _ in range(LOOKS):
        theirs.announce(ONE)
        said += await looked(watcher)
    assert [entry["worker_id"] for entry in said] == ["decode-0"]
    assert "token" in said[0]["reason"]
    theirs.withdraw(ONE.worker_id, ONE.boot_id)
    assert [entry["log_level"] for entry in await looked(watcher)] == ["info"]


async def test_a_registry_that_cannot_be_read_says_what_it_said_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = MemoryRegistry()
    watcher = RegistryWatcher(InlineRegistry(registry))
    with monkeypatch.context() as broken:
        broken.setattr(registry, "workers", unreadable)
        assert await watcher.workers() == () and watcher.first_read_s is None  # it is no empty one
    registry.announce(ONE)
    assert [entry["event"] for entry in await looked(watcher)] == ["registry readable again"]
    first_read_s = watcher.first_read_s
    assert first_read_s is not None
    with monkeypatch.context() as broken:
        broken.setattr(registry, "workers", unreadable)
        (said,) = await looked(watcher)
        assert said["log_level"] == "error" and said["reason"].endswith("Too many open files")
        assert list(await watcher.workers()) == [ONE]
    assert len(await looked(watcher)) == 1 and watcher.first_read_s == first_read_s


async def test_an_entrys_fault_outlasts_a_failed_poll(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = MemoryRegistry()
    watcher = RegistryWatcher(InlineRegistry(registry))
    registry.announce(replace(ONE, boot_id=""))
    assert len(await looked(watcher)) == 1
    with monkeypatch.context() as broken:
        broken.setattr(registry, "workers", unreadable)
        assert len(await looked(watcher)) == 1  # that it cannot be read
    assert [entry["event"] for entry in await looked(watcher)] == ["registry readable again"]


def unreadable() -> list[WorkerRecord]:
    raise OSError(errno.EMFILE, "Too many open files")


class Slow(InlineRegistry):
    """Its looks end when the test says so."""

    def __init__(self, registry: MemoryRegistry) -> None:
        super().__init__(registry)
        self.hangs = False
        self.begun: list[asyncio.Future[list[WorkerRecord]]] = []

    def workers(self) -> asyncio.Future[list[WorkerRecord]]:
        if not self.hangs:
            return super().workers()
        self.begun.append(asyncio.get_running_loop().create_future())
        return self.begun[-1]


@on_virtual_time
async def test_a_hung_registry_delays_briefly_and_is_logged_once() -> None:
    memory = MemoryRegistry()
    registry = Slow(memory)
    watcher, clock = RegistryWatcher(registry), asyncio.get_running_loop().time
    memory.announce(ONE)
    assert list(await watcher.workers()) == [ONE]
    registry.hangs = True
    began_s = clock()
    with capture_logs() as logs:
        for _ in range(20):
            assert list(await watcher.workers()) == [ONE]
    assert clock() - began_s <= 20.5 * ANSWER_WAIT_S and len(registry.begun) == 1
    (said,) = logs
    assert said["log_level"] == "error" and "file system" in said["reason"]
    assert metric_value(metrics.REGISTRY_UP) == 0
    two = replace(ONE, worker_id="decode-1")
    registry.begun[0].set_result([ONE, two])  # late is not lost
    (said,) = await looked(watcher, 1)
    assert said["event"] == "registry readable again"
    assert metric_value(metrics.REGISTRY_UP) == 1
    registry.hangs = False
    memory.announce(two)
    assert list(await watcher.workers()) == [ONE, two]


@on_virtual_time
async def test_a_registry_that_always_answers_late_is_still_read() -> None:
    registry = Slow(MemoryRegistry())
    registry.hangs, watcher = True, RegistryWatcher(registry)
    for _ in range(3):
        assert list(await watcher.workers()) == []
        registry.begun[-1].set_result([ONE])
        assert list(await watcher.workers()) == [ONE]
        registry.begun[-1:] = []
        assert list(await watcher.workers()) == [ONE]
        registry.begun[-1].set_result([])
        assert list(await watcher.workers()) == []
