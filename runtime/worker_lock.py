"""One process per worker id and registry: the process that has the id holds a lock on a file.

Two processes under one id would take each other's place with each announcement, and every
reader would follow, to and fro. The kernel drops a flock when its holder dies, however it dies:
so a successor waits for nothing, and a process that is stopped, and may come back, keeps its
id. One host, as the registry's folder. Knows no boot ids: a worker that changes its role keeps
the lock. Its file is deleted by dead_entries.py alone, which holds the lock then.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from baton.runtime.errors import ConfigError
from baton.runtime.registry import check_worker_id

SUFFIX = ".lock"  # of its file
LOCK_TIMEOUT_S = 5.0  # for a killed process to end
LOCK_POLL_S = 0.05
_PID_BYTES = 16


@contextlib.contextmanager
def hold(folder: Path, worker_id: str) -> Iterator[None]:
    """Have the id in the registry `folder` until the context ends. Blocks, for LOCK_TIMEOUT_S
    at most. Raises ConfigError if another process has it still, or if nothing can be locked."""
    check_worker_id(worker_id)
    path = folder / f"{worker_id}{SUFFIX}"
    with contextlib.ExitStack() as ends:
        try:
            lock = _locked(path, time.monotonic() + LOCK_TIMEOUT_S, folder, worker_id)
            ends.callback(os.close, lock)
            _name_holder(lock)
            for draft in folder.glob(f"{worker_id}.*.draft"):
                draft.unlink(missing_ok=True)  # of a start that was killed
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be locked ({error.strerror or error}): give a registry on a disk "
                "of this host that this user can write"
            ) from error
        yield


@contextlib.contextmanager
def hold_if_free(folder: Path, worker_id: str) -> Iterator[Path | None]:
    """Hold the id's lock, if no process has it, until the context ends: then its file, which may
    be deleted, else None. Waits for nothing."""
    path = folder / f"{worker_id}{SUFFIX}"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield path if take_lock(lock, time.monotonic()) and _is_at(lock, path) else None
    finally:
        os.close(lock)


def _locked(path: Path, until_s: float, folder: Path, worker_id: str) -> int:
    """The file at `path`, locked. One that was deleted while it was waited for locks nothing."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not take_lock(lock, until_s):
                raise _refusal(lock, folder, worker_id)
            if _is_at(lock, path):
                return lock
        except BaseException:  # interrupted too: the lock is not left taken
            os.close(lock)
            raise
        os.close(lock)


def _is_at(lock: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), path.stat())
    except FileNotFoundError:
        return False


def take_lock(lock: int, until_s: float) -> bool:
    """Take `lock` before `until_s` of the monotonic clock; return whether it was taken."""
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until_s:
                return False
        time.sleep(LOCK_POLL_S)  # flock waits without a limit; no event loop runs yet


def _name_holder(lock: int) -> None:
    """Write the process id, only for the refusal: a full disk keeps no worker from starting."""
    with contextlib.suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)


def _refusal(lock: int, folder: Path, worker_id: str) -> ConfigError:
    holder = os.pread(lock, _PID_BYTES, 0).decode(errors="replace")
    return ConfigError(
        f"--worker-id {worker_id}: process {holder or '(of unknown id)'} has this id in the "
        f"registry {folder}, running or stopped: end that process, or give another id"
    )
