"""Peers over gRPC: greeted once, forgotten when dead, and no trace of those that restarted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from baton.decode_worker.first_contact import FirstContact
from baton.decode_worker.peers import GrpcPeers
from baton.engine.blocks import BlockPool
from baton.kv_transfer import greeting
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.memory_mover import MemoryExchange, MemoryMover
from baton.proto import handoff_pb2, handoff_pb2_grpc, worker_pb2
from baton.runtime.errors import Unavailable, WorkerLost
from baton.runtime.grpc_links import open_server
from baton.runtime.registry import MemoryRegistry, WorkerRecord

OWN = b"o" * 16


class Peer(handoff_pb2_grpc.HandoffServicer):
    """A prefill worker that greets; `boot_id` changes when it restarts."""

    def __init__(self) -> None:
        self.exchange = MemoryExchange()
        self.greetings = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.restart(b"1" * 16)

    def mover(self, boot_id: bytes) -> MemoryMover:
        return MemoryMover(HostPool(np.zeros((8, 64), np.uint8), 2), boot_id, self.exchange)

    def restart(self, boot_id: bytes) -> None:
        self.boot_id = boot_id
        self.pool = self.mover(boot_id).describe()

    def greeting(self, worker_id: str, pool: Any) -> handoff_pb2.Greeting:
        common = greeting.compatibility(
            "model", "float32", block_size=4, layers=1, kv_heads=2, head_dim=4
        )
        return greeting.build(worker_id, pool, common)

    async def Greet(self, theirs: Any, context: Any) -> handoff_pb2.Greeting:
        self.greetings += 1
        await self.gate.wait()
        return self.greeting("prefill-0", self.pool)

    async def Open(self, _: Any, context: Any) -> None:
        await context.read()


class Scene:
    def __init__(self, peer: Peer, address: str) -> None:
        self.peer, self.address = peer, address
        self.mover = peer.mover(OWN)
        contact = FirstContact(self.mover, BlockPool(8, 4), 0.0)
        own = peer.greeting("decode-0", self.mover.describe())
        self.registry = MemoryRegistry()
        self.peers = GrpcPeers(lambda: own, self.mover, "token", contact, self.registry)

    def register(self, boot_id: bytes, address: str = "") -> None:
        self.registry.announce(
            WorkerRecord("prefill-0", boot_id.hex(), "prefill", address or self.address, "", "m", 1)
        )

    async def open(self, boot_id: bytes) -> None:
        link = await self.peers.open(
            worker_pb2.Candidate(worker_id="prefill-0", boot_id=boot_id, address=self.address)
        )
        await link.close()

    def known(self) -> set[bytes]:
        return {*self.peers._channels, *self.peers._greeted, *self.peers._greeting}


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    peer, server = Peer(), open_server("token")
    handoff_pb2_grpc.add_HandoffServicer_to_server(peer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    scene = Scene(peer, f"127.0.0.1:{port}")
    scene.register(peer.boot_id)
    yield scene
    await scene.peers.close()
    await server.stop(grace=0)


async def test_a_peer_is_greeted_once_for_many_handoffs(scene: Scene) -> None:
    await asyncio.gather(*(scene.open(b"1" * 16) for _ in range(5)))
    assert scene.peer.greetings == 1


async def test_nothing_is_sent_to_a_peer_that_is_not_registered(scene: Scene) -> None:
    """Neither a greeting nor the token goes to an address that only a message has named."""
    scene.registry.withdraw("prefill-0", (b"1" * 16).hex())
    with pytest.raises(Unavailable, match="not registered"):
        await scene.open(b"1" * 16)
    scene.register(b"1" * 16, address="127.0.0.1:1")  # the worker is elsewhere
    with pytest.raises(Unavailable, match="not registered"):
        await scene.open(b"1" * 16)
    scene.register(b"2" * 16)  # another start of it
    with pytest.raises(Unavailable, match="not registered"):
        await scene.open(b"1" * 16)
    assert scene.peer.greetings == 0 and scene.known() == set()
    scene.register(b"1" * 16)
    await scene.open(b"1" * 16)
    scene.registry.withdraw("prefill-0", (b"1" * 16).hex())
    await scene.open(b"1" * 16)  # one that has been greeted need not be looked up again
    assert scene.peer.greetings == 1


async def test_a_registry_that_cannot_be_read_knows_nobody(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> list[WorkerRecord]:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(scene.registry, "workers", fail)
    with pytest.raises(Unavailable, match="too many open files"):
        await scene.open(b"1" * 16)


async def test_a_restarted_peer_leaves_no_trace_of_its_former_life(scene: Scene) -> None:
    for life in (b"1" * 16, b"2" * 16, b"3" * 16):
        scene.peer.restart(life)
        scene.register(life)
        await scene.open(life)
        assert scene.known() == {life}
    with pytest.raises(Unavailable, match="not registered"):
        await scene.open(b"1" * 16)  # placed by a router that has not heard of it
    scene.register(b"1" * 16)  # its announcement has not faded yet
    with pytest.raises(Unavailable, match="has restarted"):
        await scene.open(b"1" * 16)
    assert scene.known() == {b"3" * 16}


@asynccontextmanager
async def another_peer(scene: Scene, boot_id: bytes) -> AsyncIterator[Callable[[], Any]]:
    """A prefill worker at an address of its own; what is given opens a handoff to it."""
    peer, server = Peer(), open_server("token")
    peer.exchange = scene.peer.exchange
    peer.restart(boot_id)
    handoff_pb2_grpc.add_HandoffServicer_to_server(peer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    name = f"prefill-{boot_id[:1].decode()}"
    scene.registry.announce(WorkerRecord(name, boot_id.hex(), "prefill", address, "", "m", 1))
    candidate = worker_pb2.Candidate(worker_id=name, boot_id=boot_id, address=address)

    async def open() -> None:
        await (await scene.peers.open(candidate)).close()

    try:
        yield open
    finally:
        scene.registry.withdraw(name, boot_id.hex())
        await server.stop(grace=0)


async def test_a_peer_that_has_drained_and_gone_leaves_no_trace(scene: Scene) -> None:
    """It left in peace, and another came, at another address: nothing failed to tell of it."""
    await scene.open(b"1" * 16)
    async with another_peer(scene, b"2" * 16) as open:
        await open()
        channel = scene.peers._channels[b"2" * 16]
    async with asyncio.timeout(20):
        while channel.get_state() is grpc.ChannelConnectivity.READY:
            await asyncio.sleep(0.01)
    assert scene.known() == {b"1" * 16, b"2" * 16}
    async with another_peer(scene, b"3" * 16) as open:
        await open()
        assert scene.known() == {b"1" * 16, b"3" * 16}


async def test_a_peer_that_still_serves_is_kept_though_the_registry_has_forgotten_it(
    scene: Scene,
) -> None:
    await scene.open(b"1" * 16)
    scene.registry.withdraw("prefill-0", (b"1" * 16).hex())
    async with another_peer(scene, b"2" * 16) as open:
        await open()
        assert scene.known() == {b"1" * 16, b"2" * 16}
    await scene.open(b"1" * 16)


async def test_a_peer_lost_while_it_is_greeted_is_told_as_lost(scene: Scene) -> None:
    scene.peer.gate.clear()
    opening = asyncio.create_task(scene.open(b"1" * 16))
    while not scene.peer.greetings:
        await asyncio.sleep(0.001)
    channel = scene.peers._channels.pop(b"1" * 16)  # as by another handoff's `forget`
    scene.peer.gate.set()
    with pytest.raises(WorkerLost, match="while it was greeted"):
        await opening
    await channel.close()
    await scene.open(b"1" * 16)
