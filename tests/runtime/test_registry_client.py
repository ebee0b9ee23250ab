"""A registry whose file system hangs stops no event loop, and what it was asked is bounded."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from baton.runtime import registry_client
from baton.runtime.dead_entries import DeadEntries
from baton.runtime.registry import DirectoryRegistry, MemoryRegistry, WorkerRecord
from baton.runtime.registry_client import InlineRegistry, ThreadedRegistry, answer_within
from tests.support.machine_speed import slowness

ONE = WorkerRecord("decode-0", "a" * 32, "decode", "127.0.0.1:1", "127.0.0.1:2", "m", 10)


class HangingRegistry(MemoryRegistry):
    """While `answers` is cleared, each call reads a pipe that nothing is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._read, self._write = os.pipe()
        self.hangs = False

    def hang(self) -> None:
        self.hangs = True

    def answer(self) -> None:
        self.hangs = False
        os.write(self._write, b"x" * 16)

    def close(self) -> None:
        os.close(self._write)  # what still reads has the end of the file
        # The thread has to leave its read before the descriptor is closed.
        time.sleep(0.01)
        os.close(self._read)

    def _block(self, call: str) -> None:
        self.calls.append(call)
        if self.hangs:
            os.read(self._read, 1)

    def announce(self, record: WorkerRecord) -> None:
        self._block("announce")
        super().announce(record)

    def withdraw(self, worker_id: str, boot_id: str) -> None:
        self._block("withdraw")
        super().withdraw(worker_id, boot_id)

    def workers(self) -> list[WorkerRecord]:
        self._block("workers")
        return super().workers()


@pytest.fixture
def hanging() -> Iterator[HangingRegistry]:
    made = HangingRegistry()
    yield made
    made.close()


async def test_calls_are_done_in_their_order(tmp_path: Path) -> None:
    registry = ThreadedRegistry(DirectoryRegistry(tmp_path))
    other = replace(ONE, boot_id="b" * 32)
    registry.announce(ONE)
    registry.withdraw(ONE.worker_id, ONE.boot_id)
    async with asyncio.timeout(20):
        assert await registry.workers() == []
        await registry.announce(other)
        await registry.withdraw(ONE.worker_id, ONE.boot_id)  # of a start that is over
        assert await registry.workers() == [other]
        (tmp_path / "rubbish.worker").write_bytes(b"{")
        assert await registry.workers() == [other] and "rubbish" in registry.faults()


async def test_a_hung_call_stops_no_loop_and_few_wait_behind_it(hanging: HangingRegistry) -> None:
    registry = ThreadedRegistry(hanging)
    threads = threading.active_count()
    hanging.hang()
    first = registry.workers()
    # The registry's thread has to hang in the first call.
    await asyncio.sleep(0.05)
    futures = [
        asked
        for number in range(50)
        for asked in (
            registry.workers(),
            registry.announce(replace(ONE, model=str(number))),
            registry.withdraw("decode-9", "9" * 32),
        )
    ]
    turns = 0
    until_s = time.monotonic() + 0.2 * slowness()
    while time.monotonic() < until_s:
        await asyncio.sleep(0)
        turns += 1
    assert turns > 100 and not first.done() and not any(each.done() for each in futures)
    assert threading.active_count() <= threads + 1
    hanging.answer()
    async with asyncio.timeout(20):
        await asyncio.gather(first, *futures)
        (record,) = await registry.workers()
    assert record.model == "49"  # the last announcement counts
    assert len(hanging.calls) <= 5


async def test_an_error_reaches_each_that_waits(tmp_path: Path) -> None:
    registry = ThreadedRegistry(DirectoryRegistry(tmp_path / "r"))
    (tmp_path / "r").rmdir()
    (tmp_path / "r").write_text("a file in the folder's place")
    asked = [registry.workers() for _ in range(3)]
    async with asyncio.timeout(20):
        found = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(each) for each in found] == [NotADirectoryError] * 3


async def test_a_caller_that_is_cancelled_takes_nothing_from_others(
    hanging: HangingRegistry,
) -> None:
    registry = ThreadedRegistry(hanging)
    hanging.hang()
    registry.withdraw("decode-9", "9" * 32)
    # The registry's thread has to hang in the first call.
    await asyncio.sleep(0.05)
    given_up, kept = registry.workers(), registry.workers()
    given_up.cancel()
    hanging.answer()
    async with asyncio.timeout(20):
        assert await kept == []


def test_a_call_outlasts_its_loop(hanging: HangingRegistry) -> None:
    registry = ThreadedRegistry(hanging)
    hanging.hang()

    async def ask() -> None:
        registry.workers()

    asyncio.run(ask())
    hanging.answer()

    async def ask_again() -> list[WorkerRecord]:
        async with asyncio.timeout(20):
            return await registry.workers()

    assert asyncio.run(ask_again()) == []


async def test_dead_entries_are_deleted_beside_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.runtime.dead_entries.DEAD_S", 0.0)
    monkeypatch.setattr(registry_client, "SWEEP_S", 0.0)
    (tmp_path / "decode-7.worker").write_bytes(b"{")
    registry = ThreadedRegistry(DirectoryRegistry(tmp_path), DeadEntries(tmp_path))
    async with asyncio.timeout(20):
        while os.listdir(tmp_path):
            await registry.workers()


async def test_a_sweep_that_fails_ends_no_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_client, "SWEEP_S", 0.0)
    monkeypatch.setattr(DeadEntries, "_sweep", lambda *_: 1 / 0)
    registry = ThreadedRegistry(DirectoryRegistry(tmp_path), DeadEntries(tmp_path))
    with capture_logs() as logs:
        async with asyncio.timeout(20):
            for _ in range(3):
                assert await registry.workers() == []
    assert logs and {line["event"] for line in logs} == {"registry sweep failed"}


async def test_in_memory_it_answers_at_once() -> None:
    registry = InlineRegistry(MemoryRegistry())
    assert registry.announce(ONE).done()
    assert registry.workers().result() == [ONE]
    assert registry.withdraw(ONE.worker_id, ONE.boot_id).done()
    assert registry.workers().result() == [] and registry.faults() == {}


def test_a_program_without_a_loop_waits_only_so_long(hanging: HangingRegistry) -> None:
    assert answer_within(hanging.workers) == []
    hanging.hang()
    with pytest.raises(TimeoutError, match="file system"):
        answer_within(hanging.workers, 0.05)
    hanging.answer()
    with pytest.raises(OSError, match="its own"):
        answer_within(lambda: _fail(OSError("its own")))


def _fail(error: Exception) -> None:
    raise error


async def test_a_thread_that_cannot_start_fails_its_call_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once left the registry without a thread for as long as the process lived."""
    registry = ThreadedRegistry(DirectoryRegistry(tmp_path))
    with monkeypatch.context() as patch:

        def none(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", none)
        with pytest.raises(OSError, match="can't start new thread"):
            await registry.workers()
    async with asyncio.timeout(20):
        await registry.announce(ONE)
        assert await registry.workers() == [ONE]
