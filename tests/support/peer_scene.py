"""A prefill worker over gRPC, and the peers of a decode worker that may greet it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import numpy as np

from baton.engine.scheduling.blocks import BlockPool
from baton.kv_transfer import handshake
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.memory_mover import MemoryExchange, MemoryMover
from baton.kv_transfer.mover import PeerPool
from baton.kv_transfer.peers.bandwidth_probe import BandwidthProbe
from baton.kv_transfer.peers.peer_client import PeerClient, grpc_dial
from baton.kv_transfer.peers.registered_peers import RegisteredPeers
from baton.proto import handoff_pb2, handoff_pb2_grpc, worker_pb2
from baton.runtime.registry import MemoryRegistry, WorkerRecord
from baton.runtime.registry_client import InlineRegistry

OWN = b"o" * 16


class Peer(handoff_pb2_grpc.HandoffServicer):
    """A prefill worker that greets; `boot_id` changes when it restarts."""

    def __init__(self) -> None:
        self.exchange = MemoryExchange()
        self.handshakes = 0
        self.kv_dtype = "float32"
        self.gate = asyncio.Event()
        self.gate.set()
        self.restart(b"1" * 16)

    def mover(self, boot_id: bytes) -> MemoryMover:
        return MemoryMover(HostPool(np.zeros((8, 64), np.uint8), 2), boot_id, self.exchange)

    def restart(self, boot_id: bytes) -> None:
        self.boot_id = boot_id
        self.pool = self.mover(boot_id).describe()

    def handshake(self, worker_id: str, pool: PeerPool) -> handoff_pb2.HandshakeMessage:
        common = handshake.compatibility(
            "model", self.kv_dtype, block_size=4, layers=1, kv_heads=2, head_dim=4
        )
        return handshake.build(worker_id, pool, common)

    async def Handshake(
        self, theirs: handoff_pb2.HandshakeMessage, context: object
    ) -> handoff_pb2.HandshakeMessage:
        self.handshakes += 1
        await self.gate.wait()
        return self.handshake("prefill-0", self.pool)

    async def Open(self, _: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.read()


class HangingRegistry(InlineRegistry):
    """While it is `hung`, its file system does not answer."""

    hung = False

    def workers(self) -> asyncio.Future[list[WorkerRecord]]:
        if self.hung:
            return asyncio.get_running_loop().create_future()
        return super().workers()


class Scene:
    def __init__(self, peer: Peer, address: str, floor_gb_per_s: float = 0.0) -> None:
        self.peer, self.address = peer, address
        self.mover = peer.mover(OWN)
        contact = BandwidthProbe(self.mover, BlockPool(8, 4), floor_gb_per_s)
        own = peer.handshake("decode-0", self.mover.describe())
        self.registry = MemoryRegistry()
        self.registry_client = HangingRegistry(self.registry)
        self.peers = RegisteredPeers(
            lambda: own,
            self.mover,
            grpc_dial("token"),
            contact,
            self.registry_client,
            20.0,
        )

    def register(self, boot_id: bytes, address: str = "") -> None:
        self.registry.announce(
            WorkerRecord("prefill-0", boot_id.hex(), "prefill", address or self.address, "", "m", 1)
        )

    async def open(self, boot_id: bytes) -> None:
        link = await self.peers.open(
            worker_pb2.Candidate(worker_id="prefill-0", boot_id=boot_id, address=self.address)
        )
        await link.close()

    # A decode worker asks `RegisteredPeers` for links, not which peers it knows: the methods below
    # alone read its books.

    def known(self) -> set[bytes]:
        return set(self.peers._peers)

    def client(self, boot_id: bytes) -> PeerClient:
        return self.peers._peers[boot_id].client

    async def first_contact_ended(self, boot_id: bytes) -> None:
        """Wait for it, whether it succeeds or not, but no longer than 20 s."""
        await asyncio.wait({self.peers._peers[boot_id].contact}, timeout=20)

    def timed_out(self) -> list[bytes]:
        """Return the boot ids whose last first contact failed or took too long, oldest first."""
        return list(self.peers._timed_out)
