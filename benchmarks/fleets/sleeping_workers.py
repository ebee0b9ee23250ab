"""Workers whose steps sleep for modelled times, as one process: all of the product but a model.

    python -m benchmarks.fleets.sleeping_workers --registry DIR --timing FILE --prefill 1 ...

Schedulers, pools, handoffs over gRPC, links and the workers' status are the product's own; a
`HashEngine` stands for the device, so that a layout of four workers can be measured on two cores.
READs are copies within this process. Speaks plain gRPC: the process that starts this sets
`security.tls` to off for the router too. Ends with SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import grpc.aio
import numpy as np
import orjson

from baton.decode_worker.worker import DecodeWorker
from baton.deploy.processes.worker_control import WorkerControl
from baton.engine.scheduling.batch import StepBatch
from baton.engine.scheduling.blocks import BlockPool
from baton.kv_transfer import handshake
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.memory_mover import MemoryExchange, MemoryMover
from baton.kv_transfer.peers.bandwidth_probe import BandwidthProbe
from baton.kv_transfer.peers.handoff_service import HandoffService
from baton.kv_transfer.peers.peer_client import grpc_dial
from baton.kv_transfer.peers.registered_peers import RegisteredPeers
from baton.planner.timing_file import read_fit
from baton.planner.timing_model import StepWork, TimingModel
from baton.prefill_worker.worker import PrefillWorker
from baton.proto import (
    control_pb2,
    control_pb2_grpc,
    handoff_pb2,
    handoff_pb2_grpc,
    worker_pb2_grpc,
)
from baton.runtime import identity
from baton.runtime.config import Config, StepConfig
from baton.runtime.grpc_links import open_server
from baton.runtime.registry import DirectoryRegistry, Role, WorkerRecord
from baton.runtime.registry_client import InlineRegistry
from baton.runtime.wire import ModelLimits
from baton.runtime.worker.attention_pairs import causal_pairs
from baton.runtime.worker.service import WorkerService
from baton.simulation.fleet.hash_engine import HashEngine, block_bytes
from benchmarks.fleets.announced_workers import announce_until_ended

SLABS = 2
CONTEXT = 8192  # tokens


def step_s(timing: TimingModel, batch: StepBatch) -> float:
    """Return the modelled seconds of a step. A slice of one token is one that decodes."""
    spans = [(piece.start, piece.start + len(piece.tokens)) for piece in batch.slices]
    prompts = [(start, end) for start, end in spans if end - start > 1]
    contexts = [end for start, end in spans if end - start == 1]
    tokens = sum(end - start for start, end in prompts)
    pairs = sum(causal_pairs(start, end) for start, end in prompts)
    return timing.step_s(StepWork(tokens, pairs, len(contexts), sum(contexts)))


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts that all workers of the process share."""

    config: Config
    timing: TimingModel
    blocks: int
    vocabulary: int
    token: str
    registry: DirectoryRegistry
    exchange: MemoryExchange

    def limits(self) -> ModelLimits:
        key = identity.cluster_key(self.token)
        return ModelLimits(self.vocabulary, CONTEXT, "hash-engine", "uint8", key)


@dataclass(frozen=True, slots=True)
class Started:
    record: WorkerRecord
    server: grpc.aio.Server
    running: asyncio.Task[None]


async def start(shared: Shared, role: Role, name: str) -> Started:
    """Start a worker with its gRPC server."""
    size, boot_id = shared.config.pool.block_size, os.urandom(identity.IDENTITY_BYTES)
    array = np.zeros((shared.blocks, block_bytes(size, SLABS)), dtype=np.uint8)
    engine = HashEngine(
        array,
        block_size=size,
        slabs=SLABS,
        vocab_size=shared.vocabulary,
        step_s=partial(step_s, shared.timing),
    )
    pool, mover = (
        BlockPool(shared.blocks, size),
        MemoryMover(HostPool(array, SLABS), boot_id, shared.exchange),
    )
    common = handshake.compatibility("hash-engine", "uint8", size, 1, SLABS, 4)
    handoff = shared.config.handoff

    def own_handshake() -> handoff_pb2.HandshakeMessage:
        return handshake.build(name, mover.describe(), common)

    peers = RegisteredPeers(
        own_handshake,
        mover,
        grpc_dial(shared.token),
        BandwidthProbe(mover, pool, handoff.preflight_floor_gb_per_s),
        InlineRegistry(shared.registry),
        handoff.lease_s,
    )
    kind = PrefillWorker if role == "prefill" else DecodeWorker
    worker = kind(
        worker_id=name,
        boot_id=boot_id,
        engine=engine,
        pool=pool,
        mover=mover,
        peers=peers,
        limits=shared.limits(),
        config=shared.config,
        wall_offset_s=time.time() - asyncio.get_running_loop().time(),
        new_id=partial(os.urandom, identity.IDENTITY_BYTES),
    )
    server = _serve(shared, worker, HandoffService(worker.grants, own_handshake))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    address = f"127.0.0.1:{port}"
    record = WorkerRecord(name, boot_id.hex(), role, address, "", "hash", os.getpid())
    return Started(record, server, asyncio.create_task(worker.run()))


def _serve(
    shared: Shared, worker: PrefillWorker | DecodeWorker, handoffs: HandoffService
) -> grpc.aio.Server:
    server = open_server(shared.token)
    service = WorkerService(worker, worker.feed, shared.config.router)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    handoff_pb2_grpc.add_HandoffServicer_to_server(handoffs, server)
    control = WorkerControl(
        worker.worker_id,
        worker.boot_id,
        drain=lambda: None,
        change_role=lambda role: None,
        status=lambda: control_pb2.StatusReply(audit=orjson.dumps(worker.audit(check=False))),
    )
    control_pb2_grpc.add_WorkerControlServicer_to_server(control, server)
    return server


async def serve(options: argparse.Namespace) -> None:
    token = os.environ["BATON_TOKEN"]
    step = StepConfig(
        prefill_tokens=options.chunk_tokens,
        chunk_tokens=options.chunk_tokens,
        local_prefill_tokens=options.local_chunk_tokens,
        max_sequences=options.max_sequences,
    )
    shared = Shared(
        replace(Config(), step=step),
        read_fit(options.timing).model,
        options.blocks,
        options.vocabulary,
        token,
        DirectoryRegistry(options.registry, tokens=(token,)),
        MemoryExchange(),
    )
    names: list[tuple[Role, str]] = [("prefill", f"prefill-{n}") for n in range(options.prefill)]
    names += [("decode", f"decode-{n}") for n in range(options.decode)]
    started = [await start(shared, *name) for name in names]
    await announce_until_ended(shared.registry, [each.record for each in started])
    for each in started:
        each.running.cancel()
    await asyncio.gather(*(each.running for each in started), return_exceptions=True)
    await asyncio.gather(*(each.server.stop(0) for each in started))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--registry", type=Path, required=True)
    parser.add_argument("--timing", type=Path, required=True, help="of `baton calibrate`")
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=4096, help="of each pool, of 16 tokens")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--local-chunk-tokens", type=int, default=128)
    parser.add_argument("--max-sequences", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, required=True)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
