"""Only entries of workers that are gone are deleted: never a live one's, nor a newer start's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from baton.runtime import dead_entries, worker_lock
from baton.runtime.dead_entries import DEAD_S, DeadEntries
from baton.runtime.registry import DirectoryRegistry, WorkerRecord
from tests.support.machine_speed import slowness

ONE = WorkerRecord("decode-0", "a" * 32, "decode", "127.0.0.1:1", "127.0.0.1:2", "m", 10)
HOLDER = """
import sys, time
from pathlib import Path
from baton.runtime.worker_lock import hold
with hold(Path(sys.argv[1]), "decode-0"):
    print("held", flush=True)
    time.sleep(600)
"""


@dataclass
class Clock:
    since_start_s: float = 500.0

    def monotonic(self) -> float:
        return self.since_start_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(dead_entries, "time", made)
    return made


def swept(dead: DeadEntries, clock: Clock, after_s: float = DEAD_S) -> int:
    """What a sweep deletes that long after another."""
    dead.sweep()
    clock.since_start_s += after_s
    return dead.sweep()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_dead_entries_are_deleted_with_their_locks(tmp_path: Path, clock: Clock) -> None:
    registry, dead = DirectoryRegistry(tmp_path), DeadEntries(tmp_path)
    for number in range(3):
        with worker_lock.hold(tmp_path, f"decode-{number}"):
            registry.announce(replace(ONE, worker_id=f"decode-{number}"))
    with worker_lock.hold(tmp_path, "left"):
        pass  # it has withdrawn, and its lock is all that it left
    assert swept(dead, clock, DEAD_S - 1) == 0
    clock.since_start_s += 1
    assert dead.sweep() == 4 and names(tmp_path) == []


def test_a_sweep_is_bounded(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_entries, "MAX_DELETED", 2)
    registry, dead = DirectoryRegistry(tmp_path), DeadEntries(tmp_path)
    for number in range(5):
        registry.announce(replace(ONE, worker_id=f"decode-{number}"))
    assert [swept(dead, clock), dead.sweep(), dead.sweep(), dead.sweep()] == [2, 2, 1, 0]


def test_an_entry_that_is_renewed_is_kept_without_a_lock(tmp_path: Path, clock: Clock) -> None:
    registry, dead = DirectoryRegistry(tmp_path), DeadEntries(tmp_path)
    for _ in range(10):
        registry.announce(ONE)
        assert swept(dead, clock, DEAD_S / 2) == 0
    assert registry.workers() == [ONE]


def test_a_date_in_the_past_makes_no_entry_dead(tmp_path: Path, clock: Clock) -> None:
    DirectoryRegistry(tmp_path).announce(ONE)
    os.utime(tmp_path / "decode-0.worker", (1, 1))
    assert swept(DeadEntries(tmp_path), clock, DEAD_S - 1) == 0


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A worker process of decode-0."""
    command = [sys.executable, "-P", "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_a_stopped_workers_entry_is_kept_and_a_killed_ones_goes(
    tmp_path: Path, clock: Clock, holder: subprocess.Popen[str]
) -> None:
    DirectoryRegistry(tmp_path).announce(ONE)
    dead = DeadEntries(tmp_path)
    holder.send_signal(signal.SIGSTOP)
    assert swept(dead, clock, 100 * DEAD_S) == 0
    assert names(tmp_path) == ["decode-0.lock", "decode-0.worker"]
    holder.kill()
    holder.wait(60)
    assert dead.sweep() == 1 and names(tmp_path) == []


def test_a_newer_starts_entry_is_kept(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It announces itself between the sweep's look and its lock."""
    registry, dead = DirectoryRegistry(tmp_path), DeadEntries(tmp_path)
    registry.announce(ONE)
    newer, hold_if_free = replace(ONE, boot_id="b" * 32), worker_lock.hold_if_free

    def late(folder: Path, worker_id: str) -> object:
        registry.announce(newer)
        return hold_if_free(folder, worker_id)

    monkeypatch.setattr(worker_lock, "hold_if_free", late)
    assert swept(dead, clock) == 0
    assert registry.workers() == [newer]


def test_a_start_that_awaited_a_deleted_lock_takes_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two processes could have one id, each with the lock of another file."""
    taken = worker_lock.take_lock

    def late(lock: int, until_s: float) -> bool:
        monkeypatch.setattr(worker_lock, "take_lock", taken)
        with worker_lock.hold_if_free(tmp_path, "decode-0") as file:
            assert file is not None
            file.unlink()  # after it was opened, and before it is locked
        return taken(lock, until_s)

    monkeypatch.setattr(worker_lock, "take_lock", late)
    with (
        worker_lock.hold(tmp_path, "decode-0"),
        worker_lock.hold_if_free(tmp_path, "decode-0") as file,
    ):
        assert file is None


def test_what_is_no_workers_file_is_left_alone(tmp_path: Path, clock: Clock) -> None:
    os.mkfifo(tmp_path / "pipe.worker")
    (tmp_path / "folder.worker").mkdir()
    (tmp_path / "link.worker").symlink_to(tmp_path / "nothing")
    (tmp_path / "strange name.lock").touch()
    (tmp_path / "notes.txt").touch()
    before = names(tmp_path)
    assert swept(DeadEntries(tmp_path), clock) == 0 and names(tmp_path) == before


def test_a_folder_that_is_gone_has_none(tmp_path: Path) -> None:
    assert DeadEntries(tmp_path / "gone").sweep() == 0


def test_thousands_are_deleted_in_a_few_sweeps(tmp_path: Path, clock: Clock) -> None:
    for number in range(3000):
        (tmp_path / f"decode-{number}.worker").write_bytes(b"{")
    dead, began_s = DeadEntries(tmp_path), time.monotonic()
    assert swept(dead, clock) == dead_entries.MAX_DELETED and dead.sweep() == 1000
    assert time.monotonic() - began_s < 20.0 * slowness()


def test_an_entry_that_cannot_be_deleted_keeps_no_other(tmp_path: Path, clock: Clock) -> None:
    registry, dead = DirectoryRegistry(tmp_path), DeadEntries(tmp_path)
    for number in range(4):
        registry.announce(replace(ONE, worker_id=f"decode-{number}"))
        if number % 2:
            (tmp_path / f"decode-{number}.lock").mkdir()  # as one of another user: not opened
    assert swept(dead, clock) == 2
    assert dead.sweep() == 0 and len(names(tmp_path)) == 4
