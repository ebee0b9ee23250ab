"""A worker's id has one process, and the kernel says when that is gone."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.runtime import worker_lock
from baton.runtime.errors import ConfigError
from baton.runtime.worker_lock import hold

HOLDER = """
import sys, time
from pathlib import Path
from baton.runtime.worker_lock import hold
with hold(Path(sys.argv[1]), "decode-0"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_lock, "LOCK_TIMEOUT_S", 0.0)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has decode-0."""
    command = [sys.executable, "-P", "-c", HOLDER, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()


def test_a_second_process_of_an_id_is_refused_by_name(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    reason = rf"decode-0: process {holder.pid} has this id in the registry {tmp_path}.*another id"
    with pytest.raises(ConfigError, match=reason), hold(tmp_path, "decode-0"):
        raise AssertionError("both have it")
    with hold(tmp_path, "decode-1"):
        pass  # another id


def test_a_stopped_process_keeps_its_id_until_it_is_killed(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(ConfigError, match="running or stopped"), hold(tmp_path, "decode-0"):
        raise AssertionError("it would come back")
    holder.kill()
    holder.wait(60)
    with hold(tmp_path, "decode-0"):  # no lifetime of an announcement is waited for
        assert (tmp_path / "decode-0.lock").read_text().strip() == str(os.getpid())


def test_a_process_that_is_about_to_end_is_waited_for(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_lock, "LOCK_TIMEOUT_S", 60.0)
    ending = threading.Timer(0.2, holder.kill)
    ending.start()
    with hold(tmp_path, "decode-0"):
        assert holder.wait(60) == -signal.SIGKILL
    ending.join(60)


def test_the_lock_lasts_as_long_as_its_context(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its end"), hold(tmp_path, "w"):
        with pytest.raises(ConfigError, match=str(os.getpid())), hold(tmp_path, "w"):
            raise AssertionError("both have it")
        raise ValueError("its end")
    with hold(tmp_path, "w"):
        pass


def test_a_child_of_a_worker_does_not_keep_the_workers_id(tmp_path: Path) -> None:
    with hold(tmp_path, "w"):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with hold(tmp_path, "w"):
        assert child.poll() is None
    child.communicate(b"\n", 60)


def test_drafts_of_starts_that_were_killed_are_removed(tmp_path: Path) -> None:
    for name in ("w.aa.draft", "w.bb.draft", "w-1.aa.draft", "w.worker"):
        (tmp_path / name).write_text("{")
    with hold(tmp_path, "w"):
        left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["w-1.aa.draft", "w.lock", "w.worker"]


def test_an_unnamed_lock_holder_is_refused_like_any(tmp_path: Path) -> None:
    (tmp_path / "w.lock").write_bytes(b"")
    with open(tmp_path / "w.lock") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="unknown id"), hold(tmp_path, "w"):
            raise AssertionError("both have it")


def test_a_full_disk_keeps_no_worker_from_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with (
        hold(tmp_path, "decode-0"),
        pytest.raises(ConfigError, match="process .of unknown id. has this id"),
        hold(tmp_path, "decode-0"),
    ):
        raise AssertionError("both have it")


def test_a_folder_that_knows_no_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    reported = r"w\.lock cannot be locked \(No locks available\): give .* disk of this host"
    with pytest.raises(ConfigError, match=reported), hold(tmp_path, "w"):
        raise AssertionError("it is unknown whether it has it")


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    with pytest.raises(ConfigError, match="cannot be locked"), hold(nowhere, "w"):
        raise AssertionError("there is no folder")


@pytest.mark.parametrize("worker_id", ["../x", "", "a/b", "a" * 101])
def test_an_id_that_cannot_name_a_file_is_refused(tmp_path: Path, worker_id: str) -> None:
    with pytest.raises(ConfigError, match="--worker-id"), hold(tmp_path, worker_id):
        raise AssertionError("it left the folder")
    assert list(tmp_path.iterdir()) == []


def test_what_ends_in_the_context_is_not_taken_for_a_failed_lock(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the worker's own"), hold(tmp_path, "w"):
        raise OSError("the worker's own")
