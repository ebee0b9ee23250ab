"""The `Registry` seam: which workers exist, and where.

A worker announces itself and renews the announcement; a router asks who is there. An
announcement that is not renewed fades after `ttl_s`. The registry is a hint: whether a worker
lives is decided by the router's link to it.

`DirectoryRegistry` keeps one small JSON file per worker in a folder of this host: enough for
one machine and for tests, with nothing to install.
"""

from __future__ import annotations

import hmac
import json
import os
import time
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal, Protocol

from baton.runtime.errors import ConfigError

MAX_ID = 100  # characters of a worker's id
Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """What a worker says of itself. `boot_id` is 32 hex digits, new at each start."""

    worker_id: str
    boot_id: str
    role: Role
    address: str  # host:port, gRPC: link, block events and handoff
    admin_address: str  # host:port, HTTP: metrics and audit
    model: str
    pid: int
    memory: str = ""  # where it goes, for whoever starts the worker


class Registry(Protocol):
    """`announce` is repeated by the worker every few seconds; all three may block briefly on
    local files, never on the network, and never raise for a lost record."""

    def announce(self, record: WorkerRecord) -> None: ...

    def withdraw(self, worker_id: str, boot_id: str) -> None: ...

    def workers(self) -> list[WorkerRecord]: ...


class DirectoryRegistry:
    """Announcements as files, replaced atomically; the newest of a worker id wins. Raises
    ConfigError if its folder cannot be made, or is open to others.

    With a `secret` each announcement proves that its writer had it, and others are passed over:
    whoever connects to what the registry names gives one. Without, all are listed."""

    def __init__(self, folder: Path, ttl_s: float = 15.0, secret: str = "") -> None:
        self._folder = folder
        self._key = blake2b(secret.encode(), digest_size=32, person=b"baton-registry").digest()
        self._proven = bool(secret)
        self._ttl_s = ttl_s
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
        draft = path.with_suffix(f".{record.boot_id}.draft")
        draft.write_text(json.dumps(asdict(record) | {"proof": self._proof(record)}))
        os.replace(draft, path)

    def withdraw(self, worker_id: str, boot_id: str) -> None:
        record = self._read(self._path(worker_id))
        if record is not None and record.boot_id == boot_id:
            self._path(worker_id).unlink(missing_ok=True)

    def workers(self) -> list[WorkerRecord]:
        records = (self._read(path) for path in sorted(self._folder.glob("*.worker")))
        return [record for record in records if record is not None]

    def _path(self, worker_id: str) -> Path:
        check_worker_id(worker_id)
        return self._folder / f"{worker_id}.worker"

    def _read(self, path: Path) -> WorkerRecord | None:
        try:
            if time.time() - path.stat().st_mtime > self._ttl_s:
                return None
            found = json.loads(path.read_text())
            proof = str(found.pop("proof", ""))
            record = WorkerRecord(**found)
        except (FileNotFoundError, ValueError, TypeError, AttributeError):
            return None  # withdrawn meanwhile, or not one of ours
        texts = (record.worker_id, record.boot_id, record.address, record.admin_address)
        if not all(isinstance(text, str) for text in texts):
            return None
        if self._proven and not hmac.compare_digest(proof.encode(), self._proof(record).encode()):
            return None  # not of this cluster
        return record

    def _proof(self, record: WorkerRecord) -> str:
        text = json.dumps(asdict(record), sort_keys=True)
        return blake2b(text.encode(), key=self._key, digest_size=16).hexdigest()


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


class MemoryRegistry:
    """Announcements in this process, for tests and simulation; they do not fade."""

    def __init__(self) -> None:
        self._records: dict[str, WorkerRecord] = {}

    def announce(self, record: WorkerRecord) -> None:
        self._records[record.worker_id] = record

    def withdraw(self, worker_id: str, boot_id: str) -> None:
        if worker_id in self._records and self._records[worker_id].boot_id == boot_id:
            del self._records[worker_id]

    def workers(self) -> list[WorkerRecord]:
        return list(self._records.values())
