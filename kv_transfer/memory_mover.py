"""A mover between pools of one process, for tests and simulation, without threads.

A `MemoryExchange` simulates the network: it knows the pools by boot id and decides each READ's
fate (delay, failure, stuck, wrong bytes) when it is posted. Bytes are copied when the READ lands,
so a late READ returns the granter's content of that time. READs are independent unless the
exchange has a `bytes_per_s`: then they queue for one link. The exchange owns stuck and queued
READs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.local_pool import HostPool, landed_checksums
from baton.kv_transfer.mover import ChecksumMonitor, PeerPool
from baton.kv_transfer.read_shape import ReadShape
from baton.runtime import waits
from baton.runtime.errors import ReadFailed

KIND = "memory"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Attempt:
    """A READ before it is posted, for the exchange's `decide`. `number` counts all READs. A READ
    with `checksummed` blocks will be verified; all others are measurements. `parts`: blocks of a
    unit at the granter and at the reader; `remote` and `local` list them unit by unit; `local` are
    cells where block sizes differ (block_sizes.py), `joined` of each own block."""

    number: int
    reader: bytes
    granter: bytes
    remote: tuple[int, ...]
    local: tuple[int, ...]
    checksummed: bool = False
    parts: tuple[int, int] = (1, 1)
    joined: int = 1

    @property
    def units(self) -> int:
        return len(self.local) // self.parts[1]


@dataclass(frozen=True, slots=True)
class Fate:
    """The outcome of a READ.

    `failed`: nothing lands, and the READ fails after the delay. `stuck`: the READ neither lands nor
    fails until the exchange's `release_stuck`. The next three name a unit of the READ by its index.
    `corrupt`: bit number `bit` is flipped. `short`: the second half does not land, without an
    error. `wrong`: the granter's next block lands instead. `stale`: all blocks are read from the
    pool of this boot id. `early`: so many units land after half of the delay, and again with the
    others.
    """

    delay_s: float = 0.0
    failed: bool = False
    stuck: bool = False
    corrupt: int | None = None
    bit: int = 0
    short: int | None = None
    wrong: int | None = None
    early: int = 0
    stale: bytes | None = None


_UNDECIDED = Fate()


class MemoryExchange:
    """The pools of a process by boot id, and the READs between them. `bytes_per_s`: the rate of a
    link that READs use one after another; None: each READ only has its own delay."""

    def __init__(self, decide: Callable[[Attempt], Fate] | None = None) -> None:
        self.decide = decide or (lambda attempt: Fate())
        self.reads = 0
        self.bytes_per_s: float | None = None
        self.checksum_s = 0.0
        self.later: Callable[[float, Callable[[], None]], object] = _later
        self.landing: Callable[[Attempt], None] = lambda attempt: None  # called before a landing
        self._pools: dict[bytes, NDArray[np.uint8]] = {}
        self._stuck: list[MemoryRead] = []
        self._waiting: deque[MemoryRead] = deque()
        self._moving: MemoryRead | None = None

    def join(self, boot_id: bytes, pool: NDArray[np.uint8]) -> None:
        self._pools[boot_id] = pool

    def leave(self, boot_id: bytes) -> None:
        """Remove a dead worker: READs from its pool that have not landed fail."""
        self._pools.pop(boot_id, None)

    def pool(self, boot_id: bytes) -> NDArray[np.uint8] | None:
        return self._pools.get(boot_id)

    def begin(self, read: MemoryRead) -> None:
        """Post a READ now or when the link is free."""
        self._waiting.append(read)
        self._post_waiting()

    def dropped(self, read: MemoryRead) -> bool:
        """Remove a queued READ; returns whether it was queued."""
        if read not in self._waiting:
            return False
        self._waiting.remove(read)
        return True

    def makes_progress(self, read: MemoryRead) -> bool:
        """Return whether bytes move: those of the READ, or those that it waits for."""
        return read is self._moving or read in self._waiting

    def _post_waiting(self) -> None:
        while self._waiting and self._moving is None:
            read = self._waiting.popleft()
            size = read.post()
            if size and self.bytes_per_s is not None:
                self._moving = read
                self.later(size / self.bytes_per_s, partial(self._moved, read))

    def _moved(self, read: MemoryRead) -> None:
        self._moving = None
        read.moved()
        self._post_waiting()

    def hold_back(self, read: MemoryRead) -> None:
        self._stuck.append(read)

    @property
    def stuck(self) -> int:
        """Return the number of stuck READs."""
        return len(self._stuck)

    def release_stuck(self, which: Callable[[Attempt], bool] = lambda attempt: True) -> int:
        """Land the stuck READs that `which` selects now; return their number."""
        held = [read for read in self._stuck if which(read.attempt)]
        self._stuck = [read for read in self._stuck if read not in held]
        for read in held:
            read.finish()
        return len(held)


class MemoryRead:
    """One READ; implements `mover.Read` in memory."""

    def __init__(
        self,
        exchange: MemoryExchange,
        attempt: Attempt,
        target: NDArray[np.uint8],
        shape: ReadShape,
        compute_checksums: Callable[[], NDArray[np.uint64]] | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.landed: asyncio.Future[None] = loop.create_future()
        self.settled: asyncio.Future[None] = loop.create_future()
        self._compute_checksums = compute_checksums
        self.checksums: asyncio.Future[NDArray[np.uint64]] | None = None
        if compute_checksums is not None:
            self.checksums = loop.create_future()
        self._exchange = exchange
        self.attempt = attempt
        self._target = target
        self._shape = shape
        self._fate = _UNDECIDED
        self._context = copy_context()  # the reader's, for its clock
        self._moved_at: float | None = loop.time()  # None: now
        exchange.begin(self)

    @property
    def moved_at(self) -> float:
        if self._moved_at is None or self._exchange.makes_progress(self):
            return asyncio.get_running_loop().time()
        return self._moved_at

    def abandon(self) -> None:
        if self._exchange.dropped(self):
            self._fail(ReadFailed("the READ was abandoned"))
            self.settled.set_result(None)

    def post(self) -> int:
        """Start the READ's fate. Returns how many bytes the link has to move for it."""
        self._fate = fate = self._exchange.decide(self.attempt)
        self._note_time()
        if fate.stuck:
            self._exchange.hold_back(self)
            return 0
        if self._exchange.bytes_per_s is None:
            self.moved()
        return self.attempt.units * self._shape.unit_bytes

    def moved(self) -> None:
        """Record that the link has moved the bytes; the READ's own delay remains."""
        self._note_time()
        self._exchange.later(self._fate.delay_s, self.finish)
        if self._fate.early:
            self._exchange.later(self._fate.delay_s / 2, self._land_early)

    def _note_time(self) -> None:
        """Record progress by the clock of the reader, whose context may not be current."""
        if self._exchange.bytes_per_s is not None:
            self._moved_at = None
            loop = asyncio.get_running_loop()
            loop.call_soon(self._note, context=self._context)

    def _note(self) -> None:
        self._moved_at = asyncio.get_running_loop().time()

    def finish(self) -> None:
        """Land or fail; the READ is settled either way."""
        attempt, fate = self.attempt, self._fate
        source = self._exchange.pool(fate.stale or attempt.granter)
        if fate.failed or source is None:
            self._fail(ReadFailed(f"the READ from worker {attempt.granter.hex()[:8]} failed"))
        else:
            self._exchange.landing(attempt)
            self._land(source)
            self.landed.set_result(None)
            if self.checksums is not None:  # simulates the thread's time
                loop = asyncio.get_running_loop()
                loop.call_later(self._exchange.checksum_s, self._sum, context=self._context)
        self.settled.set_result(None)

    def _fail(self, failure: ReadFailed) -> None:
        for future in (self.landed, self.checksums):
            if future is not None:
                future.set_exception(failure)
                future.exception()  # it may have no waiter

    def _land(self, source: NDArray[np.uint8]) -> None:
        fate, attempt, size = self._fate, self.attempt, self._shape.unit_bytes
        remote = np.array(attempt.remote).reshape(attempt.units, -1)
        if fate.wrong is not None:
            remote[fate.wrong] += 1
        taken = source.take(remote.ravel(), axis=0, mode="wrap").reshape(attempt.units, -1)
        if (lacking := size - taken.shape[1]) > 0:  # a stale pool has smaller blocks
            taken = np.pad(taken, ((0, 0), (0, lacking)))
        brought = taken[:, :size]  # [units, bytes], what landed
        if fate.short is not None:
            kept = self._target[self._own(attempt.units)[fate.short]].ravel()
            brought[fate.short, size // 2 :] = kept[size // 2 : size]
        if fate.corrupt is not None:
            byte, bit = divmod(fate.bit, 8)
            brought[fate.corrupt, byte] ^= 1 << bit
        self._put(brought)

    def _own(self, units: int) -> NDArray[np.int64]:
        """Return the own blocks of the first units, [units, parts]."""
        parts = self.attempt.parts[1]
        return np.array(self.attempt.local[: units * parts], dtype=np.int64).reshape(units, parts)

    def _put(self, brought: NDArray[np.uint8]) -> None:
        """Write units, [units, bytes], into their own blocks, from the READ's first unit on."""
        width = self._target.shape[1]
        for part, blocks in enumerate(self._own(len(brought)).T):
            piece = brought[:, part * width : (part + 1) * width]
            self._target[blocks, : piece.shape[1]] = piece

    def _land_early(self) -> None:
        if self.settled.done():
            return  # without a delay, both are due now
        attempt, count = self.attempt, self._fate.early
        source = self._exchange.pool(attempt.granter)
        if source is not None:
            remote = list(attempt.remote[: count * attempt.parts[0]])
            self._put(source[remote].reshape(count, -1)[:, : self._shape.unit_bytes])

    def _sum(self) -> None:
        if self.checksums is not None and self._compute_checksums is not None:
            self.checksums.set_result(self._compute_checksums())


class MemoryMover:
    """Implements `mover.Mover` between the pools of one `MemoryExchange`."""

    kind = KIND

    def __init__(self, pool: HostPool, boot_id: bytes, exchange: MemoryExchange) -> None:
        self.slabs = pool.slabs
        self.block_bytes, self.bridges_sizes = pool.block_bytes, pool.bridges_sizes
        self.holds = 0  # leases that need progress
        self.failure: str | None = None  # set by a test: all READs fail
        self._pool = pool
        self._array = pool.array
        self._boot_id = boot_id
        self._exchange = exchange
        self._peers: dict[bytes, PeerPool] = {}
        self._monitor = ChecksumMonitor()
        self._stuck: asyncio.Future[None] | None = None  # the checksum thread, while stuck
        exchange.join(boot_id, pool.array)

    def describe(self) -> PeerPool:
        blocks, block_bytes = self._array.shape
        return PeerPool(
            boot_id=self._boot_id,
            mover=KIND,
            metadata=b"",
            base_address=0,
            block_bytes=block_bytes,
            num_blocks=blocks,
        )

    async def connect(self, peer: PeerPool) -> None:
        if self._exchange.pool(peer.boot_id) is None:
            raise ReadFailed(f"no worker {peer.boot_id.hex()[:8]} in this process")
        self._peers[peer.boot_id] = peer

    def peer(self, boot_id: bytes) -> PeerPool:
        found = self._peers.get(boot_id)
        if found is None:
            raise ReadFailed(f"worker {boot_id.hex()[:8]} is not connected")
        return found

    def shape(self, boot_id: bytes) -> ReadShape:
        return self.peer(boot_id).shape(self.block_bytes)

    def forget(self, boot_id: bytes) -> None:
        self._peers.pop(boot_id, None)

    def read(
        self,
        boot_id: bytes,
        remote: Sequence[int],
        local: Sequence[int],
        seeds: Sequence[int] | None = None,
    ) -> MemoryRead:
        shape = self.shape(boot_id)
        parts = shape.granter_parts, shape.reader_parts
        if len(remote) * parts[1] != len(local) * parts[0]:
            raise ReadFailed(f"{len(remote)} blocks do not fit into {len(local)}")
        self._exchange.reads += 1
        ratio = self.peer(boot_id).ratio
        cells = self._array.reshape(-1, self.block_bytes // ratio.joined)
        number, where = self._exchange.reads, (tuple(remote), tuple(local))
        summed, joined = seeds is not None, ratio.joined
        attempt = Attempt(number, self._boot_id, boot_id, *where, summed, parts, joined)
        sums = None if seeds is None else partial(landed_checksums, self._pool, local, seeds, ratio)
        return MemoryRead(self._exchange, attempt, cells, shape, sums)

    async def checksums(self, blocks: Sequence[int], seeds: Sequence[int]) -> NDArray[np.uint64]:
        return await self.compute(partial(self._pool.checksums, blocks, seeds))

    async def compute(self, call: Callable[[], T]) -> T:
        stuck = self._stuck
        if stuck is not None:
            await self._wait_for_thread(stuck)
        await asyncio.sleep(self._exchange.checksum_s)  # simulates the thread's time
        return call()

    async def put_in_order(
        self, boot_id: bytes, blocks: Sequence[int], filled: Sequence[int]
    ) -> None:
        ratio = self.peer(boot_id).ratio
        await self.compute(partial(self._pool.put_in_order, blocks, filled, ratio))

    async def _wait_for_thread(self, stuck: asyncio.Future[None]) -> None:
        """Wait for the stuck thread, even if the caller leaves earlier."""
        call, now_s = object(), asyncio.get_running_loop().time
        self._monitor.begin(call, now_s())
        stuck.add_done_callback(lambda _: self._monitor.end(call, now_s()))
        await waits.done_within(stuck)

    def stick_checksums(self) -> None:
        """Block the checksum thread until `release_checksums`."""
        if self._stuck is None:
            self._stuck = asyncio.get_running_loop().create_future()

    def release_checksums(self) -> None:
        if self._stuck is not None:
            self._stuck.set_result(None)
            self._stuck = None

    def failure_reason(self) -> str | None:
        return self.failure or self._monitor.failure_reason(asyncio.get_running_loop().time())

    def oldest_checksum_s(self) -> float:
        return self._monitor.oldest_s(asyncio.get_running_loop().time())

    def hold_progress(self) -> None:
        self.holds += 1

    def drop_progress(self) -> None:
        self.holds -= 1

    async def close(self) -> None:
        self._exchange.leave(self._boot_id)


def _later(delay_s: float, callback: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(delay_s, callback)
