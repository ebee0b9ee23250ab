"""Orders to a worker over its gRPC port: `baton drain`, `baton role`, and the role controller.

The worker is found in a registry: that of a live instance of this host, whose private files hold
the cluster's token and a certificate for this command, or one that the user names, with token and
certificate from the settings. An order names the boot that it is for. Owns nothing. Once a drained
worker has ended, its supervisor starts it again in the role of its first start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from baton.deploy.host.cluster_secrets import ClusterSecrets, read_secrets
from baton.deploy.host.instance import live_instances, read_client_settings, read_environment
from baton.planner.control.order_rules import OrderUnanswered, check_others, order_time
from baton.proto import control_pb2, control_pb2_grpc
from baton.runtime import waits
from baton.runtime.cluster_config import RegistryConfig, SecurityConfig
from baton.runtime.config import Config
from baton.runtime.errors import BatonError, ConfigError, Unavailable
from baton.runtime.grpc_links import ERROR_KEY, credentials, open_channel, translate
from baton.runtime.registry import DirectoryRegistry, Role, WorkerRecord
from baton.runtime.registry_client import ANSWER_S, RegistryClient, hung
from baton.runtime.settings.loading import load
from baton.runtime.shared_registry.registry_location import (
    check_tls_files,
    folder_of,
    open_registry,
)
from baton.runtime.tls import Tls

CONNECT_TIMEOUT_S = 15.0
REPORT_AFTER_S = 5.0  # before it is printed that the worker has not accepted the order
POLL_S = 0.1
END_TIMEOUT_S = 3900.0  # the longest drain, and what follows it


@dataclass(frozen=True, slots=True)
class Cluster:
    """A registry, the token that its processes share, and how to call them."""

    name: str
    registry: RegistryConfig
    secrets: ClusterSecrets
    security: SecurityConfig

    def workers(self) -> list[WorkerRecord]:
        """Return the newest boot of each worker. Raises Unavailable if the registry cannot be
        read."""
        return asyncio.run(self.read_workers())

    async def read_workers(self) -> list[WorkerRecord]:
        """Return the same on a running loop."""
        try:
            records = await self._read()
        except OSError as error:
            raise Unavailable(f"the registry of {self.name} cannot be read: {error}") from error
        return list({record.worker_id: record for record in records}.values())  # newest comes last

    async def _read(self) -> list[WorkerRecord]:
        client = open_registry(self.registry, self.security, self.secrets.accepted)
        try:
            return await read_records(client)
        finally:
            await client.close()


async def read_records(client: RegistryClient) -> list[WorkerRecord]:
    """Return a registry's records. Raises OSError if it cannot be read in time."""
    reading = client.workers()
    if not await waits.done_within(reading, ANSWER_S):
        raise TimeoutError(hung(ANSWER_S))
    return reading.result()


def live_clusters(instance: str | None = None) -> list[Cluster]:
    """Return the clusters of the instances of this host, or of the named one. Raises ConfigError
    if there is no such instance."""
    folders = live_instances()
    if instance is not None and instance not in [folder.name for folder in folders]:
        known = ", ".join(folder.name for folder in folders) or "none"
        raise ConfigError(f"no instance {instance} runs here; there are: {known}")
    return [
        _cluster_of(folder, load(None, {}, settings))
        for folder in folders
        if instance in (None, folder.name)
        if (settings := read_client_settings(folder)) is not None  # else it has no worker yet
    ]


def _cluster_of(folder: Path, config: Config) -> Cluster:
    """Return the cluster of an instance, by the settings for its commands: they name a registry
    only if its workers are on other hosts too."""
    registry = config.registry
    if not registry.location:
        registry = RegistryConfig(location=str(folder / "registry"))
    secrets = read_secrets(read_environment(folder))
    return cluster_at(registry, secrets, config.security, folder.name)


def cluster_at(
    registry: RegistryConfig,
    secrets: ClusterSecrets,
    security: SecurityConfig,
    name: str | None = None,
) -> Cluster:
    """Return the cluster of workers that were started alone. Raises ConfigError if the registry's
    folder does not exist or if others can write it, or for a server's certificate files."""
    folder = folder_of(registry)
    if folder is None:
        check_tls_files(registry, security)
        return Cluster(name or f"cluster {registry.cluster}", registry, secrets, security)
    if not folder.is_dir():
        raise ConfigError(f"there is no registry {folder}: give the folder that workers were given")
    DirectoryRegistry(folder)  # refuses a folder of others
    return Cluster(name or str(folder), registry, secrets, security)


@dataclass(frozen=True, slots=True)
class Target:
    """One boot of a worker of a cluster: what an order is for."""

    cluster: Cluster
    record: WorkerRecord

    def boot(self) -> control_pb2.WorkerBoot:
        boot_id = bytes.fromhex(self.record.boot_id)
        return control_pb2.WorkerBoot(worker_id=self.record.worker_id, boot_id=boot_id)

    def peers(self) -> list[WorkerRecord]:
        """Return all workers of its cluster. Raises Unavailable if the registry cannot be read."""
        return self.cluster.workers()

    def ended(self) -> bool:
        """Whether this boot of the worker has left the registry."""
        return self.record.boot_id not in {record.boot_id for record in self.peers()}

    def successor(self) -> WorkerRecord | None:
        """Return the worker's next boot, once it is announced."""
        for record in self.peers():
            if record.worker_id == self.record.worker_id and record.boot_id != self.record.boot_id:
                return record
        return None


def find(worker_id: str, clusters: Sequence[Cluster]) -> Target:
    """Return the worker of that id. Raises ConfigError if there is none, or one in several
    clusters."""
    known = [Target(cluster, record) for cluster in clusters for record in cluster.workers()]
    found = [each for each in known if each.record.worker_id == worker_id]
    if len(found) > 1:
        names = ", ".join(each.cluster.name for each in found)
        raise ConfigError(f"{worker_id} runs in {names}: choose one with --instance")
    if not found:
        ids = ", ".join(sorted(each.record.worker_id for each in known)) or "none"
        raise ConfigError(f"no worker {worker_id} runs here; there are: {ids}")
    return found[0]


async def order_role(target: Target, role: Role, term: int) -> None:
    """Order a change of role as the controller of this term, and return once the worker has
    accepted it, within ORDER_TIMEOUT_S.
    Raises ConfigError if the certificate cannot be used, Unavailable if the worker is the last one
    of its role in the registry, or refuses, and OrderUnanswered if it does not answer in time: then
    it may accept the order all the same."""
    async with order_time(target.record, f"the order to become a {role} worker"):
        check_others(target.record, await target.cluster.read_workers())
        await _call(target, role, lambda text: None, term)


async def order_drain(target: Target) -> None:
    """Order a drain and return once the worker has accepted it, within ORDER_TIMEOUT_S. Raises as
    `order_role`, but asks for no other worker."""
    async with order_time(target.record, "the order to drain"):
        await _call(target, None, lambda text: None)


async def order_leave(target: Target) -> None:
    """Order a worker that is to be removed to drain, and return once it has accepted the order,
    within ORDER_TIMEOUT_S. Raises as `order_role`."""
    async with order_time(target.record, "the order to drain"):
        check_others(target.record, await target.cluster.read_workers())
        await _call(target, None, lambda text: None)


def drain(worker_id: str, clusters: Sequence[Cluster], say: Callable[[str], None] = print) -> None:
    """Drain the worker and wait until it has ended.

    Raises ConfigError if there is no such worker, Unavailable if it refuses or does not end.
    """
    target = find(worker_id, clusters)
    _send(target, None, say)
    _wait(target, target.ended, "ended")
    say(
        f"{worker_id} has ended; its supervisor (`baton serve`, systemd, Kubernetes) "
        "starts it again"
    )


def change_role(
    worker_id: str, role: Role, clusters: Sequence[Cluster], say: Callable[[str], None] = print
) -> None:
    """Drain the worker and wait until it has the other role.

    Raises ConfigError if there is no such worker or if it is the last decode worker, Unavailable
    if it refuses, or restarts in its old role.
    """
    target = find(worker_id, clusters)
    if target.record.role == role:
        say(f"{worker_id} is a {role} worker already")
        return
    if [record for record in target.peers() if record.role == "decode"] == [target.record]:
        raise ConfigError(f"{worker_id} is the only decode worker, and only they emit tokens")
    _send(target, role, say)
    _wait(target, lambda: target.successor() is not None, "announced its new role")
    successor = target.successor()
    if successor is None or successor.role != role:
        raise Unavailable(f"{worker_id} did not become a {role} worker: see its log")
    say(f"{worker_id} is a {role} worker now, at {successor.address}")


def _send(target: Target, role: Role | None, say: Callable[[str], None]) -> None:
    """Order a drain, or a change to `role`, and print when the worker has accepted it. Raises as
    `_call`."""
    asyncio.run(_call(target, role, say))
    say(f"{target.record.worker_id} takes nothing new and finishes what it has")


async def _call(
    target: Target, role: Role | None, say: Callable[[str], None], term: int = 0
) -> None:
    """Send the order and wait until the worker has accepted it: at once, or, if its event loop is
    blocked, as soon as it runs. Raises ConfigError if the certificate cannot be used, Unavailable
    if the worker refuses the order or cannot be reached, and says whether it may have received it.
    """
    worker_id, security = target.record.worker_id, target.cluster.security
    tls = Tls(security) if security.tls == "on" else None
    async with open_channel(target.record.address, tls) as channel:
        connected = await _connected(channel)
        stub = control_pb2_grpc.WorkerControlStub(channel)
        terms = {"metadata": credentials(target.cluster.secrets.token), "timeout": END_TIMEOUT_S}
        boot = target.boot()
        call = (
            stub.Drain(control_pb2.DrainRequest(worker=boot), **terms)
            if role is None
            else stub.ChangeRole(
                control_pb2.ChangeRoleRequest(worker=boot, role=role, term=term), **terms
            )
        )
        answered = asyncio.ensure_future(call)
        await asyncio.wait({answered}, timeout=REPORT_AFTER_S)
        if connected and not answered.done():
            say(
                f"{worker_id} has the order and has not accepted it: it does so once its event "
                "loop runs; until then its /readyz reports that it is not ready"
            )
        try:
            await answered
        except grpc.aio.AioRpcError as error:
            raise _failure(worker_id, error, connected=connected) from error


def _failure(worker_id: str, error: grpc.aio.AioRpcError, *, connected: bool) -> BatonError:
    lost = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    if not lost or ERROR_KEY in dict(error.trailing_metadata() or ()):
        return Unavailable(f"{worker_id} refused the order: {translate(error)}")
    said = f"{worker_id} does not answer: {translate(error)}"
    if not connected:
        return Unavailable(said)
    return OrderUnanswered(f"{said}; it may accept the order all the same: see `baton ps`")


async def _connected(channel: grpc.aio.Channel) -> bool:
    """Whether a connection stands, waiting CONNECT_TIMEOUT_S at most for the first attempt."""
    state = channel.get_state(try_to_connect=True)
    waiting = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            while state in waiting:
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError:
        pass
    return state is grpc.ChannelConnectivity.READY


def _wait(target: Target, happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + END_TIMEOUT_S
    while not happened():
        if time.monotonic() > deadline:
            raise Unavailable(f"{target.record.worker_id} has not {what}: see its log")
        time.sleep(POLL_S)  # the worker reports its end to no one; the registry is read again
