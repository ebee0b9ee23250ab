"""Keeps one worker on this node: starts its supervisor, adopts one that runs, ends boots elsewhere.

    actor of Ray ─▶ NodeWorker ─▶ supervisor (supervisor.py) ─▶ baton worker ─▶ registry (Redis)
                        └──────────────── reads the worker's boots ◀──────────────┘

The supervisor is no child of the actor's process and outlives it, a raylet and Ray's head. An actor
that is made again on this node finds the supervisor at its lock and adopts it. One made on another
node starts the worker there, and drains the earlier boot once its own is registered. Knows
nothing of Ray.
"""

from __future__ import annotations

import asyncio
import math
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from baton.deploy.control.orders import Cluster, Target, order_drain, read_records
from baton.deploy.host.advertised_host import advertised_host
from baton.deploy.host.cluster_secrets import read_secrets
from baton.deploy.host.instance import (
    Job,
    JobState,
    JobStatus,
    is_locked,
    read_job,
    read_progress,
    read_status,
    signal_supervisor,
    write_job,
)
from baton.deploy.host.job_log import log_end
from baton.deploy.nodes.node_folder import Tending, is_leaving, node_folder
from baton.deploy.nodes.worker_order import (
    EMBEDDED,
    WorkerOrder,
    node_settings,
    restore_fields,
    worker_command,
)
from baton.deploy.serve.process_launcher import ProcessLauncher
from baton.models.embedded import embedded_model
from baton.runtime import logs
from baton.runtime.errors import BatonError
from baton.runtime.registry import WorkerRecord
from baton.runtime.registry_client import RegistryClient
from baton.runtime.settings.loading import load
from baton.runtime.shared_registry.registry_location import open_registry

TURN_S = 0.5
RETRY_S = 60.0  # until a worker that was given up is tried again: its node may be repaired
State = Literal["starting", "elsewhere", "leaving", "ended"] | JobState

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The state of one worker, for the driver. `state` is its job's, or `starting` before that,
    `elsewhere` while another actor has it on this node, `leaving` once the node is to end, `ended`
    after `end`. `boot_id`, `address` and `memory` are empty while it is not registered; then
    `progress` says what it does, and `log` has the last lines of its log. `message` says what keeps
    it from its work. `adopted`: it ran already when this actor was made. `restarts`: how often it
    was started again since. A driver reads reports of actors of other versions: a text that is
    absent stays empty, and a new field is the last one, with a default."""

    order: WorkerOrder
    node: str
    state: State = "starting"
    starts: int = 0
    boot_id: str = ""
    address: str = ""
    message: str = ""
    adopted: bool = False
    restarts: int = 0
    progress: str = ""
    memory: str = ""
    log: str = ""

    def __setstate__(self, state: Sequence[Any]) -> None:
        """Unpickle a report. One of an earlier version lacks the last fields."""
        restore_fields(self, state)


class NodeWorker:
    """Keeps the worker of `order` on the node with the address `node`, in the thread that calls
    `run`. The constructor raises ConfigError for an environment that lacks what a worker needs."""

    def __init__(self, order: WorkerOrder, node: str, environ: Mapping[str, str]) -> None:
        settings = node_settings(order, node, environ)
        config = load(None, environ, settings)
        secrets = read_secrets(environ)
        self._name = order.worker_id
        self._host = advertised_host(config.worker, many_hosts=True)
        self._cluster = Cluster(order.cluster, config.registry, secrets, config.security)
        self._folder = node_folder(order.cluster, environ)
        model = embedded_model() if order.model == EMBEDDED else Path(order.model)
        command = worker_command(order, model, settings)
        self._job = Job(self._name, command, order.grace_s, tended=True)
        self._launcher = ProcessLauncher(self._folder, [self._name])
        self._report = WorkerReport(order, node)
        self._ending = threading.Event()
        self._drained: set[str] = set()  # boot ids that have accepted the order
        self._given_up_s: float | None = -math.inf  # on the monotonic clock; by an actor before
        self._found: int | None = None  # the start that ran at the first turn; 0: none did
        self._first = 1  # the first start that this actor has seen

    def report(self) -> WorkerReport:
        """Return the state of the last turn. For any thread, as is `end`."""
        return self._report

    def end(self) -> None:
        """Drain the worker and end it, on this node and where an earlier boot runs."""
        self._ending.set()

    def run(self) -> None:
        """Keep the worker, and return once it has ended after `end`."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        security, tokens = self._cluster.security, self._cluster.secrets.accepted
        registry = open_registry(self._cluster.registry, security, tokens)
        tending = Tending(self._folder, self._name)
        try:
            while self._report.state != "ended":
                await self.turn(registry, tending)
                # Supervisor and registry report nothing to this actor: it reads them once a turn.
                await asyncio.sleep(TURN_S)
        finally:
            tending.close()
            await registry.close()

    async def turn(self, registry: RegistryClient, tending: Tending) -> None:
        """Do once what keeping takes. No error ends it, because nothing else keeps the worker: an
        error is reported until a turn succeeds."""
        try:
            if not tending.claim():
                self._note(state="elsewhere", message="an earlier actor on this node has it still")
                return
            await asyncio.to_thread(self._keep)
            records = [e for e in await read_records(registry) if e.worker_id == self._name]
            here = [each for each in records if self._runs_here(each)]
            self._note_record(here[-1] if here else None)
            if here or self._ending.is_set():
                await self._drain([each for each in records if not self._is_of_this_node(each)])
            if self._ending.is_set() and not is_locked(self._folder / f"{self._name}.lock"):
                self._note(state="ended", message="")
        except Exception as error:  # else the thread ends, and nothing keeps the worker
            self._note(message=f"{type(error).__name__}: {error}")

    def _keep(self) -> None:
        """Start the job's supervisor if it has none, or end it. Raises BatonError or OSError."""
        leaving = is_leaving(self._folder)
        if self._found is None:
            self._found, before = self._starts_before()
            self._first = self._found or before + 1
        if is_locked(self._folder / f"{self._name}.lock"):
            if self._ending.is_set() or leaving or read_job(self._folder, self._name) != self._job:
                signal_supervisor(
                    self._folder, self._name, signal.SIGTERM
                )  # repeating does no harm
        elif not self._ending.is_set() and not leaving:
            self._try_again()
            write_job(self._folder, self._job)
            self._launcher.tend()
        status = read_status(self._folder, self._name)
        if status is not None:
            self._note_status(status)
        if leaving:
            self._note(state="leaving")

    def _starts_before(self) -> tuple[int, int]:
        """Return which start of the worker runs on this node, counted from 1, or 0 if none does,
        and how many there were."""
        status = read_status(self._folder, self._name)
        if status is None:
            return 0, 0
        kept = is_locked(self._folder / f"{self._name}.lock")
        return (status.starts if kept else 0), status.starts

    def _note_status(self, status: JobStatus) -> None:
        message = ""
        if status.state in ("waiting", "failed") and status.ended:  # else it is of an earlier child
            message = status.message or f"its process ended ({status.ended})"
        self._note(
            state=status.state,
            starts=status.starts,
            restarts=max(0, status.starts - self._first),
            message=message,
            adopted=status.starts == self._found,
        )
        if not self._report.boot_id:
            running = status.state == "running"
            progress = read_progress(self._folder, self._name) if running else None
            self._note(progress=progress or "", log=log_end(self._folder, self._name))

    def _note_record(self, record: WorkerRecord | None) -> None:
        if record is None:
            self._note(boot_id="", address="", memory="")
        else:
            found = {"boot_id": record.boot_id, "address": record.address, "memory": record.memory}
            self._note(**found, progress="", log="")

    def _try_again(self) -> None:
        """Forget that the worker was given up: RETRY_S after it was, and for another command or
        another actor."""
        status = read_status(self._folder, self._name)
        if status is None or status.state != "failed":
            self._given_up_s = None
            return
        if self._given_up_s is None:
            self._given_up_s = time.monotonic()
        another = read_job(self._folder, self._name) != self._job
        if another or time.monotonic() - self._given_up_s >= RETRY_S:
            (self._folder / f"{self._name}.status").unlink(missing_ok=True)
            self._given_up_s, self._first = None, 1

    def _runs_here(self, record: WorkerRecord) -> bool:
        """Whether the record is of the process that this node's supervisor runs now."""
        status: JobStatus | None = read_status(self._folder, self._name)
        running = status is not None and status.state == "running" and status.pid == record.pid
        return running and self._is_of_this_node(record)

    def _is_of_this_node(self, record: WorkerRecord) -> bool:
        return record.host == self._host.strip("[]")

    async def _drain(self, records: Sequence[WorkerRecord]) -> None:
        """Drain boots on other nodes, which no actor tends any more, so that they are not started
        again."""
        for record in records:
            if record.boot_id in self._drained:
                continue
            try:
                await order_drain(Target(self._cluster, record))
            except BatonError as error:  # a dead one is forgotten within its lifetime
                log.info("earlier boot unreachable", boot=record.boot_id, reason=str(error))
            else:
                self._drained.add(record.boot_id)
                log.info("earlier boot drained", boot=record.boot_id, address=record.address)

    def _note(self, **changes: Any) -> None:
        self._report = replace(self._report, **changes)
