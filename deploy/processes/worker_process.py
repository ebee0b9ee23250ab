"""The main of a worker process: an engine, and one role after another until it ends.

    engine ─▶ pool + mover ─▶ worker_roles.py ─▶ gRPC server, registry ─▶ drained ─┬▶ end
                 ▲                                                                 │
                 └───────────── another role, under a new boot id ─────────────────┘

Both roles start and stop alike; they differ by the loop that runs. SIGTERM drains the worker
(runtime/worker/drain.py); then it leaves the registry and waits for what it owes its peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio

from baton.decode_worker.worker import DecodeWorker
from baton.deploy.host.advertised_host import advertised_host
from baton.deploy.host.cluster_secrets import ClusterSecrets
from baton.deploy.host.kv_device import VARIABLE as KV_DEVICE
from baton.deploy.host.kv_device import kv_device
from baton.deploy.host.ports import address_of
from baton.deploy.host.process_lifecycle import raise_open_file_limit
from baton.deploy.processes.admin import AdminServer
from baton.deploy.processes.engine_loading import load_engine
from baton.deploy.processes.pool_memory import local_pool
from baton.deploy.processes.worker_control import WorkerControl, worker_status
from baton.deploy.processes.worker_roles import (
    Below,
    Boot,
    Served,
    decode_role,
    model_limits,
    prefill_role,
)
from baton.engine.execution.device_choice import device_label
from baton.engine.execution.torch_engine import TorchEngine
from baton.engine.scheduling.blocks import BlockPool, Hold
from baton.engine.scheduling.engine import Engine
from baton.engine.scheduling.step_health import StepHealth, probe_batch, probe_failure
from baton.engine.spec.model_spec import ModelSpec
from baton.kv_transfer import handshake
from baton.kv_transfer.nixl_mover import READ_THREADS, NixlMover
from baton.prefill_worker.worker import PrefillWorker
from baton.proto import control_pb2_grpc
from baton.runtime import logs, metrics, process_memory, worker_lock
from baton.runtime.config import Config
from baton.runtime.errors import ConfigError, EngineError
from baton.runtime.exposition import process_gauges, standard_names
from baton.runtime.grammar.grammar_compiler import GrammarCompiler
from baton.runtime.grammar.vocabulary import TOKENIZER_FILE, read_vocabulary
from baton.runtime.grpc_links import open_port
from baton.runtime.registry import Role, WorkerRecord
from baton.runtime.shared_registry.registry_location import (
    check_tls_files,
    folder_of,
    open_registry,
)
from baton.runtime.telemetry import tracing
from baton.runtime.tls import tls_of
from baton.runtime.worker.announcer import announce, withdraw
from baton.runtime.worker.drain import SERVER_GRACE_S, RoleControl, ShutdownSteps, serve_until

log = logs.get(__name__)

SWITCH_INTERVAL_S = 0.0005  # Python's own 5 ms lets any busy thread hold up a handoff
QUARANTINE_POLL_S = 1.0
QUARANTINE_SHARE = 0.25  # of the pool; above it the worker restarts
STEPS_POLL_S = 0.25
PORT_TIMEOUT_S = 5.0  # for the port of the role before
PORT_POLL_S = 0.05


def run_worker(
    config: Config,
    *,
    role: Role,
    worker_id: str,
    model_folder: Path,
    secrets: ClusterSecrets,
) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError or ModelError if it cannot start."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    logs.setup(worker_id, config.telemetry.log_level)
    split = {"ranks": config.worker.tp, "expert_groups": config.worker.ep}
    tracing.setup(worker_id, config.telemetry.otlp_endpoint, of_process=split)
    # before the model: they may have to be refused
    check_tls_files(config.registry, config.security)
    registry = open_registry(config.registry, config.security, secrets.accepted)
    registry_folder = folder_of(config.registry)
    advertised = advertised_host(config.worker, many_hosts=registry_folder is None)
    tls = tls_of(config.security)
    if (device := kv_device(advertised, os.environ)) is not None:  # before UCX starts
        os.environ[KV_DEVICE] = device
        log.info("kv transfers bound", interface=device, address=advertised)
    with contextlib.ExitStack() as stack:
        if registry_folder is not None:
            stack.enter_context(worker_lock.hold(registry_folder, worker_id))
        engine = load_engine(config, role, model_folder)
        boot = Boot(
            config=config,
            role=role,
            worker_id=worker_id,
            boot_id=os.urandom(handshake.BOOT_ID_BYTES),
            model_folder=model_folder,
            registry=registry,
            secrets=secrets,
            advertised=advertised,
            grammars=_grammars(model_folder, engine.spec),
            tls=tls,
        )
        try:
            asyncio.run(WorkerProcess(boot, engine).run())
        finally:
            boot.grammars.close()
            tracing.shutdown()


def _grammars(model_folder: Path, spec: ModelSpec) -> GrammarCompiler:
    """Read the model's vocabulary, which stops all threads for seconds: before the worker serves.
    Without a tokenizer or an end token the worker refuses grammars."""
    path = model_folder / TOKENIZER_FILE
    if not path.is_file() or not spec.eos_ids:
        return GrammarCompiler(None)
    return GrammarCompiler(read_vocabulary(path, spec.vocab_size, spec.eos_ids))


class WorkerProcess:
    """One engine, and the roles that it has one after the other. A role has a boot id, a pool of
    blocks, a mover and a server of its own: nothing of the role before is valid in it."""

    def __init__(self, boot: Boot, engine: TorchEngine) -> None:
        settings = boot.config.worker
        self._boot = boot
        self._engine = engine
        self._worker: DecodeWorker | PrefillWorker | None = None  # None: between two roles
        self._role_control = RoleControl(boot.role)
        self._admin = AdminServer(
            settings.host,
            settings.admin_port,
            self._audit,
            not_ready=self._not_ready,
            publish_gauges=self._publish_gauges,
        )

    async def run(self) -> None:
        """Serve until an order or a signal ends the process, or until a role fails; then settle
        what it owes its peers."""
        raise_open_file_limit()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._role_control.end)
        process_gauges.watch_process(loop)
        port_timeout_s = 0.0
        try:
            admin_address = await self._admin.start()
            while (role := self._role_control.begin()) is not None:
                self._boot = replace(self._boot, role=role)
                await self._serve(self._boot, admin_address, port_timeout_s)
                self._boot = replace(self._boot, boot_id=os.urandom(handshake.BOOT_ID_BYTES))
                port_timeout_s = PORT_TIMEOUT_S
        finally:
            await self._admin.stop()
            await self._engine.close()
            await self._boot.registry.close()
        log.info("worker stopped")

    async def _serve(self, boot: Boot, admin_address: str, port_timeout_s: float) -> None:
        """One role, from its first step to its last lease. Raises EngineError if READs of this
        role may still land when another role is to follow."""
        config, engine = boot.config, self._engine
        _publish_role(boot)
        pool = BlockPool(engine.pool.blocks, config.pool.block_size, config.pool.tenant_share)
        await first_step(engine, pool)
        mover = NixlMover(local_pool(engine.pool, engine.spec.kv_heads), boot.boot_id, READ_THREADS)
        below = Below(boot, engine, pool, mover, model_limits(boot, engine))
        served = decode_role(below) if boot.role == "decode" else prefill_role(below)
        orders = self._orders(boot, served)
        control_pb2_grpc.add_WorkerControlServicer_to_server(orders, served.server)
        process_memory.freeze_startup_objects()
        record = await _listen(boot, served.server, admin_address, port_timeout_s)
        record = replace(record, memory=_memory_line(engine))
        self._worker, health = served.worker, served.worker.health
        watches = [
            asyncio.create_task(announce(boot.registry, record)),
            asyncio.create_task(
                _watch_quarantine(pool, QUARANTINE_SHARE, config.handoff.read_timeout_s)
            ),
            asyncio.create_task(health.watch()),
            asyncio.create_task(process_memory.collect_periodically()),
            asyncio.create_task(
                _watch_steps(health, config.worker.failing_s, self._role_control.hurry)
            ),
        ]
        log.info(
            "worker ready",
            role=boot.role,
            address=record.address,
            admin=record.admin_address,
            boot_id=record.boot_id,
        )
        unsettled = 0

        async def close() -> None:
            nonlocal unsettled
            try:
                counts = pool.counts()
                unsettled = counts.quarantined + counts.leased + counts.pinned
                self._worker = None
            finally:
                await mover.close()

        ends = ShutdownSteps(
            withdraw=partial(withdraw, boot.registry, record),
            finish=served.finish,
            stop=partial(served.server.stop, SERVER_GRACE_S),
            close=close,
        )
        running = asyncio.create_task(served.worker.run())
        drain_s = config.worker.drain_s
        await serve_until(self._role_control, served.worker, running, watches, drain_s, ends)
        if unsettled and self._role_control.role is not None:
            raise EngineError(
                f"READs of {unsettled} blocks have not ended: the role cannot change, and the "
                "worker restarts; look for peers that are slow or stopped"
            )

    def _orders(self, boot: Boot, served: Served) -> WorkerControl:
        return WorkerControl(
            boot.worker_id,
            boot.boot_id,
            drain=self._role_control.drain,
            change_role=self._role_control.change,
            status=partial(worker_status, served, time.monotonic(), self._not_ready),
        )

    def _audit(self, check: bool) -> dict[str, Any]:
        if self._worker is None:
            return {"worker_id": self._boot.worker_id, "role": "changing"}
        return self._worker.audit(check=check)

    def _publish_gauges(self) -> None:
        if self._worker is not None:
            self._worker.publish_gauges()

    def _not_ready(self) -> str | None:
        """Return why the worker is not ready, or None if it is."""
        if self._worker is None:
            return "the worker has no role yet"
        if self._worker.draining.is_set():
            return "the worker drains"
        return self._worker.health.not_ready_reason()


def _publish_role(boot: Boot) -> None:
    """Begin to publish the metrics of a role."""
    process_gauges.set_role(boot.role)
    metrics.WORKER_PRICE.set(boot.config.slo.price_per_hour)
    metrics.RANKS.set(boot.config.worker.tp)
    metrics.EXPERT_GROUPS.set(boot.config.worker.ep)
    standard_names.publish_worker(boot.model_folder.name, boot.config.pool.block_size)


async def first_step(engine: Engine, pool: BlockPool) -> None:
    """Compute one token, on a pool that nothing else uses yet. Steps end in order: after it no
    earlier step writes into the pool. Raises EngineError if it fails."""
    (block,) = pool.allocate(1, Hold.USED)
    result = await engine.submit(probe_batch(block)).result()
    pool.release([block], Hold.USED)
    if failure := probe_failure(result):
        raise EngineError(failure)


def _memory_line(engine: TorchEngine) -> str:
    """Where the memory goes; empty where the pool was not sized by it."""
    if engine.memory is None:
        return ""
    device = engine.pool.tensor.device
    where = "" if device.type == "cpu" else f"{device_label(device)}: "
    return where + engine.memory.line()


async def _listen(
    boot: Boot, server: grpc.aio.Server, admin_address: str, port_timeout_s: float = 0.0
) -> WorkerRecord:
    settings = boot.config.worker
    clock = asyncio.get_running_loop().time
    until_s = clock() + port_timeout_s  # the role before may still let go of the port
    while True:
        try:
            port = open_port(server, address_of(settings.host, settings.port), boot.tls)
            break
        except RuntimeError as error:
            if clock() >= until_s:
                raise ConfigError(
                    f"worker.port {settings.port} on {settings.host} cannot be used: give "
                    "another port, or 0, and for worker.host an address of this machine"
                ) from error
        # The kernel does not report when the port becomes free.
        await asyncio.sleep(PORT_POLL_S)
    await server.start()
    host = settings.host if boot.advertised is None else boot.advertised
    return WorkerRecord(
        worker_id=boot.worker_id,
        boot_id=boot.boot_id.hex(),
        role=boot.role,
        address=address_of(host, port),
        admin_address=address_of(host, int(admin_address.rpartition(":")[2])),
        model=boot.model_folder.name,
        pid=os.getpid(),
    )


async def _watch_steps(health: StepHealth, within_s: float, hurry: Callable[[], None]) -> None:
    """End the process, so that its supervisor restarts it, when all steps and probes have failed
    for `within_s`. It can finish no request, so it hands all of them back at once. Time in which
    the process stood still does not count: what did not move then may move now."""
    clock = asyncio.get_running_loop().time
    failed_s, failure = 0.0, None
    while failed_s <= within_s:
        asked_s = clock()
        # Failures count only when they last, so the state is read at this period.
        await asyncio.sleep(STEPS_POLL_S)
        failure = health.persistent_failure()
        slept_s = min(clock() - asked_s, 2 * STEPS_POLL_S)
        failed_s = 0.0 if failure is None else failed_s + slept_s
    hurry()
    raise EngineError(
        f"{failure}; no step or probe has succeeded for {within_s:g} s: the worker restarts"
    )


async def _watch_quarantine(pool: BlockPool, limit: float, within_s: float) -> None:
    """End the process, so that its supervisor restarts it, when too much of the pool has been in
    quarantine for `within_s`: a READ that was cancelled ends by itself, mostly in milliseconds."""
    clock = asyncio.get_running_loop().time
    well_s, quarantined = clock(), 0
    while clock() - well_s <= within_s:
        # No event tells of a quarantined block, and the pool is counted at little cost.
        await asyncio.sleep(QUARANTINE_POLL_S)
        quarantined = pool.quarantined
        if quarantined <= limit * pool.total:
            well_s = clock()
    raise EngineError(
        f"{quarantined} of {pool.total} blocks are in quarantine, and too many have been for "
        f"{within_s:g} s: the worker restarts; look for peers that are slow or stopped"
    )
