"""READs by NIXL between two real processes; the other one is the preflight's pool server."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import socket
import sys
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baton.kv_transfer import checksum_numba, nixl_agent, nixl_library, nixl_mover, read_segments
from baton.kv_transfer.checksum import reference
from baton.kv_transfer.checksum_numba import checksums
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.mover import PeerPool
from baton.kv_transfer.nixl_agent import NixlAgent
from baton.kv_transfer.nixl_mover import NixlMover, NixlRead
from baton.kv_transfer.preflight import described, first_json, measure
from baton.runtime.errors import ReadFailed
from tests.support.machine_speed import slowness
from tests.support.nixl_agents import agents_of, connected, queue_of
from tests.support.waiting import eventually

pytestmark = pytest.mark.timed

pytest.importorskip("nixl")

BLOCKS = 64
BLOCK_BYTES = 1 << 20
OWN = b"own boot id 1234"
DEADLINE_S = 30.0 * slowness()


@asynccontextmanager
async def pool_server() -> AsyncIterator[tuple[asyncio.subprocess.Process, PeerPool]]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baton.kv_transfer.preflight", "--serve"),
        *("--blocks", str(BLOCKS), "--block-bytes", str(BLOCK_BYTES)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield child, described(await first_json(child))
    finally:
        if child.returncode is None:
            child.send_signal(signal.SIGCONT)
            child.kill()
        await child.wait()


@asynccontextmanager
async def own_mover(**how: int) -> AsyncIterator[tuple[NixlMover, np.ndarray]]:
    pool = np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    mover = NixlMover(HostPool(pool, slabs=8), OWN, read_threads=2, **how)
    try:
        yield mover, pool
    finally:
        await mover.close()


async def ended(read: NixlRead) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.wait({read.landed})
        await read.settled


async def test_blocks_are_read_scattered_and_summed_alike() -> None:
    async with pool_server() as (_, peer), own_mover() as (mover, pool):
        await mover.connect(peer)
        await mover.connect(peer)  # idempotent
        read = mover.read(peer.boot_id, [5, 0, 63], [1, 62, 7])
        await ended(read)
        read.landed.result()
        assert [int(pool[block, 77]) for block in (1, 62, 7)] == [6, 1, 64]
        assert (pool[[0, 2, 61, 63]] == 0).all()
        sums = await mover.checksums([7, 1], [3, 4])
        assert (sums == reference(pool, [7, 1], [3, 4], 8)).all()
        assert mover.describe().boot_id == OWN and mover.describe().num_blocks == BLOCKS
        versions = mover.describe().versions
        assert versions == peer.versions and versions.keys() == {"nixl", "ucx"}
        assert all(re.match(r"\d+\.\d+", version) for version in versions.values()), versions


async def test_a_read_with_seeds_brings_the_sums_of_what_landed() -> None:
    async with pool_server() as (_, peer), own_mover() as (mover, pool):
        await mover.connect(peer)
        for _ in range(4):  # both reading threads have their turns
            read = mover.read(peer.boot_id, [5, 0], [1, 62], [11, 12])
            assert read.checksums is not None
            sums = await asyncio.wait_for(read.checksums, DEADLINE_S)
            assert (sums == reference(pool, [1, 62], [11, 12], 8)).all()
        assert mover.read(peer.boot_id, [5], [1]).checksums is None
        with pytest.raises(ReadFailed, match="1 seeds do not fit 2 blocks"):
            mover.read(peer.boot_id, [5, 0], [1, 62], [11])


async def test_a_read_that_has_ended_holds_nothing_in_a_circle() -> None:
    async with pool_server() as (_, peer), own_mover() as (mover, _):
        await mover.connect(peer)
        read = mover.read(peer.boot_id, [5, 0], [1, 62], [11, 12])
        await ended(read)
        watched = weakref.ref(read)
        gc.disable()
        try:
            del read
            # the agent's thread lets go of it a little later
            await eventually(lambda: watched() is None, DEADLINE_S)
        finally:
            gc.enable()


async def test_the_agents_share_the_pieces_of_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_segments, "SEGMENT_BYTES", BLOCK_BYTES)
    summing: set[int] = set()
    both = threading.Event()

    def noted(*of_blocks: object) -> np.ndarray:
        summing.add(threading.get_ident())
        if len(summing) == 2:
            both.set()
        both.wait(0.05 * slowness())  # 32 times at most, for the other thread to wake
        return checksums(*of_blocks)

    monkeypatch.setattr(checksum_numba, "checksums", noted)
    async with pool_server() as (_, peer), own_mover() as (mover, pool):
        await mover.connect(peer)
        read = mover.read(peer.boot_id, range(32), range(32), list(range(32)))
        assert read.checksums is not None
        sums = await asyncio.wait_for(read.checksums, DEADLINE_S)
        assert (sums == reference(pool, range(32), list(range(32)), 8)).all()
    assert len(summing) == 2


async def test_too_many_waiting_pieces_are_refused_but_not_one_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_segments, "SEGMENT_BYTES", BLOCK_BYTES)
    async with pool_server() as (_, peer), own_mover(segment_queue=4) as (mover, _):
        await mover.connect(peer)
        with monkeypatch.context() as held:
            held.setattr(queue_of(mover), "take", lambda full=(): None)  # no thread takes any
            alone = mover.read(peer.boot_id, range(5), range(5))
            another = mover.read(peer.boot_id, range(5, 6), range(5, 6))
            await ended(another)
            with pytest.raises(ReadFailed, match="too many READs"):
                another.landed.result()
        for agent in agents_of(mover):
            agent.wake()
        await ended(alone)
        alone.landed.result()
        small = mover.read(peer.boot_id, range(4), range(4))
        await ended(small)
        small.landed.result()


async def test_the_preflight_measures_a_peer() -> None:
    async with pool_server() as (_, peer), own_mover() as (mover, _):
        await mover.connect(peer)
        report = await measure(mover, peer.boot_id, range(4), range(4), floor_gb_per_s=1e6)
        assert report.gb_per_s > 0 and report.degraded and report.read_bytes == 4 * BLOCK_BYTES
        assert "DEGRADED" in report.line


async def test_a_killed_peer_fails_its_reads_and_they_settle() -> None:
    async with pool_server() as (child, peer), own_mover() as (mover, _):
        await mover.connect(peer)
        whole = range(BLOCKS)
        reads = [mover.read(peer.boot_id, whole, whole) for _ in range(3)]
        child.kill()
        reads += [mover.read(peer.boot_id, whole, whole) for _ in range(50)]
        await child.wait()
        reads.append(mover.read(peer.boot_id, [0], [0]))
        for read in reads:
            await ended(read)
        assert isinstance(reads[-1].landed.exception(), ReadFailed)
        mover.forget(peer.boot_id)
        with pytest.raises(ReadFailed, match="not connected"):
            mover.read(peer.boot_id, [0], [0])
        async with pool_server() as (_, other):  # the mover goes on with others
            await mover.connect(other)
            read = mover.read(other.boot_id, [1], [2])
            await ended(read)
            read.landed.result()


def tcp_connections() -> set[int]:
    """Return the file descriptors of this process's connections by TCP, UCX's among them."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it is closed by now, or listens
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                if copy.family == socket.AF_INET and copy.type == socket.SOCK_STREAM:
                    copy.getpeername()
                    found.add(int(entry.name))
    return found


async def test_a_connection_that_broke_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a firewall resets KV's connections, and the peer lives. UCX itself never would."""
    monkeypatch.setenv("UCX_TLS", "tcp")

    async def landed(mover: NixlMover, peer: PeerPool) -> bool:
        read = mover.read(peer.boot_id, range(32), range(32))  # segments for both agents
        await ended(read)
        return read.landed.exception() is None

    async with pool_server() as (_, peer), own_mover() as (mover, _):
        others = tcp_connections()
        await mover.connect(peer)
        assert await landed(mover, peer)
        for number in tcp_connections() - others:
            with socket.socket(fileno=os.dup(number)) as copy:
                copy.shutdown(socket.SHUT_RDWR)
        assert not await landed(mover, peer)
        async with asyncio.timeout(DEADLINE_S):  # each agent meets its own broken connection
            while not all([await landed(mover, peer) for _ in range(5)]):
                await asyncio.sleep(0.1)  # RECONNECT_S has to pass, which no event tells


async def test_a_paused_peer_leaves_the_loop_free_and_reads_settle() -> None:
    async with pool_server() as (child, peer), own_mover() as (mover, _):
        await mover.connect(peer)
        child.send_signal(signal.SIGSTOP)
        reads = [mover.read(peer.boot_id, range(8), range(8)) for _ in range(4)]
        await asyncio.wait({reads[-1].settled}, timeout=0.5)  # may land by shared memory
        mover.forget(peer.boot_id)  # abandoned; READs under way keep the peer
        child.send_signal(signal.SIGCONT)
        for read in reads:
            await ended(read)


async def test_what_does_not_fit_is_refused_before_anything_is_read() -> None:
    async with pool_server() as (_, peer), own_mover() as (mover, pool):
        with pytest.raises(ReadFailed, match="not connected"):
            mover.read(peer.boot_id, [0], [0])
        small = PeerPool(b"x" * 16, "nixl", peer.metadata, peer.base_address, 512, 4)
        with pytest.raises(ReadFailed, match="512 bytes"):
            await mover.connect(small)
        garbage = PeerPool(b"y" * 16, "nixl", b"garbage", 0, BLOCK_BYTES, 4)
        with pytest.raises(ReadFailed, match="cannot reach"):
            await mover.connect(garbage)
        await mover.connect(peer)
        for remote, local in (([64], [0]), ([0], [64]), ([-1], [0]), ([0], [-1]), ([0, 1], [0])):
            with pytest.raises(ReadFailed):
                mover.read(peer.boot_id, remote, local)
        assert not pool.any()


@pytest.mark.parametrize(
    "lie",
    [
        {"num_blocks": BLOCKS + 1},
        {"base_address": -BLOCK_BYTES},
        {"base_address": 1},
        {"base_address": 1 << 40},
        {"num_blocks": 1, "base_address": BLOCKS * BLOCK_BYTES},
    ],
)
async def test_a_pool_beyond_what_its_owner_registered_is_refused(lie: dict[str, int]) -> None:
    """The handshake says where a pool is, NIXL's metadata what was registered: no READ is posted
    outside of either."""
    async with pool_server() as (_, peer), own_mover() as (mover, pool):
        moved = peer.base_address + lie.get("base_address", 0)
        lying = replace(peer, base_address=moved, num_blocks=lie.get("num_blocks", BLOCKS))
        with pytest.raises(ReadFailed, match="cannot reach"):
            await mover.connect(lying)
        with pytest.raises(ReadFailed, match="not connected"):
            mover.read(peer.boot_id, [0], [0])
        await mover.connect(peer)  # the truth is taken after a lie
        read = mover.read(peer.boot_id, [BLOCKS - 1], [0])
        await ended(read)
        read.landed.result()
        assert not pool[1:].any()


def test_nixls_own_metadata_port_stays_closed() -> None:
    """Pools are described in handshakes, which need the token; NIXL's port would ask for none."""
    made = nixl_library.load_bindings().nixl_agent_config(backends=[], enable_prog_thread=False)
    assert made.enable_listen is False
    assert "listen" not in Path(nixl_agent.__file__).read_text()


async def test_a_connection_of_one_agent_only_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pool_server() as (_, peer), own_mover() as (mover, _):
        first, second = agents_of(mover)

        def refuse(pool: PeerPool) -> None:
            raise ReadFailed("no room")

        with monkeypatch.context() as patch:
            patch.setattr(second, "connect", refuse)
            with pytest.raises(ReadFailed, match="no room"):
                await mover.connect(peer)
        await turn_of(first)
        assert not connected(first)
        await mover.connect(peer)
        assert peer.boot_id in connected(first) and peer.boot_id in connected(second)


async def test_a_connection_that_comes_too_late_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under way in one agent's thread, or still waiting there, when its time is over."""
    monkeypatch.setattr(nixl_mover, "CONNECT_TIMEOUT_S", 0.2)
    async with pool_server() as (_, peer), own_mover() as (mover, _):
        first, second = agents_of(mover)
        go = threading.Event()
        connect = second.connect

        def slow(pool: PeerPool) -> None:
            go.wait(DEADLINE_S)
            connect(pool)

        with monkeypatch.context() as patch:
            patch.setattr(second, "connect", slow)
            with pytest.raises(ReadFailed, match="no connection within 0.2 s"):
                await mover.connect(peer)
            go.set()
            await turn_of(second)
        await turn_of(first)
        assert not connected(first) and not connected(second)
        go.clear()
        second.do(lambda: go.wait(DEADLINE_S) and None)
        with pytest.raises(ReadFailed, match="no connection within 0.2 s"):
            await mover.connect(peer)
        go.set()
        await turn_of(second)
        await turn_of(first)
        assert not connected(first) and not connected(second)


async def turn_of(agent: NixlAgent) -> None:
    """Until the agent's thread has done all its work so far."""
    done = threading.Event()
    assert agent.do(done.set)
    assert await asyncio.to_thread(done.wait, DEADLINE_S)


async def test_holding_progress_is_counted() -> None:
    async with own_mover() as (mover, _):
        mover.hold_progress()
        mover.hold_progress()
        mover.drop_progress()
        assert agents_of(mover)[0].holds == 1
        mover.drop_progress()
        assert agents_of(mover)[0].holds == 0


async def test_a_thread_that_does_not_return_from_a_call_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NIXL's calls have no time limit, and what the thread polls ends with it."""
    async with own_mover() as (mover, _):
        _, second = agents_of(mover)
        assert mover.failure_reason() is None
        monkeypatch.setattr(nixl_mover, "STUCK_S", 0.2)
        go = threading.Event()
        second.do(lambda: go.wait(DEADLINE_S) and None)
        await eventually(lambda: mover.failure_reason() is not None)
        assert "has not returned from a call" in str(mover.failure_reason())
        monkeypatch.setattr(nixl_mover, "ASKED_S", 0.0)  # as if the process had stood still
        assert mover.failure_reason() is None
        go.set()
