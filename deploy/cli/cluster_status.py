"""`baton cluster status`, `baton ps --registry`: the routers and workers of a cluster.

    registry ─▶ records ─▶ Status of each worker, over mutual TLS ─▶ rows ─▶ table, or JSON
    Redis ─▶ reports of routers ─────────────────────────────────────▶┘

A router is listed if a worker that answers is linked to it, and over Redis also by its own reports.
Runs on any host that has the cluster's settings; changes nothing, and owns nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc.aio

from baton.deploy.cli.wide_table import print_table
from baton.deploy.control.orders import Cluster, read_records
from baton.proto import control_pb2, control_pb2_grpc
from baton.router.fleet.other_routers import OtherRouters
from baton.runtime import waits
from baton.runtime.grpc_links import credentials, open_channel, translate
from baton.runtime.registry import WorkerRecord
from baton.runtime.shared_registry.registry_location import (
    address_without_secrets,
    open_registry,
    open_reports,
)
from baton.runtime.shared_registry.router_report import RouterReport
from baton.runtime.tls import Tls

STATUS_TIMEOUT_S = 5.0
CANCEL_AGAIN_S = 0.1  # redis-py may lose a cancellation while it connects
LISTEN_S = 1.5  # a router repeats its report every second
BUSY_STATES = ("used", "leased", "pinned", "quarantined")  # of blocks


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A registered worker. Without an answer from it `state` is `unreachable`, `detail` says why,
    and the figures are 0. A text that a worker lacks is empty, as `--json` prints it."""

    worker_id: str
    role: str
    address: str
    model: str
    boot_id: str
    state: str  # ready, not ready, draining or unreachable
    detail: str = ""
    version: str = ""
    age_s: float = 0.0  # since its boot
    running: int = 0
    waiting: int = 0
    busy_blocks: int = 0
    total_blocks: int = 0
    routers: tuple[str, ...] = ()  # ids of those that are linked to it


@dataclass(frozen=True, slots=True)
class RouterRow:
    """`workers`: how many of those that answer are linked to it. `host`: its address as a worker
    sees it, else its name."""

    router_id: str
    host: str
    workers: int


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """`registry_state` is `readable`, or why it is not."""

    cluster: str
    registry: str
    registry_state: str
    workers: list[WorkerRow] = field(default_factory=list)
    routers: list[RouterRow] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def status_of(cluster: Cluster) -> ClusterStatus:
    """Read the registry and ask each worker. Raises ConfigError for settings that do not fit."""
    return asyncio.run(_status_of(cluster))


async def _status_of(cluster: Cluster) -> ClusterStatus:
    where = address_without_secrets(cluster.registry)
    client = open_registry(cluster.registry, cluster.security, cluster.secrets.accepted)
    try:
        records = await read_records(client)
        rejected = [f"registry entry {key} is rejected: {e}" for key, e in client.faults().items()]
    except OSError as error:
        return ClusterStatus(cluster.name, where, f"not readable: {error}")
    finally:
        await client.close()
    newest = {record.worker_id: record for record in records}  # the newest boot comes last
    tls = Tls(cluster.security) if cluster.security.tls == "on" else None
    asked = asyncio.gather(
        *(_ask(record, cluster.secrets.token, tls) for record in newest.values())
    )
    reported, answers = await asyncio.gather(_reported(cluster), asked)
    workers = [row for row, _ in answers]
    routers = _routers([answer for _, answer in answers if answer is not None], reported)
    warnings = [*cluster_warnings(workers, routers), *rejected]
    return ClusterStatus(cluster.name, where, "readable", workers, routers, warnings)


async def _reported(cluster: Cluster) -> Mapping[str, str]:
    """Return the hosts of the routers that report over the registry's server, by router id. None
    report over a folder."""
    reports = open_reports(cluster.registry, cluster.security, cluster.secrets.accepted)
    if reports is None:
        return {}
    routers = OtherRouters(own="")

    def learn(report: RouterReport) -> None:
        routers.learn(report, time.monotonic(), reports.wall_ns())

    following = asyncio.create_task(reports.follow(learn))
    # Routers repeat their reports: after this time each has sent one.
    await asyncio.sleep(LISTEN_S)
    await waits.cancel_all([following], CANCEL_AGAIN_S)
    await reports.close()
    return routers.hosts()


async def _ask(
    record: WorkerRecord, token: str, tls: Tls | None
) -> tuple[WorkerRow, control_pb2.StatusReply | None]:
    boot = control_pb2.WorkerBoot(worker_id=record.worker_id, boot_id=bytes.fromhex(record.boot_id))
    async with open_channel(record.address, tls) as channel:
        stub = control_pb2_grpc.WorkerControlStub(channel)
        request = control_pb2.StatusRequest(worker=boot)
        terms = {"metadata": credentials(token), "timeout": STATUS_TIMEOUT_S}
        try:
            answer: control_pb2.StatusReply = await stub.Status(request, **terms)
        except grpc.aio.AioRpcError as error:
            return _row(record, "unreachable", str(translate(error))), None
    return _answered(record, answer), answer


def _row(record: WorkerRecord, state: str, detail: str, **figures: Any) -> WorkerRow:
    return WorkerRow(
        worker_id=record.worker_id,
        role=record.role,
        address=record.address,
        model=record.model,
        boot_id=record.boot_id,
        state=state,
        detail=detail,
        **figures,
    )


def _answered(record: WorkerRecord, answer: control_pb2.StatusReply) -> WorkerRow:
    audit = json.loads(answer.audit)
    blocks = audit["blocks"]
    state = "not ready" if answer.not_ready_reason else "ready"
    return _row(
        record,
        "draining" if audit["draining"] else state,
        answer.not_ready_reason,
        version=answer.version,
        age_s=round(answer.up_s, 1),
        running=audit["running"],
        waiting=audit["waiting"],
        busy_blocks=sum(blocks.get(name, 0) for name in BUSY_STATES),
        total_blocks=blocks["total"],
        routers=tuple(router.router_id for router in answer.routers),
    )


def _routers(
    answers: Sequence[control_pb2.StatusReply], reported: Mapping[str, str]
) -> list[RouterRow]:
    """Return a row for each router that workers or its own reports name."""
    hosts = dict(reported)
    linked = dict.fromkeys(reported, 0)
    for answer in answers:
        for router in answer.routers:
            hosts[router.router_id] = router.host
            linked[router.router_id] = linked.get(router.router_id, 0) + 1
    return [RouterRow(name, hosts[name], linked[name]) for name in sorted(hosts)]


def cluster_warnings(workers: Sequence[WorkerRow], routers: Sequence[RouterRow]) -> list[str]:
    """Return what an operator should look at, one sentence each."""
    found = [
        f"{row.worker_id} is {row.state}: {row.detail}" for row in workers if row.state != "ready"
    ]
    if not any(row.role == "decode" and row.state == "ready" for row in workers):
        found.append("no decode worker is ready: no request can be served")
    versions = sorted({row.version for row in workers if row.version})
    if len(versions) > 1:
        found.append(f"workers have {len(versions)} versions: {', '.join(versions)}")
    for router in routers:
        missing = [
            row.worker_id
            for row in workers
            if row.state != "unreachable" and router.router_id not in row.routers
        ]
        if missing:
            name = router.router_id[:8]
            found.append(f"router {name} at {router.host} has no link to {', '.join(missing)}")
    return found


def show(cluster: Cluster, *, as_json: bool) -> int:
    """Print the status; 1 if the registry cannot be read, or lists no worker."""
    status = status_of(cluster)
    if as_json:
        print(json.dumps(asdict(status), indent=2))
    else:
        _print(status)
    return 0 if status.workers else 1


def _print(status: ClusterStatus) -> None:
    print(f"{status.cluster}: registry {status.registry} is {status.registry_state}")
    for warning in status.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if status.registry_state != "readable":
        return
    from rich.markup import escape
    from rich.table import Table

    columns = ("name", "role", "address", "state", "version", "age", "running", "waiting", "blocks")
    table = Table(*columns, box=None)
    for router in status.routers:
        name, links = f"router {router.router_id[:8]}", f"linked to {router.workers}"
        table.add_row(escape(name), "router", escape(router.host), links, "", "", "", "", "")
    for row in status.workers:
        figures = (str(row.running), str(row.waiting), f"{row.busy_blocks}/{row.total_blocks}")
        if row.state == "unreachable":
            figures = ("", "", "")
        age = f"{row.age_s:.0f} s" if row.version else ""
        cells = (row.worker_id, row.role, row.address, row.state, row.version, age, *figures)
        table.add_row(*map(escape, cells))
    print_table(table)
