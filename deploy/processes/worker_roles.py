"""The two roles of a worker process: what each is built of, on the same parts below its seams.

    Below (engine, pool, mover, limits) ─▶ decode_role or prefill_role ─▶ Served

Knows no signals and no registry; the process's main (worker_process.py) runs and ends what is
built here.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import grpc.aio

from baton.decode_worker.speculator import Speculator
from baton.decode_worker.worker import DecodeWorker
from baton.deploy.host.cluster_secrets import ClusterSecrets
from baton.deploy.host.own_topology import own_topology
from baton.deploy.processes.draft_choice import draft_fingerprint
from baton.deploy.processes.pool_memory import conversion_of
from baton.engine.checkpoint.fingerprint import model_fingerprint
from baton.engine.execution.torch_engine import TorchEngine
from baton.engine.scheduling.blocks import BlockPool
from baton.engine.speculation.ngram_proposer import NgramProposer
from baton.engine.speculation.suffix_proposer import SuffixProposer
from baton.kv_transfer import handshake
from baton.kv_transfer.conversion import Conversion
from baton.kv_transfer.nixl_mover import NixlMover
from baton.kv_transfer.peers.bandwidth_probe import BandwidthProbe
from baton.kv_transfer.peers.handoff_service import HandoffService
from baton.kv_transfer.peers.host_id import host_id
from baton.kv_transfer.peers.peer_client import grpc_dial
from baton.kv_transfer.peers.registered_peers import RegisteredPeers
from baton.prefill_worker.worker import PrefillWorker
from baton.proto import handoff_pb2, handoff_pb2_grpc, worker_pb2_grpc
from baton.runtime import identity
from baton.runtime.config import Config
from baton.runtime.grammar.grammar_compiler import GrammarCompiler
from baton.runtime.grpc_links import open_server
from baton.runtime.registry import Role
from baton.runtime.registry_client import RegistryClient
from baton.runtime.tls import Tls
from baton.runtime.wire import ModelLimits
from baton.runtime.worker.kv_bridge import bridged_dtypes
from baton.runtime.worker.service import WorkerService


@dataclass(frozen=True, slots=True)
class Boot:
    """One start of a worker."""

    config: Config
    role: Role
    worker_id: str
    boot_id: bytes
    model_folder: Path
    registry: RegistryClient
    secrets: ClusterSecrets
    advertised: str | None = None  # host that it announces; None: the one that it listens on
    tls: Tls | None = None  # None: it talks in plain text
    grammars: GrammarCompiler = field(default_factory=lambda: GrammarCompiler(None))


@dataclass(frozen=True, slots=True)
class Below:
    """The parts below a worker's seams, the same for both roles."""

    boot: Boot
    engine: TorchEngine
    pool: BlockPool
    mover: NixlMover
    limits: ModelLimits
    _conversions: dict[str, Conversion] = field(default_factory=dict, compare=False)

    def handshake(self) -> handoff_pb2.HandshakeMessage:
        spec, settings = self.engine.spec, self.boot.config.worker
        common = handshake.compatibility(
            self.limits.fingerprint,
            self.limits.kv_dtype,
            self.pool.block_size,
            spec.layers,
            spec.kv_heads,
            spec.head_dim,
            verify=self.boot.config.handoff.verify,
            draft_fingerprint=draft_fingerprint(settings, self.boot.model_folder),
            deterministic_split=f"tp {settings.tp} ep {settings.ep}"
            if settings.deterministic
            else None,
            bridged_dtypes=self._bridged_dtypes(),
            bridges_sizes=self.mover.bridges_sizes and not settings.deterministic,
        )
        return handshake.build(self.boot.worker_id, self.mover.describe(), common, host_id())

    def stated_limits(self) -> ModelLimits:
        """Return the limits with what readers and granters of this worker must have alike."""
        return replace(self.limits, kv_terms=handshake.terms(self.handshake()))

    def _bridged_dtypes(self) -> list[str]:
        """Return the KV dtypes of possible peers with another one: none for a deterministic
        worker, whose KV must be its own bits."""
        if self.boot.config.worker.deterministic:
            return []
        return [name for name in bridged_dtypes(self.limits.kv_dtype) if self.conversions(name)]

    def conversions(self, kv_dtype: str) -> Conversion | None:
        """Return the conversion of this worker's KV for a reader, if there is one. Each is made
        once: on a GPU it has a stream of its own."""
        made = self._conversions.get(kv_dtype)
        if made is None:
            made = conversion_of(self.engine.pool, self.engine.spec, kv_dtype)
        if made is not None:
            self._conversions[kv_dtype] = made
        return made

    def wall_offset_s(self) -> float:
        return time.time() - asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True)
class Served:
    """A role's worker, its gRPC server, and what it waits for at its end."""

    worker: DecodeWorker | PrefillWorker
    server: grpc.aio.Server
    links: WorkerService
    finish: Callable[[], Awaitable[None]]


def decode_role(below: Below) -> Served:
    boot = below.boot
    peers = _peers(below)
    worker = DecodeWorker(
        worker_id=boot.worker_id,
        boot_id=boot.boot_id,
        engine=below.engine,
        pool=below.pool,
        mover=below.mover,
        peers=peers,
        limits=below.stated_limits(),
        config=boot.config,
        wall_offset_s=below.wall_offset_s(),
        new_id=partial(os.urandom, handshake.BOOT_ID_BYTES),
        grammars=boot.grammars,
        speculator=_speculator(boot.config),
        conversions=below.conversions,
    )
    return _served(below, worker, peers)


def _peers(below: Below) -> RegisteredPeers:
    boot = below.boot
    handoff = boot.config.handoff
    bandwidth_probe = BandwidthProbe(below.mover, below.pool, handoff.preflight_floor_gb_per_s)
    dial = grpc_dial(boot.secrets.token, boot.tls)
    return RegisteredPeers(
        below.handshake, below.mover, dial, bandwidth_probe, boot.registry, handoff.lease_s
    )


def _served(below: Below, worker: DecodeWorker | PrefillWorker, peers: RegisteredPeers) -> Served:
    """Return what serves a worker to its routers and to its readers."""
    server, links = _server(below.boot, worker)
    handoffs = HandoffService(worker.grants, below.handshake)
    handoff_pb2_grpc.add_HandoffServicer_to_server(handoffs, server)
    leases_s = 2 * below.boot.config.handoff.lease_s

    async def finish() -> None:
        await handoffs.finished(leases_s)
        await peers.close()

    return Served(worker, server, links, finish)


def _speculator(config: Config) -> Speculator | None:
    mode = config.worker.speculate
    if mode == "off":
        return None
    if mode in ("draft", "eagle3"):  # proposed within the engine's steps
        return Speculator(None, config.step.draft_tokens, mode)
    proposer = NgramProposer() if mode == "ngram" else SuffixProposer()
    return Speculator(proposer, config.step.draft_tokens)


def prefill_role(below: Below) -> Served:
    boot = below.boot
    peers = _peers(below)
    worker = PrefillWorker(
        worker_id=boot.worker_id,
        boot_id=boot.boot_id,
        engine=below.engine,
        pool=below.pool,
        mover=below.mover,
        peers=peers,
        limits=below.stated_limits(),
        config=boot.config,
        wall_offset_s=below.wall_offset_s(),
        new_id=partial(os.urandom, handshake.BOOT_ID_BYTES),
        grammars=boot.grammars,
        conversions=below.conversions,
    )
    return _served(below, worker, peers)


def _server(
    boot: Boot, worker: DecodeWorker | PrefillWorker
) -> tuple[grpc.aio.Server, WorkerService]:
    server = open_server(boot.secrets.token, also=boot.secrets.accepted[1:])
    service = WorkerService(worker, worker.feed, boot.config.router)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    return server, service


def model_limits(boot: Boot, engine: TorchEngine) -> ModelLimits:
    pool_tokens = engine.pool.blocks * boot.config.pool.block_size
    return ModelLimits(
        vocab_size=engine.spec.vocab_size,
        max_context=min(engine.max_context, pool_tokens),
        fingerprint=model_fingerprint(
            boot.model_folder,
            boot.config.worker.max_context,
            engine.numerics,
            boot.config.worker.quantization,
            draft_fingerprint(boot.config.worker, boot.model_folder),
        ),
        kv_dtype=engine.dtype_name,
        key=identity.cluster_key(boot.secrets.identity),
        topology=own_topology(os.environ) or "",  # protobuf's absent value
    )
