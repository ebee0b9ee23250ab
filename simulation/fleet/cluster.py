"""Prefill and decode workers of one process: the real ones, on simulated engines and movers.

Everything above the seams is the production code. Each worker has its own pool and boot id, and
a task that runs its loop; `kill` ends it as a crash would: no notice to any peer.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from baton.decode_worker.speculator import Speculator
from baton.decode_worker.worker import DecodeWorker
from baton.engine.scheduling.batch import StepBatch
from baton.engine.scheduling.blocks import BlockPool
from baton.kv_transfer import handshake
from baton.kv_transfer.block_sizes import SlabRows
from baton.kv_transfer.conversion import Conversions, no_conversions
from baton.kv_transfer.granter import GranterLink
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.memory_mover import MemoryExchange, MemoryMover
from baton.kv_transfer.mover import PeerPool
from baton.kv_transfer.peers.peer_client import HandoffLink
from baton.prefill_worker.worker import PrefillWorker
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime.config import Config
from baton.runtime.errors import Unavailable
from baton.runtime.grammar.grammar_compiler import GrammarCompiler
from baton.runtime.grammar.vocabulary import Vocabulary
from baton.runtime.links import MemoryLink, memory_link
from baton.runtime.wire import ModelLimits
from baton.simulation.fleet.hash_engine import RECORD_BYTES, HashEngine, block_bytes

SLABS = 2
VOCAB = 50_000
MAX_CONTEXT = 100_000

Role = TypeVar("Role", PrefillWorker, DecodeWorker)


@dataclass(slots=True)
class Node(Generic[Role]):
    """A worker with what lies below its seams."""

    worker: Role
    engine: HashEngine
    pool: BlockPool
    array: NDArray[np.uint8]  # [blocks, block_bytes]
    mover: MemoryMover
    task: asyncio.Task[None]


class Cluster:
    """Workers by name; `exchange.decide` rules over READs, `links` over handoff streams."""

    def __init__(
        self,
        config: Config,
        step_s: Callable[[StepBatch], float] = lambda batch: 0.0,
        speculator: Callable[[], Speculator | None] = lambda: None,
    ) -> None:
        """`speculator` makes that of each decode worker; none speculates without one."""
        self.config = config
        self.block_size = config.pool.block_size  # of the workers that are added from now on
        self._speculator = speculator
        self.exchange = MemoryExchange()
        self.prefill: dict[str, Node[PrefillWorker]] = {}
        self.decode: dict[str, Node[DecodeWorker]] = {}
        self.open_links: list[tuple[HandoffLink, bytes]] = []
        self._step_s = step_s
        self.vocabulary: Vocabulary | None = None  # of the workers that are added from now on
        self._ids = itertools.count(1)
        self._streams: dict[bytes, set[asyncio.Task[None]]] = {}
        # KV dtype and block size, by boot id.
        self._stored: dict[bytes, tuple[str, int]] = {}

    def limits(self) -> ModelLimits:
        return ModelLimits(VOCAB, MAX_CONTEXT, "hash-engine", "uint8", b"cluster key")

    def conversions(self, engine: Any) -> Conversions:
        """Return what a worker with this engine converts its KV to."""
        return no_conversions

    def described(self, reader: MemoryMover, granter: MemoryMover) -> PeerPool:
        """Return a granter's pool as a reader knows it after their handshake."""
        here, pool = reader.describe(), granter.describe()
        own, other = self._stored[here.boot_id], self._stored[pool.boot_id]
        return handshake.as_read(pool, here.block_bytes, own, other)

    def grammars(self) -> GrammarCompiler:
        """Return a compiler for one worker, which uses no threads."""
        return GrammarCompiler(self.vocabulary, threads=False)

    def new_id(self) -> bytes:
        """Sixteen bytes, never twice."""
        return next(self._ids).to_bytes(16, "big")

    def add_prefill(self, name: str, blocks: int) -> Node[PrefillWorker]:
        boot_id, engine, pool, array, mover = self._below(blocks)
        self._stored[boot_id] = self.limits().kv_dtype, pool.block_size
        worker = PrefillWorker(
            worker_id=name,
            boot_id=boot_id,
            engine=engine,
            pool=pool,
            mover=mover,
            peers=MemoryPeers(self, mover),
            limits=self.limits(),
            config=self.config,
            wall_offset_s=0.0,
            new_id=self.new_id,
            grammars=self.grammars(),
            conversions=self.conversions(engine),
        )
        task = asyncio.create_task(worker.run())
        self.prefill[name] = Node(worker, engine, pool, array, mover, task)
        return self.prefill[name]

    def add_decode(self, name: str, blocks: int) -> Node[DecodeWorker]:
        boot_id, engine, pool, array, mover = self._below(blocks)
        self._stored[boot_id] = self.limits().kv_dtype, pool.block_size
        worker = DecodeWorker(
            worker_id=name,
            boot_id=boot_id,
            engine=engine,
            pool=pool,
            mover=mover,
            peers=MemoryPeers(self, mover),
            limits=self.limits(),
            config=self.config,
            wall_offset_s=0.0,
            new_id=self.new_id,
            grammars=self.grammars(),
            speculator=self._speculator(),
            conversions=self.conversions(engine),
        )
        task = asyncio.create_task(worker.run())
        self.decode[name] = Node(worker, engine, pool, array, mover, task)
        return self.decode[name]

    def candidates(self) -> list[worker_pb2.Candidate]:
        """All prefill workers, as a router would rank them."""
        return [_candidate(name, node) for name, node in self.prefill.items()]

    def nodes(self) -> list[Node[Any]]:
        return [*self.decode.values(), *self.prefill.values()]

    def source(self, name: str, blocks: int) -> worker_pb2.Source:
        """The worker of that name as a source of leading blocks, as a router names it."""
        (node,) = [node for node in self.nodes() if node.worker.worker_id == name]
        return worker_pb2.Source(worker=_candidate(name, node), blocks=blocks)

    async def kill_prefill(self, name: str) -> None:
        """The process is gone: its streams break, its pool can no longer be read."""
        await self._kill(self.prefill.pop(name))

    async def kill_decode(self, name: str) -> None:
        """Same as `kill_prefill`, of a decode worker."""
        await self._kill(self.decode.pop(name))

    async def _kill(self, node: Node[Any]) -> None:
        self.exchange.leave(node.worker.boot_id)
        for link, boot_id in self.open_links:
            if boot_id == node.worker.boot_id:
                await link.close()
        await _ended({node.task, *self._streams.pop(node.worker.boot_id, set())})

    def restless(self) -> list[str]:
        """Workers that hold anything: a lease, a pin, a quarantined or used block, a handoff.
        Raises RuntimeError if a worker's books do not balance."""
        found = []
        for node in self.nodes():
            audit, counts = node.worker.audit(), node.pool.counts()
            if counts.available != counts.total or audit["open_handoffs"]:
                found.append(f"{node.worker.worker_id}: {counts}")
        return found

    async def quiet(self, within_s: float = 5.0) -> None:
        """Wait until no worker holds anything. Raises TimeoutError naming those that do."""
        deadline = asyncio.get_running_loop().time() + within_s
        while restless := self.restless():
            if asyncio.get_running_loop().time() > deadline:
                raise TimeoutError(f"not quiet after {within_s} s: {restless}")
            # Engines, movers and streams of several workers have no common event.
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Stop every worker, and wait for what they owe."""
        await _ended({node.task for node in self.decode.values()})
        for node in self.nodes():
            streams = self._streams.get(node.worker.boot_id, set())
            if streams:
                await asyncio.wait(streams, timeout=2 * self.config.handoff.lease_s)
            await _ended({node.task, *streams})

    def handoff_stream(self, boot_id: bytes) -> HandoffLink:
        """A stream to the worker of that boot id."""
        for node in self.nodes():
            if node.worker.boot_id == boot_id:
                near: MemoryLink[handoff_pb2.ReaderMessage, handoff_pb2.GranterMessage]
                near, far = memory_link()
                self.open_links.append((near, boot_id))
                self._serve(node.worker, far)
                return near
        raise Unavailable("no such worker")

    def _serve(self, worker: PrefillWorker | DecodeWorker, link: GranterLink) -> None:
        tasks = self._streams.setdefault(worker.boot_id, set())
        task = asyncio.create_task(worker.grants.serve(link))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _below(
        self, blocks: int
    ) -> tuple[bytes, HashEngine, BlockPool, NDArray[np.uint8], MemoryMover]:
        size = self.block_size
        array = np.zeros((blocks, block_bytes(size, SLABS)), dtype=np.uint8)
        boot_id = self.new_id()
        engine = HashEngine(
            array, block_size=size, slabs=SLABS, vocab_size=VOCAB, step_s=self._step_s
        )
        own = HostPool(array, SLABS, rows=[SlabRows(SLABS, ((1, RECORD_BYTES),))])
        mover = MemoryMover(own, boot_id, self.exchange)
        pool = BlockPool(blocks, size, self.config.pool.tenant_share)
        return boot_id, engine, pool, array, mover


class MemoryPeers:
    """Implements `Peers` within a cluster."""

    def __init__(self, cluster: Cluster, mover: MemoryMover) -> None:
        self._cluster = cluster
        self._mover = mover

    async def open(
        self, candidate: worker_pb2.Candidate, contact_s: float = math.inf
    ) -> HandoffLink:
        for node in self._cluster.nodes():
            if node.worker.boot_id == candidate.boot_id:
                pool = self._cluster.described(self._mover, node.mover)
                await self._mover.connect(pool)
                return self._cluster.handoff_stream(candidate.boot_id)
        raise Unavailable(f"worker {candidate.worker_id} is gone")

    def forget(self, boot_id: bytes) -> None:
        self._mover.forget(boot_id)

    def degraded(self) -> list[worker_pb2.DegradedPeer]:
        return []  # no first contact measures here

    def transport(self, boot_id: bytes) -> str:
        return "memory"

    async def close(self) -> None:
        pass


def _candidate(name: str, node: Node[Any]) -> worker_pb2.Candidate:
    return worker_pb2.Candidate(
        worker_id=name,
        boot_id=node.worker.boot_id,
        address=name,
        block_size=node.pool.block_size,
    )


async def _ended(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
