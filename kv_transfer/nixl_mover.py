"""The mover between processes and hosts: one-sided READs by NIXL over UCX.

This is the event loop's side: it passes READs to the agents' threads and converts their ends to
futures. An agent's thread also checksums what it has read; a granter's checksums have their own
thread. Only the reader has deadlines: the posted part of an abandoned READ settles when NIXL
reports its end, which may be never for a disconnected peer. The engine owns the pool's memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.local_pool import DRAM, LocalPool, landed_checksums
from baton.kv_transfer.mover import ChecksumMonitor, PeerPool
from baton.kv_transfer.nixl_agent import NixlAgent
from baton.kv_transfer.read_segments import SegmentedRead, cut, units_each
from baton.kv_transfer.read_shape import ReadShape
from baton.kv_transfer.segment_queue import SegmentQueue
from baton.runtime.errors import ReadFailed

KIND = "nixl"
T = TypeVar("T")
CONNECT_TIMEOUT_S = 5.0
READ_THREADS = 2  # of a worker, for copies and checksums
SEGMENT_QUEUE = 1 << 16  # queued segments
STUCK_S = 10.0  # a turn of an agent's thread takes milliseconds; adding a peer's large pool, longer
ASKED_S = 1.0  # `failure_reason` is asked more often, unless the process or its loop stood still
MAX_CHECKSUM_CALLS = 64  # queued or running; further ones wait on the event loop


class NixlRead:
    """One READ; implements `mover.Read` with NIXL. The mover sets `segments`; `wake` makes the
    agents post again."""

    segments: SegmentedRead

    def __init__(self, queue: SegmentQueue, wake: Callable[[], None], with_checksums: bool) -> None:
        loop = asyncio.get_running_loop()
        self._queue = queue
        self._wake = wake
        self.checksums: asyncio.Future[NDArray[np.uint64]] | None = None
        if with_checksums:
            self.checksums = loop.create_future()
            self.checksums.add_done_callback(lambda done: done.exception())
        self.landed: asyncio.Future[None] = loop.create_future()
        self.settled: asyncio.Future[None] = loop.create_future()
        self.landed.add_done_callback(lambda done: done.exception())  # it may have no waiter

    @property
    def moved_at(self) -> float:
        return self._queue.moved_at(self.segments)

    def abandon(self) -> None:
        if self.settled.done():
            return
        if self._queue.abandon(self.segments):
            self.end(self.segments.failure)
        else:
            self._wake()

    def end(self, failure: ReadFailed | None, checksums: NDArray[np.uint64] | None = None) -> None:
        """Complete the futures after the last segment: landed or failed, and settled."""
        if failure is None:
            self.landed.set_result(None)
            if self.checksums is not None and checksums is not None:
                self.checksums.set_result(checksums)
        else:
            self.landed.set_exception(failure)
            if self.checksums is not None:
                self.checksums.set_exception(failure)
        self.settled.set_result(None)
        del self.segments  # they refer to this READ


class NixlMover:
    """Implements `mover.Mover` with NIXL. The constructor registers the pool, which blocks;
    afterwards one event loop calls all methods. Raises ConfigError without NIXL."""

    kind = KIND

    def __init__(
        self,
        pool: LocalPool,
        boot_id: bytes,
        read_threads: int = 1,
        segment_queue: int = SEGMENT_QUEUE,
    ) -> None:
        """Start the agents. If this host copies READs (CMA, TCP), several threads copy and
        checksum faster than one. Peers read through the first agent; the others only read. One
        thread suffices for a device's memory, since it copies nothing. At most `segment_queue`
        segments are queued, or those of one READ."""
        self.slabs = pool.slabs
        self.block_bytes, self.bridges_sizes = pool.block_bytes, pool.bridges_sizes
        self._pool = pool
        if pool.memory != DRAM:
            read_threads = 1
        self._boot_id = boot_id
        self._max_segments = segment_queue
        names = [boot_id.hex(), *(f"{boot_id.hex()}-{n}" for n in range(1, read_threads))]
        self._segments = SegmentQueue()
        self._agents = [
            NixlAgent(pool, name, self._segments, (number, len(names)))
            for number, name in enumerate(names)
        ]
        self._agent = self._agents[0]
        self._peers: dict[bytes, PeerPool] = {}
        self._shapes: dict[bytes, ReadShape] = {}
        self._checksum_thread = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._sum_calls = asyncio.Semaphore(MAX_CHECKSUM_CALLS)
        self._monitor = ChecksumMonitor()
        self._asked_s = self._awake_s = time.monotonic()

    def describe(self) -> PeerPool:
        pool = self._pool
        return PeerPool(
            boot_id=self._boot_id,
            mover=KIND,
            metadata=self._agent.metadata,
            base_address=pool.address,
            block_bytes=pool.block_bytes,
            num_blocks=pool.blocks,
            device_id=pool.device_id,
            memory=pool.memory,
            versions=self._agent.versions,
            rank_pools=pool.rank_pools,
            kv_heads=pool.kv_heads,
        )

    async def connect(self, peer: PeerPool) -> None:
        if peer.boot_id in self._peers:
            return
        shape = peer.shape(self._pool.block_bytes, len(self._pool.rank_pools))
        try:
            for agent in self._agents:
                await self._connect(agent, peer)
        except BaseException:  # CancelledError too: disconnect all agents
            if peer.boot_id not in self._peers:
                for agent in self._agents:
                    agent.forget(peer.boot_id)
            raise
        self._peers[peer.boot_id], self._shapes[peer.boot_id] = peer, shape

    async def _connect(self, agent: NixlAgent, peer: PeerPool) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tell = _completer(done)

        def connect() -> None:
            if done.cancelled():  # else it connects after `forget`
                return
            try:
                agent.connect(peer)
            except ReadFailed as failure:
                tell(failure)
            else:
                tell(None)

        if not agent.do(connect):
            raise ReadFailed("the mover's command queue is full")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await done
        except TimeoutError:
            raise ReadFailed(f"no connection within {CONNECT_TIMEOUT_S:g} s") from None

    def peer(self, boot_id: bytes) -> PeerPool:
        found = self._peers.get(boot_id)
        if found is None:
            raise ReadFailed(f"worker {boot_id.hex()[:8]} is not connected")
        return found

    def shape(self, boot_id: bytes) -> ReadShape:
        self.peer(boot_id)
        return self._shapes[boot_id]

    def forget(self, boot_id: bytes) -> None:
        self._shapes.pop(boot_id, None)
        if self._peers.pop(boot_id, None) is not None:
            for agent in self._agents:
                agent.forget(boot_id)

    def read(
        self,
        boot_id: bytes,
        remote: Sequence[int],
        local: Sequence[int],
        seeds: Sequence[int] | None = None,
    ) -> NixlRead:
        peer, shape = self.peer(boot_id), self.shape(boot_id)
        parts = shape.granter_parts, shape.reader_parts
        ratio = peer.ratio
        check_blocks(remote, peer.num_blocks, local, self._pool.blocks * ratio.joined, parts)
        if seeds is not None and len(seeds) * parts[1] != len(local):
            raise ReadFailed(f"{len(seeds)} seeds do not fit {len(local)} blocks")
        read = NixlRead(self._segments, self._wake, with_checksums=seeds is not None)
        loop = asyncio.get_running_loop()

        checksums = (
            np.empty((len(seeds), self.slabs), dtype=np.uint64) if seeds is not None else None
        )

        def landed(first: int, end: int) -> None:
            """Checksum the units that have landed, in the agent's thread."""
            assert checksums is not None and seeds is not None
            own = local[first * parts[1] : end * parts[1]]
            checksums[first:end] = landed_checksums(self._pool, own, seeds[first:end], ratio)

        def ended(failure: ReadFailed | None) -> None:
            _call(loop, lambda: read.end(failure, checksums))

        step = units_each(self._pool, shape.unit_bytes)
        summed = None if seeds is None else landed
        segments = cut(boot_id, remote, local, step, summed, ended, parts=parts)
        read.segments = segments[0].read
        if len(self._segments) and len(self._segments) + len(segments) > self._max_segments:
            read.end(ReadFailed("the mover has too many READs waiting"))
            return read
        self._segments.add(segments)
        self._wake()
        return read

    def _wake(self) -> None:
        for agent in self._agents:
            agent.wake()

    async def checksums(self, blocks: Sequence[int], seeds: Sequence[int]) -> NDArray[np.uint64]:
        return await self.compute(partial(self._pool.checksums, blocks, seeds))

    async def compute(self, call: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        async with self._sum_calls:
            future = self._checksum_thread.submit(call)
            self._monitor.begin(future, loop.time())
            # Not when the caller leaves, since the thread may still be computing.
            future.add_done_callback(
                lambda over: _call(loop, lambda: self._monitor.end(over, loop.time()))
            )
            return await asyncio.wrap_future(future)

    async def put_in_order(
        self, boot_id: bytes, blocks: Sequence[int], filled: Sequence[int]
    ) -> None:
        ratio = self.peer(boot_id).ratio
        await self.compute(partial(self._pool.put_in_order, blocks, filled, ratio))

    def failure_reason(self) -> str | None:
        if not all(agent.alive for agent in self._agents):
            return "a NIXL thread has died"
        if (turn_s := self._longest_turn_s()) > STUCK_S:
            return f"a NIXL thread has not returned from a call for {turn_s:.0f} s"
        return self._monitor.failure_reason(asyncio.get_running_loop().time())

    def _longest_turn_s(self) -> float:
        """Return for how long an agent's thread has been in one turn, without the time in which
        this process stood still."""
        now_s = time.monotonic()
        if now_s - self._asked_s > ASKED_S:
            self._awake_s = now_s
        self._asked_s = now_s
        return now_s - max(self._awake_s, min(agent.turned_s for agent in self._agents))

    def oldest_checksum_s(self) -> float:
        return self._monitor.oldest_s(asyncio.get_running_loop().time())

    def hold_progress(self) -> None:
        self._agent.holds += 1
        if self._agent.holds == 1:
            self._agent.wake()

    def drop_progress(self) -> None:
        self._agent.holds -= 1

    async def close(self) -> None:
        """Wait a second for READs in flight; if they do not end, leave the agent to the end of the
        process."""
        await asyncio.gather(*(asyncio.to_thread(agent.stop) for agent in self._agents))
        self._checksum_thread.shutdown(wait=False, cancel_futures=True)


def check_blocks(
    remote: Sequence[int],
    remote_blocks: int,
    local: Sequence[int],
    local_blocks: int,
    parts: tuple[int, int] = (1, 1),
) -> None:
    """Raise ReadFailed unless the blocks are in their pools, unit by unit; `parts` are the blocks
    of a unit at both ends. A READ outside the local pool would overwrite other memory."""
    units, rest = divmod(len(local), parts[1])
    if rest or len(remote) != units * parts[0]:
        raise ReadFailed(f"{len(remote)} blocks do not fit into {len(local)}")
    for blocks, size in ((remote, remote_blocks), (local, local_blocks)):
        if blocks and not 0 <= min(blocks) <= max(blocks) < size:
            raise ReadFailed(f"{list(blocks)}: one is not in a pool of {size} blocks")


def _completer(done: asyncio.Future[None]) -> Callable[[Exception | None], None]:
    """Return a callback for another thread that completes `done` in its own loop."""
    loop = done.get_loop()

    def finish(failure: Exception | None) -> None:
        if not done.done():
            if failure is None:
                done.set_result(None)
            else:
                done.set_exception(failure)

    return lambda failure: _call(loop, lambda: finish(failure))


def _call(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    """Run an action in the loop's thread, unless the loop has closed."""
    try:
        loop.call_soon_threadsafe(action)
    except RuntimeError:
        if not loop.is_closed():
            raise
