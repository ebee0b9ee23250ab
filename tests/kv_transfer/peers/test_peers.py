"""Peers over gRPC: greeted once, forgotten when dead, and no trace of those that restarted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from baton.kv_transfer.peers import registered_peers
from baton.proto import handoff_pb2_grpc, worker_pb2
from baton.runtime.errors import Unavailable
from baton.runtime.grpc_links import open_server
from baton.runtime.registry import WorkerRecord
from tests.support.peer_scene import Peer, Scene
from tests.support.waiting import eventually

pytestmark = pytest.mark.timed


async def test_a_peer_is_greeted_once_for_many_handoffs(scene: Scene) -> None:
    await asyncio.gather(*(scene.open(b"1" * 16) for _ in range(5)))
    assert scene.peer.handshakes == 1


async def test_nothing_is_sent_to_a_peer_that_is_not_registered(scene: Scene) -> None:
    """Neither a handshake nor the token goes to an address that only a message has named."""
    scene.registry.withdraw("prefill-0", (b"1" * 16).hex())
    with pytest.raises(Unavailable, match="not registered"):
        await scene.open(b"1" * 16)
    scene.register(b"1" * 16, address="127.0.0.1:1")  # the worker is elsewhere
    with pytest.raises(Unavailable, match="not registered"):
        await scene.open(b"1" * 16)
    scene.register(b"2" * 16)  # another start of it
    with pytest.raises(Unavailable, match="not registered"):
        await scene.open(b"1" * 16)
    assert scene.peer.handshakes == 0 and scene.known() == set()
    scene.register(b"1" * 16)
    await scene.open(b"1" * 16)
    scene.registry.withdraw("prefill-0", (b"1" * 16).hex())
    await scene.open(b"1" * 16)  # one that has been greeted need not be looked up again
    assert scene.peer.handshakes == 1


async def test_an_unreadable_registry_knows_no_worker(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> list[WorkerRecord]:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(scene.registry, "workers", fail)
    with pytest.raises(Unavailable, match="too many open files"):
        await scene.open(b"1" * 16)


async def test_a_hung_registry_stops_no_handoff_to_a_known_worker(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registered_peers, "ANSWER_S", 0.05)
    await scene.open(b"1" * 16)
    scene.registry_client.hung = True
    async with asyncio.timeout(20):
        await scene.open(b"1" * 16)
        assert scene.peer.handshakes == 1
        scene.peers.forget(b"1" * 16)  # its connection broke
        await asyncio.gather(*(scene.open(b"1" * 16) for _ in range(3)))
        assert scene.peer.handshakes == 2
        with pytest.raises(Unavailable, match="not registered.*file system"):
            await scene.open(b"2" * 16)


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
async def another_peer(
    scene: Scene, boot_id: bytes
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
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
        client = scene.client(b"2" * 16)
    await eventually(lambda: not client.connected, 20)
    assert scene.known() == {b"1" * 16, b"2" * 16}
    async with another_peer(scene, b"3" * 16) as open:
        await open()
        assert scene.known() == {b"1" * 16, b"3" * 16}


async def test_a_serving_peer_is_kept_though_the_registry_lost_it(
    scene: Scene,
) -> None:
    await scene.open(b"1" * 16)
    scene.registry.withdraw("prefill-0", (b"1" * 16).hex())
    async with another_peer(scene, b"2" * 16) as open:
        await open()
        assert scene.known() == {b"1" * 16, b"2" * 16}
    await scene.open(b"1" * 16)


async def test_a_slow_peer_is_reported_until_its_boot_is_forgotten(scene: Scene) -> None:
    slow = Scene(scene.peer, scene.address, floor_gb_per_s=1e9)
    slow.register(slow.peer.boot_id)
    await slow.open(slow.peer.boot_id)
    assert [mark.boot_id for mark in slow.peers.degraded()] == [slow.peer.boot_id]
    slow.peers.forget(slow.peer.boot_id)
    assert slow.peers.degraded() == []
    await slow.peers.close()


async def test_a_stream_bounds_its_wait_for_a_first_contact(scene: Scene) -> None:
    scene.peer.gate.clear()
    candidate = worker_pb2.Candidate(
        worker_id="prefill-0", boot_id=b"1" * 16, address=scene.address
    )
    with pytest.raises(Unavailable, match=r"takes over 0\.05 s"):
        await scene.peers.open(candidate, 0.05)
    scene.peer.gate.set()
    # it goes on by itself
    await eventually(lambda: scene.peer.boot_id not in scene.timed_out(), 20)
    await scene.open(b"1" * 16)
    assert scene.peer.handshakes == 1
