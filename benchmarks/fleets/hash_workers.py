"""Decode workers of known capacity, as one process: real schedulers, pools and links, no model.

    python -m benchmarks.fleets.hash_workers --registry DIR --workers 2 --step-ms 20 ...

Each is the product's own worker on a `HashEngine` whose steps take a fixed time, whatever is in
them. So it ends `sequences` requests in as many steps as a request has tokens, and no faster.
`--held-blocks` are reported to routers as cached here, for measuring how they take them. Speaks
plain gRPC: the process that starts this sets `security.tls` to off for the router too. Ends with
SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from baton.decode_worker.worker import DecodeWorker
from baton.engine.scheduling.blocks import BlockPool
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.memory_mover import MemoryExchange, MemoryMover
from baton.proto import worker_pb2_grpc
from baton.runtime import identity
from baton.runtime.config import Config
from baton.runtime.grpc_links import open_server
from baton.runtime.registry import DirectoryRegistry, WorkerRecord
from baton.runtime.wire import ModelLimits
from baton.runtime.worker.block_feed import BlockFeed
from baton.runtime.worker.service import WorkerService
from baton.simulation.fleet.hash_engine import HashEngine, block_bytes
from benchmarks.fleets.announced_workers import announce_until_ended
from benchmarks.fleets.no_peers import NoPeers

SLABS = 2
POOL_BLOCKS = 8192


def build(name: str, options: argparse.Namespace, config: Config) -> DecodeWorker:
    size = config.pool.block_size
    array = np.zeros((POOL_BLOCKS, block_bytes(size, SLABS)), dtype=np.uint8)
    boot_id = os.urandom(identity.IDENTITY_BYTES)
    step_s = options.step_ms / 1000
    worker = DecodeWorker(
        worker_id=name,
        boot_id=boot_id,
        engine=HashEngine(
            array,
            block_size=size,
            slabs=SLABS,
            vocab_size=options.vocabulary,
            step_s=lambda batch: step_s,
        ),
        pool=BlockPool(POOL_BLOCKS, size),
        mover=MemoryMover(HostPool(array, SLABS), boot_id, MemoryExchange()),
        peers=NoPeers(),
        limits=ModelLimits(
            options.vocabulary,
            options.context,
            "hash-engine",
            "uint8",
            identity.cluster_key(os.environ["BATON_TOKEN"]),
        ),
        config=config,
        wall_offset_s=time.time() - asyncio.get_running_loop().time(),
        new_id=partial(os.urandom, identity.IDENTITY_BYTES),
    )
    if options.held_blocks:
        draws = random.Random(name)
        held = [draws.randbytes(identity.IDENTITY_BYTES) for _ in range(options.held_blocks)]
        worker.feed = BlockFeed(boot_id, lambda: held)
    return worker


async def serve(options: argparse.Namespace) -> None:
    config = replace(Config(), step=replace(Config().step, max_sequences=options.sequences))
    token = os.environ["BATON_TOKEN"]
    registry = DirectoryRegistry(options.registry, tokens=(token,))
    running, servers, records = [], [], []
    for number in range(options.workers):
        name = f"decode-{number}"
        worker = build(name, options, config)
        server = open_server(token)
        service = WorkerService(worker, worker.feed, config.router)
        worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        running.append(asyncio.create_task(worker.run()))
        servers.append(server)
        records.append(
            WorkerRecord(
                name, worker.boot_id.hex(), "decode", f"127.0.0.1:{port}", "", "hash", os.getpid()
            )
        )
    await announce_until_ended(registry, records)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await asyncio.gather(*(server.stop(0) for server in servers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--registry", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=8, help="that one worker decodes at once")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--held-blocks", type=int, default=0, help="published as cached, by each")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
