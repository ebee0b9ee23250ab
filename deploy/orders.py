"""Orders to a worker that runs on this host, through its admin port: `baton drain`, `baton role`.

The worker is found in the registry of a live instance, and the cluster's token in that
instance's private files. Owns nothing; the worker does what it is told, and its keeper starts
it again, in the role of its start, once it has ended.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.deploy.instance import TOKEN_KEY, live_instances, read_environment
from baton.runtime.errors import ConfigError, Unavailable
from baton.runtime.registry import DirectoryRegistry, Role, WorkerRecord

ORDER_TIMEOUT_S = 5.0
LOOK_S = 0.1
END_WITHIN_S = 3900.0  # the longest drain, and what follows it


@dataclass(frozen=True, slots=True)
class Found:
    """A worker of a live instance."""

    folder: Path
    record: WorkerRecord

    @property
    def token(self) -> str:
        return read_environment(self.folder)[TOKEN_KEY]

    def there(self) -> list[WorkerRecord]:
        """All workers of its instance."""
        return DirectoryRegistry(self.folder / "registry").workers()

    def ended(self) -> bool:
        """Whether this start of the worker, or this role of it, has left the registry."""
        return self.record.boot_id not in {record.boot_id for record in self.there()}

    def successor(self) -> WorkerRecord | None:
        """The worker's next start or role, once it is there."""
        for record in self.there():
            if record.worker_id == self.record.worker_id and record.boot_id != self.record.boot_id:
                return record
        return None


def find(worker_id: str, instance: str | None = None) -> Found:
    """The worker of that id, in the instance of that name if one is given.

    Raises ConfigError if there is none, or one in several instances.
    """
    folders = [f for f in live_instances() if instance is None or f.name == instance]
    known = [
        Found(folder, record)
        for folder in folders
        if (folder / "registry").is_dir()
        for record in DirectoryRegistry(folder / "registry").workers()
    ]
    found = [each for each in known if each.record.worker_id == worker_id]
    if len(found) > 1:
        names = ", ".join(each.folder.name for each in found)
        raise ConfigError(f"{worker_id} runs in {names}: give one of them with --instance")
    if not found:
        ids = ", ".join(sorted(each.record.worker_id for each in known)) or "none"
        raise ConfigError(f"no worker {worker_id} runs here; there are: {ids}")
    return found[0]


def order(worker: Found, path: str) -> None:
    """POST to the worker's admin port. Raises Unavailable if it does not accept."""
    connection = http.client.HTTPConnection(worker.record.admin_address, timeout=ORDER_TIMEOUT_S)
    try:
        connection.request("POST", path, headers={"Authorization": f"Bearer {worker.token}"})
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"{worker.record.worker_id} does not answer: {error}") from error
    finally:
        connection.close()
    if answer.status != 202:
        raise Unavailable(f"{worker.record.worker_id} refused {path}: {answer.status} {text}")


def drain(worker_id: str, instance: str | None, say: Callable[[str], None] = print) -> None:
    """Drain the worker and wait until it has ended.

    Raises ConfigError if it is not there, Unavailable if it refuses or does not end.
    """
    worker = find(worker_id, instance)
    order(worker, "/drain")
    say(f"{worker_id} takes nothing new and finishes what it has")
    _wait(worker, worker.ended, "ended")
    say(f"{worker_id} has ended; `baton serve` starts it again")


def change_role(
    worker_id: str, role: Role, instance: str | None, say: Callable[[str], None] = print
) -> None:
    """Drain the worker and wait until it has the other role.

    Raises ConfigError if it is not there or is the last to emit tokens, Unavailable if it
    refuses, or comes back as what it was.
    """
    worker = find(worker_id, instance)
    if worker.record.role == role:
        say(f"{worker_id} is a {role} worker already")
        return
    if [record for record in worker.there() if record.role == "decode"] == [worker.record]:
        raise ConfigError(f"{worker_id} is the only decode worker, and only they emit tokens")
    order(worker, f"/role/{role}")
    say(f"{worker_id} takes nothing new and finishes what it has")
    _wait(worker, lambda: worker.successor() is not None, "come back")
    successor = worker.successor()
    if successor is None or successor.role != role:
        raise Unavailable(f"{worker_id} did not become a {role} worker: see its log")
    say(f"{worker_id} is a {role} worker now, at {successor.address}")


def _wait(worker: Found, happens: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + END_WITHIN_S
    while not happens():
        if time.monotonic() > deadline:
            name = worker.record.worker_id
            raise Unavailable(f"{name} has not {what}: see its log in {worker.folder}")
        time.sleep(LOOK_S)
