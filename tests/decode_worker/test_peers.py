"""Peers over gRPC: greeted once, forgotten when dead, and no trace of those that restarted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from baton.decode_worker import peer_client, peers
from baton.decode_worker.bandwidth_probe import BandwidthProbe
from baton.decode_worker.peer_client import grpc_dial
from baton.decode_worker.peers import RegisteredPeers
from baton.engine.scheduling.blocks import BlockPool
from baton.kv_transfer import handshake
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.memory_mover import Fate, MemoryExchange, MemoryMover
from baton.kv_transfer.mover import PeerPool
from baton.proto import handoff_pb2, handoff_pb2_grpc, worker_pb2
from baton.runtime.errors import Incompatible, ReadFailed, Unavailable
from baton.runtime.grpc_links import open_channel, open_server
from baton.runtime.registry import MemoryRegistry, WorkerRecord
from baton.runtime.registry_client import InlineRegistry
from baton.runtime.tls import Tls

pytestmark = pytest.mark.timed

OWN = b"o" * 16


class Peer(handoff_pb2_grpc.HandoffServicer):
    """A prefill worker that greets; `boot_id` changes when it restarts."""

    def __init__(self) -> None:
        self.exchange = MemoryExchange()
        self.greetings = 0
        self.kv_dtype = "float32"
        self.gate = asyncio.Event()
        self.gate.set()
        self.restart(b"1" * 16)

    def mover(self, boot_id: bytes) -> MemoryMover:
        return MemoryMover(HostPool(np.zeros((8, 64), np.uint8), 2), boot_id, self.exchange)

    def restart(self, boot_id: bytes) -> None:
        self.boot_id = boot_id
        self.pool = self.mover(boot_id).describe()

    def handshake(self, worker_id: str, pool: Any) -> handoff_pb2.HandshakeMessage:
        common = handshake.compatibility(
            "model", self.kv_dtype, block_size=4, layers=1, kv_heads=2, head_dim=4
        )
        return handshake.build(worker_id, pool, common)

    async def Handshake(self, theirs: Any, context: Any) -> handoff_pb2.HandshakeMessage:
        self.greetings += 1
        await self.gate.wait()
        return self.handshake("prefill-0", self.pool)

    async def Open(self, _: Any, context: Any) -> None:
        await context.read()


class Scene:
    def __init__(self, peer: Peer, address: str, floor_gb_per_s: float = 0.0) -> None:
        self.peer, self.address = peer, address
        self.mover = peer.mover(OWN)
        contact = BandwidthProbe(self.mover, BlockPool(8, 4), floor_gb_per_s)
        own = peer.handshake("decode-0", self.mover.describe())
        self.registry = MemoryRegistry()
        self.peers = RegisteredPeers(
            lambda: own,
            self.mover,
            grpc_dial("token"),
            contact,
            InlineRegistry(self.registry),
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

    def known(self) -> set[bytes]:
        return set(self.peers._peers)


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


class Hung(InlineRegistry):
    """Its file system does not answer."""

    def workers(self) -> asyncio.Future[list[WorkerRecord]]:
        return asyncio.get_running_loop().create_future()


async def test_a_hung_registry_stops_no_handoff_to_a_worker_that_it_has_named(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "ANSWER_S", 0.05)
    await scene.open(b"1" * 16)
    scene.peers._registry = Hung(scene.registry)
    async with asyncio.timeout(20):
        await scene.open(b"1" * 16)
        assert scene.peer.greetings == 1
        scene.peers.forget(b"1" * 16)  # its connection broke
        await asyncio.gather(*(scene.open(b"1" * 16) for _ in range(3)))
        assert scene.peer.greetings == 2
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
        channel = scene.peers._peers[b"2" * 16].client._channel
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


async def greeting_begun(scene: Scene, *addresses: str) -> list[asyncio.Task[None]]:
    """Calls that ask for one boot id, the first of which greets and hears no answer yet."""
    scene.peer.gate.clear()
    tasks = []
    for address in addresses:
        candidate = worker_pb2.Candidate(
            worker_id="prefill-0", boot_id=b"1" * 16, address=address or scene.address
        )
        tasks.append(asyncio.create_task(scene.peers.open(candidate)))
        while not scene.peer.greetings:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    return tasks


async def test_a_peer_lost_while_it_is_greeted_is_told_as_lost(scene: Scene) -> None:
    (opening,) = await greeting_begun(scene, "")
    scene.peers.forget(b"1" * 16)  # as by another handoff
    scene.peer.gate.set()
    with pytest.raises(Unavailable):
        await opening
    assert scene.known() == set()
    await scene.open(b"1" * 16)


async def test_who_waits_while_another_greets_in_vain_goes_to_no_address_of_its_own(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second names an address that only its message knows. Nothing is sent there."""
    dialled: list[str] = []

    def noted(address: str, tls: Tls | None) -> grpc.aio.Channel:
        dialled.append(address)
        return open_channel(address, tls)

    monkeypatch.setattr(peer_client, "open_channel", noted)
    first, second = await greeting_begun(scene, "", "127.0.0.1:1")
    scene.peer.restart(b"2" * 16)  # so that the handshake fails
    scene.peer.gate.set()
    with pytest.raises(Unavailable, match="has restarted"):
        await first
    with pytest.raises(Unavailable, match="lost during the handshake"):
        await second
    assert dialled == [scene.address] and scene.known() == set()
    with pytest.raises(Unavailable, match="not registered"):
        await scene.peers.open(
            worker_pb2.Candidate(worker_id="prefill-0", boot_id=b"1" * 16, address="127.0.0.1:1")
        )


async def test_a_peer_forgotten_after_its_greeting_is_not_opened_to_on_a_closed_channel(
    scene: Scene,
) -> None:
    first, second = await greeting_begun(scene, "", "")
    scene.peer.gate.set()
    first.add_done_callback(lambda _: scene.peers.forget(b"1" * 16))
    await (await first).close()
    with contextlib.suppress(Unavailable):  # or it was opened just before
        await (await second).close()
    await scene.open(b"1" * 16)


@pytest.mark.parametrize("how", ["greeting", "pool"])
async def test_a_peer_that_does_not_fit_leaves_no_channel_open(
    scene: Scene, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[grpc.aio.Channel] = []

    def noted(address: str, tls: Tls | None) -> grpc.aio.Channel:
        opened.append(open_channel(address, tls))
        return opened[-1]

    monkeypatch.setattr(peer_client, "open_channel", noted)
    if how == "greeting":
        monkeypatch.setattr(scene.peer, "kv_dtype", "bfloat16")
    else:  # it fits, and cannot be read
        scene.peer.exchange.decide = lambda attempt: Fate(failed=True)
    with pytest.raises(Incompatible if how == "greeting" else ReadFailed):
        await scene.open(b"1" * 16)
    assert scene.known() == set()
    async with asyncio.timeout(20):
        while opened[0].get_state() is not grpc.ChannelConnectivity.SHUTDOWN:
            await asyncio.sleep(0.001)


async def test_a_first_contact_that_takes_long_is_left_for_the_next_candidate(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for the patience, in all, and the measurement goes on: once it has ended, the
    peer can be opened to without another."""
    monkeypatch.setattr(scene.peers, "_first_contact_s", 0.2)
    scene.peer.exchange.decide = lambda attempt: Fate(stuck=attempt.number == 1)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    asked = [asyncio.create_task(scene.open(b"1" * 16)) for _ in range(3)]
    done = await asyncio.gather(*asked, return_exceptions=True)
    assert loop.time() - begun < 5  # not one after the other, nor a READ's ten seconds
    for error in done:
        assert isinstance(error, Unavailable) and "takes over 0.2 s" in str(error)
    with pytest.raises(Unavailable, match="takes over 0.1 s"):  # who comes later waits less
        await scene.open(b"1" * 16)
    assert scene.peer.exchange.stuck == 1 and scene.known() == {b"1" * 16}
    scene.peer.exchange.release_stuck()
    await asyncio.wait({scene.peers._peers[b"1" * 16].contact}, timeout=20)
    measured = scene.peer.exchange.reads
    await scene.open(b"1" * 16)
    assert scene.peer.exchange.reads == measured and scene.peer.greetings == 1


async def test_a_first_contact_that_fails_when_nobody_waits_is_begun_anew(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scene.peers, "_first_contact_s", 0.2)
    scene.peer.exchange.decide = lambda attempt: Fate(
        stuck=attempt.number == 1, failed=attempt.number == 2
    )
    with pytest.raises(Unavailable, match="takes over"):
        await scene.open(b"1" * 16)
    scene.peer.exchange.release_stuck()
    async with asyncio.timeout(20):
        while scene.known():
            await asyncio.sleep(0.001)
    await scene.open(b"1" * 16)
    assert scene.peer.greetings == 2


async def test_a_peer_forgotten_while_it_is_connected_to_leaves_no_connection(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate, connect = asyncio.Event(), asyncio.Event(), scene.mover.connect

    async def slowly(pool: PeerPool) -> None:
        begun.set()
        await gate.wait()
        await connect(pool)

    monkeypatch.setattr(scene.mover, "connect", slowly)
    opening = asyncio.create_task(scene.open(b"1" * 16))
    async with asyncio.timeout(20):
        await begun.wait()
    scene.peers.forget(b"1" * 16)  # another has answered at its address
    gate.set()
    with pytest.raises(Unavailable, match="lost during the handshake"):
        await opening
    with pytest.raises(ReadFailed, match="is not connected"):
        scene.mover.peer(b"1" * 16)
    await scene.open(b"1" * 16)


async def test_whom_a_greeting_did_not_reach_costs_later_requests_little_until_one_does(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, fair_watch: Any
) -> None:
    """As behind a link that is down: each request would else wait for each such candidate."""
    monkeypatch.setattr(peer_client, "HANDSHAKE_TIMEOUT_S", 0.5)
    scene.peer.gate.clear()
    with pytest.raises(Unavailable, match="DEADLINE_EXCEEDED"):
        await scene.open(b"1" * 16)
    async with fair_watch() as so_far_s:
        for _ in range(2):
            with pytest.raises(Unavailable, match="takes over 0.1 s"):
                await scene.open(b"1" * 16)
        assert so_far_s() < 0.45  # not for the greeting's time
    scene.peer.gate.set()
    await asyncio.wait({scene.peers._peers[b"1" * 16].contact}, timeout=20)
    await scene.open(b"1" * 16)
    assert scene.peers._timed_out == {}


async def test_who_was_not_reached_is_remembered_within_bounds(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "MAX_TIMED_OUT_PEERS", 2)
    for life in (b"1" * 16, b"2" * 16, b"3" * 16):
        scene.register(life)
        scene.peer.restart(b"x" * 16)  # so that each handshake fails
        with pytest.raises(Unavailable, match="has restarted"):
            await scene.open(life)
    assert list(scene.peers._timed_out) == [b"2" * 16, b"3" * 16]


async def test_closing_ends_the_greetings_under_way(scene: Scene) -> None:
    (opening,) = await greeting_begun(scene, "")
    await scene.peers.close()
    with pytest.raises(Unavailable, match="lost during the handshake"):
        await opening


async def test_who_leaves_while_it_greets_takes_nobodys_channel_along(scene: Scene) -> None:
    first, second = await greeting_begun(scene, "", "")
    first.cancel()
    await asyncio.wait({first})
    scene.peer.gate.set()
    await (await second).close()
    assert scene.known() == {b"1" * 16}


async def test_a_slow_peer_is_reported_until_its_boot_is_forgotten(scene: Scene) -> None:
    slow = Scene(scene.peer, scene.address, floor_gb_per_s=1e9)
    slow.register(slow.peer.boot_id)
    await slow.open(slow.peer.boot_id)
    assert [mark.boot_id for mark in slow.peers.degraded()] == [slow.peer.boot_id]
    slow.peers.forget(slow.peer.boot_id)
    assert slow.peers.degraded() == []
    await slow.peers.close()
