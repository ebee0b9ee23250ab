"""`baton ps`: what runs on this host under this user, from the instances' own files.

Reads registry, status files and each worker's audit; owns nothing and changes nothing.
"""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.deploy.cli.wide_table import print_table
from baton.deploy.host.instance import (
    admin_address_file,
    grpc_address_file,
    is_locked,
    live_instances,
    read_status,
    router_address_file,
)
from baton.deploy.host.router_trust import url_of
from baton.deploy.serve.plan import ROUTER_JOB
from baton.deploy.serve.router_state import admin_address
from baton.runtime.registry import DirectoryRegistry, WorkerRecord
from baton.runtime.registry_client import answer_within

AUDIT_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One job of a live instance. `admin` is the address of its admin port; `audit`
    is empty where a worker gave none. `ended` is how the process before this one ended,
    `message` what it said about that; `log` is the file of both. A text that a job lacks is empty,
    as `baton ps --json` prints it."""

    instance: str
    name: str
    state: str
    pid: int
    starts: int
    address: str = ""
    admin: str = ""
    model: str = ""
    audit: dict[str, Any] = field(default_factory=dict)
    ended: str = ""
    message: str = ""
    log: str = ""


def running() -> list[ProcessRow]:
    """Every job of every live instance of this user."""
    return [row for folder in live_instances() for row in _rows(folder)]


def _rows(folder: Path) -> Iterator[ProcessRow]:
    registry = folder / "registry"  # made by `baton serve`: looking must not make it
    records = {record.worker_id: record for record in _announced_workers(registry)}
    for path in sorted(folder.glob("*.status")):
        name = path.stem
        status = read_status(folder, name)
        if status is None:
            continue
        kept = is_locked(folder / f"{name}.lock") or status.state in ("failed", "stopped")
        record = records.get(name)
        if record is not None and record.pid != status.pid:
            record = None  # of the start before: it was killed, and has withdrawn nothing
        yield ProcessRow(
            instance=folder.name,
            name=name,
            state=_state(status.state, kept, record, name),
            pid=status.pid,
            starts=status.starts,
            address=record.address if record else _router_address(folder, name) or "",
            admin=record.admin_address if record else _admin_address(folder, name) or "",
            model=record.model if record else "",
            audit=_audit_of(record, records) if record else {},
            ended=status.ended or "",
            message=status.message or "",
            log=str((folder / f"{name}.log").resolve()),
        )


def _audit_of(record: WorkerRecord, records: dict[str, WorkerRecord]) -> dict[str, Any]:
    """A worker's audit, without degraded peers whose boot has ended."""
    audit = fetch_audit(record.admin_address)
    peers = audit.get("degraded_peers")
    if isinstance(peers, list):
        boots = {other.boot_id for other in records.values()}
        audit["degraded_peers"] = [
            peer for peer in peers if isinstance(peer, dict) and peer.get("boot_id") in boots
        ]
    return audit


def _announced_workers(registry: Path) -> list[WorkerRecord]:
    """Return the registry's workers. If it cannot be read, print that on stderr and return none."""
    try:
        return answer_within(
            lambda: DirectoryRegistry(registry).workers() if registry.is_dir() else []
        )
    except OSError as error:
        print(f"{registry} cannot be read, so no workers are shown: {error}", file=sys.stderr)
        return []


def _state(state: str, kept: bool, record: WorkerRecord | None, name: str) -> str:
    if not kept:
        return "lost"
    is_worker = name.startswith(("prefill-", "decode-"))
    return "starting" if state == "running" and is_worker and record is None else state


def router_urls() -> list[str]:
    """Where the routers of this user's live instances listen; one that does not yet is left
    out."""
    addresses = [_router_address(folder, ROUTER_JOB) for folder in live_instances()]
    return [url_of(address) for address in addresses if address is not None]


def ports_in_use() -> set[int]:
    """Return the ports on which routers and workers of this user's live instances listen."""
    addresses = []
    for folder in live_instances():
        router = router_address_file(folder)
        files = (router, grpc_address_file(router), admin_address_file(router))
        addresses += [path.read_text().strip() for path in files if path.exists()]
        for record in _announced_workers(folder / "registry"):
            addresses += [record.address, record.admin_address]
    return {int(address.rpartition(":")[2]) for address in addresses if address}


def _router_address(folder: Path, name: str) -> str | None:
    path = folder / f"{name}.address"
    return path.read_text().strip() if path.exists() else None


def _admin_address(folder: Path, name: str) -> str | None:
    """Return the address of a router's admin port; None if it has none."""
    return admin_address(folder) if name == ROUTER_JOB else None


def fetch_audit(address: str) -> dict[str, Any]:
    """A worker's audit; empty where it does not answer in time."""
    connection = http.client.HTTPConnection(address, timeout=AUDIT_TIMEOUT_S)
    try:
        connection.request("GET", "/audit")
        response = connection.getresponse()
        found = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError):
        return {}  # shown as a worker without figures, which is what it is
    finally:
        connection.close()
    return found if response.status == 200 and isinstance(found, dict) else {}


def show(*, as_json: bool) -> int:
    """Print the table, or one JSON array; 1 when nothing runs."""
    rows = running()
    if as_json:
        from dataclasses import asdict

        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0 if rows else 1
    if not rows:
        print(
            "no `baton serve` of this user runs here: start one, or give the --registry of "
            "workers that were started by `baton worker`"
        )
        return 1
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        "instance", "name", "state", "pid", "starts", "last end", "address", "load", box=None
    )
    for row in rows:
        cells = (
            row.instance,
            row.name,
            row.state,
            str(row.pid),
            str(row.starts),
            row.ended,
            row.address,
        )
        table.add_row(*(escape(cell) for cell in (*cells, _load(row.audit))))  # [::1] is no markup
    print_table(table)
    return 0


def _load(audit: dict[str, Any]) -> str:
    """Return a short text for a terminal: `--json` has all. The role is shown: it need not be
    the name's. Cached blocks count as free."""
    words = [str(audit.get("role", ""))]
    if audit.get("draining"):
        words.append("draining")
    words += [f"{audit[name]} {name}" for name in ("running", "waiting") if audit.get(name)]
    blocks = audit.get("blocks")
    if isinstance(blocks, dict):
        total, *empty = (blocks.get(name, 0) for name in ("total", "free", "cached"))
        words.append(f"KV {100 * (total - sum(empty)) / max(total, 1):.0f} %")
    slow = audit.get("degraded_peers")
    if isinstance(slow, list):
        words += [f"DEGRADED from {e.get('worker_id')}: {e.get('gb_per_s')} GB/s" for e in slow]
    return ", ".join(words)
