"""The `Registry` seam: which workers exist, and where.

A worker announces itself and renews the announcement; a router lists the workers. An
announcement that is not renewed fades after `ttl_s`. The registry is a hint: whether a worker
lives is decided by the router's link to it.

`DirectoryRegistry` keeps one small JSON file per worker in a folder of this host: enough for
one machine and for tests, with nothing to install.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Literal, Protocol, get_args

from baton.runtime.errors import ConfigError

MAX_ID = 100  # characters of a worker's id
MAX_BYTES = 1 << 16  # of an announcement
SUFFIX = ".worker"  # of its file
Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker's announcement. `boot_id` is 32 hex digits, new at each start."""

    worker_id: str
    boot_id: str
    role: Role
    address: str  # host:port, gRPC: link, block events and handoff
    admin_address: str  # host:port, HTTP: metrics and audit
    model: str
    pid: int
    memory: str = ""  # the plan of its memory, for `baton serve`

    @property
    def host(self) -> str:
        """Return the host of `address`; an IPv6 address without its brackets."""
        return self.address.rpartition(":")[0].strip("[]")


class Registry(Protocol):
    """`announce` is repeated by the worker every few seconds. All may block briefly on local
    files, never on the network, and never raise for a lost record; OSError where the files
    cannot be read or written at all."""

    def announce(self, record: WorkerRecord) -> None: ...

    def withdraw(self, worker_id: str, boot_id: str) -> None: ...

    def workers(self) -> list[WorkerRecord]: ...

    def faults(self) -> Mapping[str, str]:
        """Why the last `workers` left out an announcement, by worker id."""
        ...


@dataclass(frozen=True, slots=True)
class _Announcement:
    """A worker's file as it was when it changed last."""

    mark: tuple[int, int]  # inode and time of writing: another one each time
    written_s: float  # on the reader's own monotonic clock
    found: WorkerRecord | str  # or why it cannot be used


class DirectoryRegistry:
    """Announcements as files, replaced atomically; the newest of a worker id wins. Raises
    ConfigError if its folder cannot be made, or is open to others.

    A frequent reader judges the age of an announcement by when it saw the file change, on its own
    monotonic clock, so a clock that is set hides no worker. With `tokens` each announcement proves
    that its writer had one of them (the first one signs), and others are skipped, because readers
    connect to what the registry names. Without tokens all are listed."""

    def __init__(self, folder: Path, ttl_s: float = 15.0, tokens: tuple[str, ...] = ()) -> None:
        self._folder = folder
        self._keys = [
            blake2b(token.encode(), digest_size=32, person=b"baton-registry").digest()
            for token in tokens
        ]
        self._ttl_s = ttl_s
        self._known: dict[str, _Announcement] = {}  # by worker id, as the last look found them
        self._looked_s = float("-inf")
        self._faults: dict[str, str] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"the registry {folder} cannot be made ({error.strerror or error}): give a folder "
                "that this user can write"
            ) from error
        _check_owner(folder)

    def announce(self, record: WorkerRecord) -> None:
        path = self._path(record.worker_id)
        draft = f"{path.removesuffix(SUFFIX)}.{record.boot_id}.draft"
        with open(draft, "w", encoding="utf-8") as file:
            proof = _proof(self._keys[0], record) if self._keys else ""
            file.write(json.dumps(asdict(record) | {"proof": proof}))
        os.replace(draft, path)

    def withdraw(self, worker_id: str, boot_id: str) -> None:
        path = self._path(worker_id)
        with contextlib.suppress(FileNotFoundError):  # it is withdrawn already
            found = self._read(path)
            if isinstance(found, WorkerRecord) and found.boot_id == boot_id:
                os.unlink(path)

    def workers(self) -> list[WorkerRecord]:
        now_s = time.monotonic()
        known = self._look(now_s)
        self._known, self._looked_s = known, now_s
        fresh = {name: e.found for name, e in known.items() if now_s - e.written_s <= self._ttl_s}
        self._faults = {name: found for name, found in fresh.items() if isinstance(found, str)}
        return [found for found in fresh.values() if isinstance(found, WorkerRecord)]

    def faults(self) -> Mapping[str, str]:
        return self._faults

    def _look(self, now_s: float) -> dict[str, _Announcement]:
        """Every worker's file; only what has changed is read."""
        known = {}
        for entry in sorted(_worker_files(self._folder), key=lambda entry: entry.name):
            name = entry.name.removesuffix(SUFFIX)
            try:
                status = entry.stat(follow_symlinks=False)  # a link may lead anywhere
                mark, last = (status.st_ino, status.st_mtime_ns), self._known.get(name)
                if last is None or last.mark != mark:
                    written_s = now_s - self._age_s(status.st_mtime, now_s)
                    usable = stat.S_ISREG(status.st_mode)
                    found = self._read(entry.path) if usable else "it is no file"
                    last = _Announcement(mark, written_s, found)
            except FileNotFoundError:
                continue  # withdrawn since the listing
            known[name] = last
        return known

    def _age_s(self, mtime_s: float, now_s: float) -> float:
        """Return the age of a file that changed since the last read: at most the time since then.
        Within that, and on a first read, the file's own date decides. If the clock was set, a
        first read may hide a live worker until it announces itself again, or show a dead one for
        another `ttl_s`."""
        return min(max(0.0, time.time() - mtime_s), now_s - self._looked_s)

    def _path(self, worker_id: str) -> str:
        """No `Path`: Python interns each part of one, and this is asked for again and again."""
        check_worker_id(worker_id)
        return os.path.join(self._folder, f"{worker_id}{SUFFIX}")

    def _read(self, path: str) -> WorkerRecord | str:
        """Return the record in a file, or why it cannot be used. Raises OSError."""
        try:
            with open(path, "rb") as file:
                text = file.read(MAX_BYTES + 1)
        except PermissionError:
            return "this user may not read it"
        if len(text) > MAX_BYTES:
            return f"it is longer than {MAX_BYTES} bytes"
        try:
            found = json.loads(text)
            proof = str(found.pop("proof", ""))
            record = WorkerRecord(**found)
        except (ValueError, TypeError, AttributeError, RecursionError):
            return "it is not what a worker of this version writes"
        if (why := record_fault(record)) is not None:
            return why
        if record.worker_id != os.path.basename(path).removesuffix(SUFFIX):
            return f"it is another worker's, {record.worker_id[:MAX_ID]!r}"
        given = proof.encode(errors="replace")
        if self._keys and not any(
            hmac.compare_digest(given, _proof(key, record).encode()) for key in self._keys
        ):
            return "its writer did not have this cluster's token"
        return record


def _proof(key: bytes, record: WorkerRecord) -> str:
    text = json.dumps(asdict(record), sort_keys=True)
    return blake2b(text.encode(), key=key, digest_size=16).hexdigest()


def _worker_files(folder: Path) -> list[os.DirEntry[str]]:
    """Raises OSError if the folder cannot be read; one that is not there has none."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if entry.name.endswith(SUFFIX)]
    except FileNotFoundError:
        return []


def _check_owner(folder: Path) -> None:
    """Raises ConfigError where others could announce workers: what stands in the folder is
    connected to, with the cluster's token."""
    found = folder.stat()
    if found.st_uid not in (os.getuid(), 0) or found.st_mode & 0o022:
        raise ConfigError(
            f"the registry {folder} can be written by other users: give a folder of this user's "
            "own, of mode 0700"
        )


def check_worker_id(worker_id: str) -> None:
    """Raises ConfigError for an id that cannot name a file."""
    if len(worker_id) > MAX_ID or not worker_id.replace("-", "").isalnum():
        raise ConfigError(
            f"--worker-id {worker_id[:100]!r}: use letters, digits and '-', at most {MAX_ID}"
        )


def record_fault(record: WorkerRecord) -> str | None:
    """Return why no process could use the record, or None if it can be used."""
    found = {field.name: getattr(record, field.name) for field in fields(record)}
    if not isinstance(found.pop("pid"), int) or not all(
        isinstance(value, str) for value in found.values()
    ):
        return "a field of it is of another type"
    if record.role not in get_args(Role):
        return f"there is no role {record.role[:MAX_ID]!r}"
    if not re.fullmatch("[0-9a-f]{32}", record.boot_id):
        return "its boot id is not 32 hex digits"
    return None


class MemoryRegistry:
    """Announcements in this process, for tests and simulation; they do not expire. It protects no
    id: its user ends the last worker of an id before it starts the next."""

    def __init__(self) -> None:
        self._records: dict[str, WorkerRecord] = {}
        self._faults: dict[str, str] = {}

    def announce(self, record: WorkerRecord) -> None:
        if (why := record_fault(record)) is not None:
            self._records.pop(record.worker_id, None)
            self._faults[record.worker_id] = why
        else:
            self._faults.pop(record.worker_id, None)
            self._records[record.worker_id] = record

    def withdraw(self, worker_id: str, boot_id: str) -> None:
        if worker_id in self._records and self._records[worker_id].boot_id == boot_id:
            del self._records[worker_id]

    def workers(self) -> list[WorkerRecord]:
        return list(self._records.values())

    def faults(self) -> Mapping[str, str]:
        return self._faults
