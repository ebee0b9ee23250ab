"""One granter and many readers of it, on virtual time: first contacts, without handoffs.

The granter's link carries one READ after the other. A measurement of 48 MiB takes 4 ms of it, as
at 100 Gb/s; blocks are small here.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np

from baton.engine.scheduling.blocks import BlockPool
from baton.kv_transfer import handshake
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.memory_mover import Attempt, Fate, MemoryExchange, MemoryMover
from baton.kv_transfer.peers.bandwidth_probe import READ_BLOCKS, BandwidthProbe
from baton.kv_transfer.peers.contact_answers import ContactAnswers
from baton.kv_transfer.peers.grants import Grants
from baton.kv_transfer.peers.peer_client import PeerClient
from baton.kv_transfer.peers.registered_peers import RegisteredPeers
from baton.kv_transfer.preflight import ROUNDS
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime.config import HandoffConfig
from baton.runtime.errors import Unavailable
from baton.runtime.registry import MemoryRegistry, WorkerRecord
from baton.runtime.registry_client import InlineRegistry

BLOCK_BYTES = 64
READS = ROUNDS + 1  # of a measurement
PROBE_BYTES = READS * READ_BLOCKS * BLOCK_BYTES
PROBE_S = 0.004
FLOOR_GB_PER_S = 2e-5  # a fortieth of the link
ADDRESS, NAME = "granter:1", "prefill-0"


class Mesh:
    """`read_at` has the time of each READ; `held` how often the granter was to serve promptly."""

    def __init__(self, floor_gb_per_s: float = FLOOR_GB_PER_S) -> None:
        self.floor_gb_per_s = floor_gb_per_s
        self.exchange = MemoryExchange(self._fate)
        self.exchange.bytes_per_s = PROBE_BYTES / PROBE_S
        self.fate = Fate()
        self.read_at: list[tuple[float, bytes]] = []
        self._awaited: dict[int, asyncio.Event] = {}  # by the number of READs
        self.registry = MemoryRegistry()
        self.granter: Granter
        self.restart(b"1" * 16)

    def restart(self, boot_id: bytes, host: str = "host-p") -> None:
        """Another boot of the granter answers at its address from now on."""
        self.granter = Granter(self, boot_id, host)
        self.registry.announce(
            WorkerRecord(NAME, boot_id.hex(), "prefill", ADDRESS, "", "model", 1)
        )

    def _fate(self, attempt: Attempt) -> Fate:
        self.read_at.append((asyncio.get_running_loop().time(), attempt.reader))
        if reached := self._awaited.pop(len(self.read_at), None):
            reached.set()
        return self.fate

    async def next_reads(self, count: int) -> None:
        """Wait until so many READs more have begun."""
        reached = self._awaited[len(self.read_at) + count] = asyncio.Event()
        await reached.wait()

    def mover(self, boot_id: bytes) -> MemoryMover:
        pool = HostPool(np.zeros((READ_BLOCKS, BLOCK_BYTES), np.uint8), 2)
        return MemoryMover(pool, boot_id, self.exchange)

    def reads_since(self, begun_s: float, until_s: float) -> int:
        return sum(begun_s <= at_s < until_s for at_s, _ in self.read_at)


class Granter:
    def __init__(self, mesh: Mesh, boot_id: bytes, host: str) -> None:
        self.boot_id, self.reports = boot_id, 0
        self.times: list[tuple[float, bytes]] = []  # at which it lets each reader measure
        mover = mesh.mover(boot_id)
        message = _message(NAME, mover, host)
        grants = Grants(cast(Any, None), mover, boot_id, HandoffConfig())
        self._answers = ContactAnswers(grants, lambda: message)

    def answer(self, theirs: handoff_pb2.HandshakeMessage) -> handoff_pb2.HandshakeMessage:
        self.reports += theirs.read_gb_per_s > 0
        answer = self._answers.answer(theirs)
        if not theirs.read_gb_per_s:
            at_s = asyncio.get_running_loop().time() + answer.probe_after_ms / 1000
            self.times.append((at_s, theirs.boot_id))
        return answer


class Reader:
    """A decode worker's peers. `open` opens a handoff to the granter's present boot."""

    def __init__(self, mesh: Mesh, number: int, host: str) -> None:
        self.mesh, self.boot_id = mesh, number.to_bytes(16, "big")
        mover = mesh.mover(self.boot_id)
        mine = _message(f"decode-{number}", mover, host)
        self.pool = BlockPool(READ_BLOCKS, 4)
        probe = BandwidthProbe(mover, self.pool, mesh.floor_gb_per_s)
        registry = InlineRegistry(mesh.registry)
        self.peers = RegisteredPeers(
            lambda: mine, mover, lambda _: cast(PeerClient, Client(mesh)), probe, registry, 2.0
        )

    async def open(self) -> None:
        boot_id = self.mesh.granter.boot_id
        await self.peers.open(
            worker_pb2.Candidate(worker_id=NAME, boot_id=boot_id, address=ADDRESS)
        )

    def measurements_held(self) -> asyncio.Lock:
        """Return the lock under which it measures one peer after the other. While it is held the
        reader measures none, as during a long measurement of another peer."""
        return self.peers._measurements._one_at_a_time


class Client:
    """A connection to the boot that answers when it is made."""

    connected = True

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._granter = mesh, mesh.granter

    async def handshake(self, mine: handoff_pb2.HandshakeMessage) -> handoff_pb2.HandshakeMessage:
        await asyncio.sleep(0.001)
        if self._granter is not self._mesh.granter:
            raise Unavailable("that boot is gone")
        return self._granter.answer(mine)

    def open(self) -> object:
        return object()

    async def close(self) -> None:
        pass


def _message(name: str, mover: MemoryMover, host: str) -> handoff_pb2.HandshakeMessage:
    common = handshake.compatibility(
        "model", "float32", block_size=4, layers=1, kv_heads=2, head_dim=4
    )
    return handshake.build(name, mover.describe(), common, host)
