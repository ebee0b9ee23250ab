"""Handshakes under way: lost, slow, unanswered, or a bad fit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import grpc
import pytest

from baton.kv_transfer.memory_mover import Fate
from baton.kv_transfer.mover import PeerPool
from baton.kv_transfer.peers import peer_client, registered_peers
from baton.proto import worker_pb2
from baton.runtime.errors import Incompatible, ReadFailed, Unavailable
from baton.runtime.grpc_links import open_channel
from baton.runtime.tls import Tls
from tests.support.machine_speed import slowness
from tests.support.peer_scene import Scene
from tests.support.waiting import eventually

pytestmark = pytest.mark.timed


async def handshake_begun(scene: Scene, *addresses: str) -> list[asyncio.Task[None]]:
    """Calls that ask for one boot id, the first of which greets and hears no answer yet."""
    scene.peer.gate.clear()
    tasks = []
    for address in addresses:
        candidate = worker_pb2.Candidate(
            worker_id="prefill-0", boot_id=b"1" * 16, address=address or scene.address
        )
        tasks.append(asyncio.create_task(scene.peers.open(candidate)))
        await eventually(lambda: scene.peer.handshakes)
    # The later callers have to join the first one's handshake; no event tells of that.
    await asyncio.sleep(0.01)
    return tasks


async def test_a_peer_lost_during_its_handshake_is_reported_as_lost(scene: Scene) -> None:
    (opening,) = await handshake_begun(scene, "")
    scene.peers.forget(b"1" * 16)  # as by another handoff
    scene.peer.gate.set()
    with pytest.raises(Unavailable):
        await opening
    assert scene.known() == set()
    await scene.open(b"1" * 16)


async def test_a_failed_handshake_dials_no_address_of_a_waiter(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second names an address that only its message knows. Nothing is sent there."""
    dialled: list[str] = []

    def noted(address: str, tls: Tls | None) -> grpc.aio.Channel:
        dialled.append(address)
        return open_channel(address, tls)

    monkeypatch.setattr(peer_client, "open_channel", noted)
    first, second = await handshake_begun(scene, "", "127.0.0.1:1")
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


async def test_a_peer_forgotten_after_its_handshake_opens_no_stream(
    scene: Scene,
) -> None:
    first, second = await handshake_begun(scene, "", "")
    scene.peer.gate.set()
    first.add_done_callback(lambda _: scene.peers.forget(b"1" * 16))
    await (await first).close()
    with contextlib.suppress(Unavailable):  # or it was opened just before
        await (await second).close()
    await scene.open(b"1" * 16)


@pytest.mark.parametrize("how", ["handshake", "pool"])
async def test_a_peer_that_does_not_fit_leaves_no_channel_open(
    scene: Scene, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[grpc.aio.Channel] = []

    def noted(address: str, tls: Tls | None) -> grpc.aio.Channel:
        opened.append(open_channel(address, tls))
        return opened[-1]

    monkeypatch.setattr(peer_client, "open_channel", noted)
    if how == "handshake":
        monkeypatch.setattr(scene.peer, "kv_dtype", "bfloat16")
    else:  # it fits, and cannot be read
        scene.peer.exchange.decide = lambda attempt: Fate(failed=True)
    with pytest.raises(Incompatible if how == "handshake" else ReadFailed):
        await scene.open(b"1" * 16)
    assert scene.known() == set()
    await eventually(lambda: opened[0].get_state() is grpc.ChannelConnectivity.SHUTDOWN, 20)


async def test_a_slow_first_contact_yields_to_the_next_candidate(
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
    await eventually(lambda: scene.peer.exchange.stuck == 1)
    assert scene.known() == {b"1" * 16}
    scene.peer.exchange.release_stuck()
    await scene.first_contact_ended(b"1" * 16)
    measured = scene.peer.exchange.reads
    await scene.open(b"1" * 16)
    assert scene.peer.exchange.reads == measured and scene.peer.handshakes == 1


async def test_a_failed_first_contact_without_waiters_is_repeated(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scene.peers, "_first_contact_s", 0.2)
    scene.peer.exchange.decide = lambda attempt: Fate(
        stuck=attempt.number == 1, failed=attempt.number == 2
    )
    with pytest.raises(Unavailable, match="takes over"):
        await scene.open(b"1" * 16)
    await eventually(lambda: scene.peer.exchange.stuck == 1)
    scene.peer.exchange.release_stuck()
    await eventually(lambda: not scene.known(), 20)
    await scene.open(b"1" * 16)
    assert scene.peer.handshakes == 2


async def test_a_peer_forgotten_while_connecting_leaves_no_connection(
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


async def test_an_unreached_peer_costs_later_requests_little(
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
    fair_watch: Callable[[], AbstractAsyncContextManager[Callable[[], float]]],
) -> None:
    """As behind a link that is down: each request would else wait for each such candidate."""
    monkeypatch.setattr(peer_client, "HANDSHAKE_TIMEOUT_S", 0.5 * slowness())
    scene.peer.gate.clear()
    with pytest.raises(Unavailable, match="DEADLINE_EXCEEDED"):
        await scene.open(b"1" * 16)
    async with fair_watch() as so_far_s:
        for _ in range(2):
            with pytest.raises(Unavailable, match="takes over 0.1 s"):
                await scene.open(b"1" * 16)
        assert so_far_s() < 0.45  # not for the handshake's time
    scene.peer.gate.set()
    await scene.first_contact_ended(b"1" * 16)
    await scene.open(b"1" * 16)
    assert scene.timed_out() == []


async def test_unreached_peers_are_remembered_within_bounds(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registered_peers, "MAX_TIMED_OUT_PEERS", 2)
    for life in (b"1" * 16, b"2" * 16, b"3" * 16):
        scene.register(life)
        scene.peer.restart(b"x" * 16)  # so that each handshake fails
        with pytest.raises(Unavailable, match="has restarted"):
            await scene.open(life)
    assert scene.timed_out() == [b"2" * 16, b"3" * 16]


async def test_closing_ends_the_handshakes_under_way(scene: Scene) -> None:
    (opening,) = await handshake_begun(scene, "")
    await scene.peers.close()
    with pytest.raises(Unavailable, match="lost during the handshake"):
        await opening


async def test_a_waiter_that_leaves_closes_no_other_channel(scene: Scene) -> None:
    first, second = await handshake_begun(scene, "", "")
    first.cancel()
    await asyncio.wait({first})
    scene.peer.gate.set()
    await (await second).close()
    assert scene.known() == {b"1" * 16}
