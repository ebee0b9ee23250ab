"""Orders to a worker through its admin port: `baton drain`, `baton role`.

The worker is found where it announces itself: in the registry of a live instance of this host,
whose private files hold the cluster's token, or in one that is named, beside a token. An order
carries a proof that is made of the token, never the token itself. Owns nothing; the worker does
what it is told, and its keeper starts it again, in the role of its start, once it has ended.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.deploy.host.instance import TOKEN_KEY, live_instances, read_environment
from baton.deploy.processes.admin import ANSWER_S, TAKEN
from baton.deploy.processes.order_proof import order_proof
from baton.runtime.errors import ConfigError, Unavailable
from baton.runtime.registry import DirectoryRegistry, Role, WorkerRecord
from baton.runtime.registry_client import answer_within

ORDER_TIMEOUT_S = ANSWER_S + 10.0  # a worker that is busy answers late
LOOK_S = 0.1
END_WITHIN_S = 3900.0  # the longest drain, and what follows it


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where workers announce themselves, and the secret that they share."""

    name: str
    registry: DirectoryRegistry
    token: str

    def workers(self) -> list[WorkerRecord]:
        """Raises Unavailable if the registry cannot be read."""
        try:
            return answer_within(self.registry.workers)
        except OSError as error:
            raise Unavailable(f"the registry of {self.name} cannot be read: {error}") from error


def live_clusters(instance: str | None = None) -> list[Cluster]:
    """Of the instances of this host, or of the one of that name. Raises ConfigError if none has
    it."""
    folders = live_instances()
    if instance is not None and instance not in [folder.name for folder in folders]:
        known = ", ".join(folder.name for folder in folders) or "none"
        raise ConfigError(f"no instance {instance} runs here; there are: {known}")
    return [
        cluster_at(folder / "registry", read_environment(folder)[TOKEN_KEY], folder.name)
        for folder in folders
        if instance in (None, folder.name) and (folder / "registry").is_dir()
    ]


def cluster_at(folder: Path, token: str, name: str = "") -> Cluster:
    """That of processes which were started alone. Raises ConfigError if there is no such folder,
    or if others can write it."""
    if not folder.is_dir():
        raise ConfigError(f"there is no registry {folder}: give the folder that workers were given")
    return Cluster(name or str(folder), DirectoryRegistry(folder, secret=token), token)


@dataclass(frozen=True, slots=True)
class Found:
    """A worker of a cluster."""

    cluster: Cluster
    record: WorkerRecord

    def proof(self, path: str) -> str:
        """That an order to this start of the worker is its cluster's."""
        return order_proof(self.cluster.token, self.record.worker_id, self.record.boot_id, path)

    def there(self) -> list[WorkerRecord]:
        """All workers of its cluster. Raises Unavailable if its registry cannot be read."""
        return self.cluster.workers()

    def ended(self) -> bool:
        """Whether this start of the worker, or this role of it, has left the registry."""
        return self.record.boot_id not in {record.boot_id for record in self.there()}

    def successor(self) -> WorkerRecord | None:
        """The worker's next start or role, once it is there."""
        for record in self.there():
            if record.worker_id == self.record.worker_id and record.boot_id != self.record.boot_id:
                return record
        return None


def find(worker_id: str, clusters: Sequence[Cluster]) -> Found:
    """The worker of that id. Raises ConfigError if there is none, or one in several clusters."""
    known = [Found(cluster, record) for cluster in clusters for record in cluster.workers()]
    found = [each for each in known if each.record.worker_id == worker_id]
    if len(found) > 1:
        names = ", ".join(each.cluster.name for each in found)
        raise ConfigError(f"{worker_id} runs in {names}: give one of them with --instance")
    if not found:
        ids = ", ".join(sorted(each.record.worker_id for each in known)) or "none"
        raise ConfigError(f"no worker {worker_id} runs here; there are: {ids}")
    return found[0]


def order(worker: Found, path: str, say: Callable[[str], None]) -> None:
    """POST to the worker's admin port, and say how the worker has it. Raises Unavailable if it
    refuses, or does not answer: then it says whether it may have the order all the same."""
    worker_id, sent = worker.record.worker_id, False
    headers = {"Authorization": f"Bearer {worker.proof(path)}"}
    connection = http.client.HTTPConnection(worker.record.admin_address, timeout=ORDER_TIMEOUT_S)
    try:
        connection.request("POST", path, headers=headers)
        sent = True
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        perhaps = "; it may take the order all the same: see `baton ps`" if sent else ""
        raise Unavailable(f"{worker_id} does not answer: {error}{perhaps}") from error
    finally:
        connection.close()
    if answer.status != 202:
        raise Unavailable(f"{worker_id} refused {path}: {answer.status} {text}")
    if text == TAKEN.decode().strip():
        say(f"{worker_id} takes nothing new and finishes what it has")
    else:
        say(f"{worker_id} has the order and has not taken it yet: {text}")


def drain(worker_id: str, clusters: Sequence[Cluster], say: Callable[[str], None] = print) -> None:
    """Drain the worker and wait until it has ended.

    Raises ConfigError if it is not there, Unavailable if it refuses or does not end.
    """
    worker = find(worker_id, clusters)
    order(worker, "/drain", say)
    _wait(worker, worker.ended, "ended")
    say(f"{worker_id} has ended; its keeper (`baton serve`) starts it again")


def change_role(
    worker_id: str, role: Role, clusters: Sequence[Cluster], say: Callable[[str], None] = print
) -> None:
    """Drain the worker and wait until it has the other role.

    Raises ConfigError if it is not there or is the last to emit tokens, Unavailable if it
    refuses, or comes back as what it was.
    """
    worker = find(worker_id, clusters)
    if worker.record.role == role:
        say(f"{worker_id} is a {role} worker already")
        return
    if [record for record in worker.there() if record.role == "decode"] == [worker.record]:
        raise ConfigError(f"{worker_id} is the only decode worker, and only they emit tokens")
    order(worker, f"/role/{role}", say)
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
            raise Unavailable(f"{name} has not {what}: see its log")
        time.sleep(LOOK_S)
