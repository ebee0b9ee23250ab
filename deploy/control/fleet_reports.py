"""Reads the state of all workers: the registry's records, and the Status of each over gRPC.

    registry ─▶ newest boot of each worker ─ Status, all at once ─▶ FleetSample

A worker that does not answer in time is in the sample as unreachable. Connections are kept from
one reading to the next. Owned by the event loop of the command that reads; changes nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import grpc
import grpc.aio

from baton.deploy.control.orders import Cluster, Target, read_records
from baton.planner.control.worker_report import ANSWER_TIMEOUT_S, counted
from baton.planner.controller_load import FleetSample, WorkerSample
from baton.proto import control_pb2, control_pb2_grpc
from baton.runtime import logs
from baton.runtime.errors import Unavailable
from baton.runtime.grpc_links import credentials, open_channel
from baton.runtime.registry import WorkerRecord
from baton.runtime.registry_client import RegistryClient
from baton.runtime.shared_registry.registry_location import open_registry
from baton.runtime.tls import Tls

log = logs.get(__name__)


class FleetReports:
    """`clock` returns seconds, as the controller counts them; `answer_s` is how long a worker may
    take to answer. `close` ends its connections."""

    def __init__(
        self, cluster: Cluster, clock: Callable[[], float], answer_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        self.cluster = cluster
        self._clock = clock
        self._answer_s = answer_s
        self._tls = Tls(cluster.security) if cluster.security.tls == "on" else None
        self._registry: RegistryClient | None = None
        self._channels: dict[str, grpc.aio.Channel] = {}  # by boot id
        self._records: dict[str, WorkerRecord] = {}  # by boot id

    async def read(self, term: int = 0) -> FleetSample:
        """Ask all registered workers, as the controller that leads in this term: they refuse orders
        of lower ones from then on. Raises Unavailable if the registry cannot be read."""
        records = await self._read_registry()
        await self._keep_channels(records)
        at_s = self._clock()  # before the first answer
        samples = await asyncio.gather(*(self._ask(record, term) for record in records.values()))
        return FleetSample(at_s, tuple(samples))

    def target(self, boot_id: str) -> Target:
        """Return the boot of the last reading, as an order names it."""
        return Target(self.cluster, self._records[boot_id])

    def hosts(self) -> dict[str, str]:
        """Return where the workers of the last reading are registered, by worker id."""
        return {each.worker_id: each.host for each in self._records.values()}

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        if self._registry is not None:
            await self._registry.close()

    async def _read_registry(self) -> dict[str, WorkerRecord]:
        """Return the newest boot of each worker, by its boot id."""
        cluster = self.cluster
        if self._registry is None:
            self._registry = open_registry(
                cluster.registry, cluster.security, cluster.secrets.accepted
            )
        try:
            found = await read_records(self._registry)
        except OSError as error:
            raise Unavailable(f"the registry of {cluster.name} cannot be read: {error}") from error
        newest = {record.worker_id: record for record in found}  # the newest boot comes last
        return {record.boot_id: record for record in newest.values()}

    async def _keep_channels(self, records: dict[str, WorkerRecord]) -> None:
        for boot_id in self._channels.keys() - records.keys():
            await self._channels.pop(boot_id).close()
        for boot_id in records.keys() - self._channels.keys():
            self._channels[boot_id] = open_channel(records[boot_id].address, self._tls)
        self._records = records

    async def _ask(self, record: WorkerRecord, term: int) -> WorkerSample:
        channel = self._channels[record.boot_id]
        # protoc's plugin generates stubs without annotations
        stub = control_pb2_grpc.WorkerControlStub(channel)
        boot = Target(self.cluster, record).boot()
        terms = {
            "metadata": credentials(self.cluster.secrets.token),
            "timeout": self._answer_s,
        }
        try:
            answer = await stub.Status(control_pb2.StatusRequest(worker=boot, term=term), **terms)
        except grpc.aio.AioRpcError as error:
            log.debug("worker not reached", worker=record.worker_id, detail=error.details())
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                # A channel keeps the certificate that it was opened with: the next one is renewed.
                await self._channels.pop(record.boot_id).close()
            return WorkerSample(record.worker_id, record.boot_id, record.role, "unreachable")
        return sample_of(record, answer)


def sample_of(record: WorkerRecord, answer: control_pb2.StatusReply) -> WorkerSample:
    """Return a worker's report. One of another version may have no counters that this one knows:
    its load is not known."""
    try:
        audit = json.loads(answer.audit)
        return counted(record, audit, answer.not_ready_reason, answer.routers)
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # of any other form
        log.debug("worker report not read", worker=record.worker_id, reason=repr(error))
        return WorkerSample(record.worker_id, record.boot_id, record.role, "no counters")
