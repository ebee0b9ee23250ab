"""The main of a worker process: builds what lies below the seams, and runs one role on it.

    engine + pool + mover ─▶ DecodeWorker or PrefillWorker ─▶ gRPC server, admin port, registry

Both roles start and stop alike; they differ by the loop that runs. SIGTERM withdraws the worker
from the registry, ends its loop and waits for what it owes its peers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import grpc.aio

from baton.decode_worker.first_contact import FirstContact
from baton.decode_worker.peers import GrpcPeers
from baton.decode_worker.worker import DecodeWorker
from baton.deploy.admin import AdminServer
from baton.deploy.pool_memory import local_pool
from baton.engine.blocks import BlockPool
from baton.engine.device_choice import device_label
from baton.engine.fingerprint import model_fingerprint
from baton.engine.loading import build_engine
from baton.engine.torch_engine import TorchEngine
from baton.kv_transfer import greeting
from baton.kv_transfer.nixl_mover import NixlMover
from baton.prefill_worker.service import HandoffService
from baton.prefill_worker.worker import PrefillWorker
from baton.proto import handoff_pb2, handoff_pb2_grpc, worker_pb2_grpc
from baton.runtime import identity, logs, tracing
from baton.runtime.config import Config
from baton.runtime.errors import ConfigError, EngineError
from baton.runtime.grpc_links import open_server
from baton.runtime.registry import (
    DirectoryRegistry,
    Registry,
    Role,
    WorkerRecord,
    check_worker_id,
)
from baton.runtime.wire import ModelLimits
from baton.runtime.worker_service import WorkerService

log = logs.get(__name__)

ANNOUNCE_S = 3.0
PROGRESS_S = 3.0
SWITCH_INTERVAL_S = 0.0005  # Python's own 5 ms lets any busy thread hold up a handoff
STOP_GRACE_S = 5.0
SERVER_GRACE_S = 0.5
QUARANTINE_LOOK_S = 1.0


def run_worker(
    config: Config,
    *,
    role: Role,
    worker_id: str,
    model_folder: Path,
    registry_folder: Path,
    token: str,
) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError or ModelError if it cannot start."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    logs.setup(worker_id, config.telemetry.log_level, log_prompts=config.telemetry.log_prompts)
    tracing.setup(worker_id, config.telemetry.otlp_endpoint)
    check_worker_id(worker_id)
    registry = DirectoryRegistry(registry_folder)  # before the model: it may have to be refused
    started = time.monotonic()
    settings = config.worker
    engine = build_engine(
        model_folder,
        blocks=config.pool.blocks,
        block_size=config.pool.block_size,
        dtype=settings.dtype,
        threads=settings.threads,
        max_context=settings.max_context,
        memory_fraction=config.pool.memory_fraction,
        deterministic=settings.deterministic,
        quantization=settings.quantization,
        kv_dtype=config.pool.kv_dtype,
        progress=LoadProgress(),
        device=settings.device,
        most_rows=config.step.max_sequences if role == "decode" else 1,  # prompts are no graphs
        step_tokens=max(config.step.prefill_tokens, config.step.local_prefill_tokens),
    )
    log.info(
        "model loaded",
        model=model_folder.name,
        device=device_label(engine.pool.tensor.device),
        seconds=round(time.monotonic() - started, 2),
        kv_blocks=engine.pool.blocks,
        kv_tokens=engine.pool.blocks * config.pool.block_size,
        kv_bytes=engine.pool.blocks * engine.pool.block_bytes,
    )
    if engine.memory is not None:
        log.info("memory", plan=engine.memory.line(), **asdict(engine.memory))
    boot = Boot(
        config=config,
        role=role,
        worker_id=worker_id,
        boot_id=os.urandom(greeting.BOOT_ID_BYTES),
        model_folder=model_folder,
        registry=registry,
        token=token,
    )
    try:
        asyncio.run(_serve(boot, engine))
    finally:
        tracing.shutdown()


class LoadProgress:
    """Says every few seconds how far the weights are. Called by the threads that load."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._said = clock()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now = self._clock()
        if now - self._said < PROGRESS_S:
            return
        self._said = now
        log.info(
            "loading weights",
            done_bytes=done_bytes,
            total_bytes=total_bytes,
            percent=round(100 * done_bytes / max(total_bytes, 1), 1),
            seconds=round(now - self._began, 1),
        )


@dataclass(frozen=True, slots=True)
class Boot:
    """One start of a worker."""

    config: Config
    role: Role
    worker_id: str
    boot_id: bytes
    model_folder: Path
    registry: Registry
    token: str


async def _serve(boot: Boot, engine: TorchEngine) -> None:
    """Run the role until a signal, or until it fails; then leave nothing owed."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    config = boot.config
    read_threads = config.handoff.read_threads if boot.role == "decode" else 1
    mover = NixlMover(local_pool(engine.pool), boot.boot_id, read_threads)
    pool = BlockPool(engine.pool.blocks, config.pool.block_size)
    limits = _limits(boot, engine)
    below = _Below(boot, engine, pool, mover, limits)
    role = _decode(below) if boot.role == "decode" else _prefill(below)
    admin = AdminServer(config.worker.host, config.worker.admin_port, role.worker.audit)
    record = await _listen(boot, role.server, admin)
    if engine.memory is not None:
        device = engine.pool.tensor.device
        where = "" if device.type == "cpu" else f"{device_label(device)}: "
        record = replace(record, memory=where + engine.memory.line())
    tasks = [
        asyncio.create_task(role.worker.run()),
        asyncio.create_task(_announce(boot.registry, record)),
        asyncio.create_task(_watch_quarantine(pool, config.pool.quarantine_limit)),
        asyncio.create_task(stop.wait()),
    ]
    log.info("worker ready", role=boot.role, address=record.address, boot_id=record.boot_id)
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # a loop that ends by itself ends the worker, loudly
    finally:
        role.worker.draining = True
        boot.registry.withdraw(boot.worker_id, record.boot_id)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=STOP_GRACE_S)
        await role.finish()
        await role.server.stop(grace=SERVER_GRACE_S)
        await admin.stop()
        await mover.close()
        await engine.close()


@dataclass(frozen=True, slots=True)
class _Below:
    """What lies below a worker's seams."""

    boot: Boot
    engine: TorchEngine
    pool: BlockPool
    mover: NixlMover
    limits: ModelLimits

    def greeting(self) -> handoff_pb2.Greeting:
        spec = self.engine.spec
        common = greeting.compatibility(
            self.limits.fingerprint,
            self.limits.kv_dtype,
            self.pool.block_size,
            spec.layers,
            spec.kv_heads,
            spec.head_dim,
        )
        return greeting.build(self.boot.worker_id, self.mover.describe(), common)

    def wall_offset_s(self) -> float:
        return time.time() - asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class _Role:
    """A role's worker, its gRPC server, and what it waits for at its end."""

    worker: DecodeWorker | PrefillWorker
    server: grpc.aio.Server
    finish: Callable[[], Awaitable[None]]


def _decode(below: _Below) -> _Role:
    boot = below.boot
    floor_gbps = boot.config.handoff.preflight_floor_gbps
    first_contact = FirstContact(below.mover, below.pool, floor_gbps)
    peers = GrpcPeers(below.greeting, below.mover, boot.token, first_contact)
    worker = DecodeWorker(
        worker_id=boot.worker_id,
        boot_id=boot.boot_id,
        engine=below.engine,
        pool=below.pool,
        mover=below.mover,
        peers=peers,
        limits=below.limits,
        config=boot.config,
        wall_offset_s=below.wall_offset_s(),
        new_id=partial(os.urandom, greeting.BOOT_ID_BYTES),
    )
    return _Role(worker, _server(boot, worker), peers.close)


def _prefill(below: _Below) -> _Role:
    boot = below.boot
    worker = PrefillWorker(
        worker_id=boot.worker_id,
        boot_id=boot.boot_id,
        engine=below.engine,
        pool=below.pool,
        mover=below.mover,
        limits=below.limits,
        config=boot.config,
        wall_offset_s=below.wall_offset_s(),
    )
    server = _server(boot, worker)
    handoffs = HandoffService(worker, below.greeting)
    handoff_pb2_grpc.add_HandoffServicer_to_server(handoffs, server)  # type: ignore[no-untyped-call]
    leases_s = 2 * boot.config.handoff.lease_s
    return _Role(worker, server, lambda: handoffs.finished(leases_s))


def _server(boot: Boot, worker: DecodeWorker | PrefillWorker) -> grpc.aio.Server:
    server = open_server(boot.token)
    service = WorkerService(worker, worker.feed, boot.config.router)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    return server


def _limits(boot: Boot, engine: TorchEngine) -> ModelLimits:
    pool_tokens = engine.pool.blocks * boot.config.pool.block_size
    return ModelLimits(
        vocab_size=engine.spec.vocab_size,
        max_context=min(engine.max_context, pool_tokens),
        fingerprint=model_fingerprint(
            boot.model_folder,
            boot.config.worker.max_context,
            engine.numerics,
            boot.config.worker.quantization,
        ),
        kv_dtype=engine.dtype_name,
        key=identity.cluster_key(boot.token),
    )


async def _listen(boot: Boot, server: grpc.aio.Server, admin: AdminServer) -> WorkerRecord:
    settings = boot.config.worker
    try:
        port = server.add_insecure_port(f"{settings.host}:{settings.port}")
    except RuntimeError as error:
        raise ConfigError(
            f"worker.port {settings.port} on {settings.host} cannot be used: give another "
            "port, or 0, and for worker.host an address of this machine"
        ) from error
    await server.start()
    return WorkerRecord(
        worker_id=boot.worker_id,
        boot_id=boot.boot_id.hex(),
        role=boot.role,
        address=f"{settings.host}:{port}",
        admin_address=await admin.start(),
        model=boot.model_folder.name,
        pid=os.getpid(),
    )


async def _announce(registry: Registry, record: WorkerRecord) -> None:
    while True:
        try:
            registry.announce(record)
        except OSError as error:  # a full disk ends no request; the announcement fades meanwhile
            log.error("the worker could not announce itself", why=str(error))
        await asyncio.sleep(ANNOUNCE_S)


async def _watch_quarantine(pool: BlockPool, limit: float) -> None:
    """End the process, to be started anew, when too much of the pool is in quarantine."""
    quarantined = 0
    while quarantined <= limit * pool.total:
        await asyncio.sleep(QUARANTINE_LOOK_S)
        quarantined = pool.counts().quarantined
    raise EngineError(
        f"{quarantined} of {pool.total} blocks are in quarantine: the worker "
        "restarts; look for peers that stall"
    )
