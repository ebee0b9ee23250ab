"""Deletes the registry entries of workers that have died without withdrawing them.

An entry is dead once it has not changed for DEAD_S, by the observer's own clock, and the lock of
its worker id (worker_lock.py) is free: a worker holds that lock from before its first entry until
its end, also while it is stopped. The lock is held during the deletion, so that a new start of
the id waits, and the entry is compared once more under it. Blocks on files: not for event loops.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

from baton.runtime import logs, worker_lock
from baton.runtime.errors import ConfigError
from baton.runtime.registry import SUFFIX, check_worker_id

DEAD_S = 60.0  # live workers renew every few seconds
SWEEP_S = 10.0
MAX_DELETED = 2000  # in one sweep

Mark = tuple[int, int]  # inode and time of writing of an entry; zeros: a lock without an entry

log = logs.get(__name__)


class DeadEntries:
    """The dead entries in the registry's `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, tuple[Mark, float]] = {}  # by worker id, and since when
        self._logged: str | None = None  # the reason that was logged last

    def sweep(self) -> int:
        """Delete the dead entries, and return how many workers' files that were."""
        deleted, why = 0, None
        try:
            deleted, why = self._sweep(time.monotonic())
        except OSError as error:
            why = str(error)
        if why is not None and why != self._logged:
            log.warning("dead registry entries not deleted", reason=why)
        self._logged = why
        if deleted:
            log.info("dead registry entries deleted", workers=deleted)
        return deleted

    def _sweep(self, now_s: float) -> tuple[int, str | None]:
        """Same as `sweep`; also return why some files could not be deleted. One such file does not
        prevent the deletion of the others."""
        deleted, why = 0, None
        seen = {}
        for worker_id, mark in self._marks().items():
            last = self._seen.get(worker_id)
            since_s = last[1] if last is not None and last[0] == mark else now_s
            seen[worker_id] = mark, since_s
            if now_s - since_s >= DEAD_S and deleted < MAX_DELETED:
                try:
                    deleted += self._delete(worker_id, mark)
                except OSError as error:  # such as a lock that another user owns
                    why = why or str(error)
        self._seen = seen
        return deleted, why

    def _marks(self) -> dict[str, Mark]:
        """Return the mark of each worker id with an entry or a lock; only regular files count."""
        marks: dict[str, Mark] = {}
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    worker_id, dot, suffix = entry.name.rpartition(".")
                    if f"{dot}{suffix}" not in (SUFFIX, worker_lock.SUFFIX):
                        continue
                    if (mark := _mark(entry)) is None or not _is_worker_id(worker_id):
                        continue
                    if f"{dot}{suffix}" == SUFFIX:
                        marks[worker_id] = mark
                    else:
                        marks.setdefault(worker_id, (0, 0))
        except FileNotFoundError:
            return {}
        return marks

    def _delete(self, worker_id: str, mark: Mark) -> bool:
        path = self._folder / f"{worker_id}{SUFFIX}"
        with worker_lock.hold_if_free(self._folder, worker_id) as lock:
            if lock is None or _mark_of(path) != mark:
                return False
            path.unlink(missing_ok=True)
            lock.unlink()
        return True


def _is_worker_id(name: str) -> bool:
    try:
        check_worker_id(name)
    except ConfigError:
        return False
    return True


def _mark(entry: os.DirEntry[str]) -> Mark | None:
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return (status.st_ino, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def _mark_of(path: Path) -> Mark:
    try:
        status = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return (0, 0)
    return (status.st_ino, status.st_mtime_ns)
