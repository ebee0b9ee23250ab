"""The `Mover` interface: one-sided READs from peers' pools into the own pool.

A mover knows one local pool, and its peers' pools by boot id. It never writes into a peer's memory
(invariant I1). It knows no leases: the reader decides whether to trust the bytes. Every mover
computes checksums of its own pool in one thread, and a `ChecksumMonitor` reports if that is stuck.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.block_sizes import ALIKE, BlockRatio
from baton.kv_transfer.layout import heads_of
from baton.kv_transfer.local_pool import RankPool
from baton.kv_transfer.read_shape import ReadShape, ranks_shape, read_shape
from baton.runtime.errors import ReadFailed

T = TypeVar("T")

STUCK_S = 2.0  # a call checksums 64 MiB at most, in about 50 ms, or converts 8 MiB in 65 ms


@dataclass(frozen=True, slots=True)
class PeerPool:
    """A peer's pool, from the peer's handshake. `memory` and `device_id` are NIXL's memory type and
    the peer's device number; they may differ from the own ones. `versions` are those of the
    mover's libraries, which must be equal. `kv_dtype` and `block_size` are those of a peer that
    stores KV in another way, else None and 0; `unit_bytes` is then what an offered index names
    (see read_shape.py), else 0: a block. `rank_pools` are those of its ranks, if each has one for
    its part of the `kv_heads`; `block_bytes` is then their sum. `ratio`: of its block size and the
    own one."""

    boot_id: bytes
    mover: str
    metadata: bytes
    base_address: int
    block_bytes: int
    num_blocks: int
    device_id: int = 0
    memory: str = "DRAM"
    versions: Mapping[str, str] = field(default_factory=dict)
    kv_dtype: str | None = None
    block_size: int = 0
    unit_bytes: int = 0
    ratio: BlockRatio = ALIKE
    rank_pools: tuple[RankPool, ...] = ()
    kv_heads: int = 1

    def shape(self, own_block_bytes: int, own_ranks: int = 0) -> ReadShape:
        """Return the shape of READs into own blocks, or into their cells (see block_sizes.py).
        `own_ranks`: how many ranks have pools of their own, 0: none. Raises ReadFailed if the
        blocks differ in size although their KV is stored alike."""
        if self.rank_pools or own_ranks:
            return self._ranks_shape(own_block_bytes, max(1, own_ranks))
        if not self.unit_bytes and self.block_bytes != own_block_bytes:
            raise ReadFailed(
                f"the peer's blocks of {self.block_bytes} bytes differ from the own "
                f"{own_block_bytes}"
            )
        cell_bytes = own_block_bytes // self.ratio.joined
        return read_shape(self.unit_bytes or cell_bytes, self.block_bytes, cell_bytes)

    def _ranks_shape(self, own_block_bytes: int, own_ranks: int) -> ReadShape:
        ranks = max(1, len(self.rank_pools))
        each = self.rank_pools[0].block_bytes if self.rank_pools else self.block_bytes
        try:
            slab_bytes, rest = divmod(each, len(heads_of(self.kv_heads, ranks, 0)))
            shape = ranks_shape(self.kv_heads, slab_bytes, ranks, own_ranks)
        except ValueError as error:
            raise ReadFailed(f"the peer's ranks and the own do not fit: {error}") from error
        if rest or shape.unit_bytes != own_block_bytes or self.unit_bytes:
            raise ReadFailed(
                f"the peer's {ranks} pools with blocks of {each} bytes do not fit the own blocks "
                f"of {own_block_bytes} bytes on {own_ranks} ranks"
            )
        return shape


class Read(Protocol):
    """One READ in flight.

    `landed` completes when every byte is in place, or fails with ReadFailed. `settled` completes
    when no byte of this READ can land any more, whether it landed or failed. Until then its
    destination blocks must not be used for anything else (quarantine). A READ that landed has
    settled. `checksums`, if the READ has seeds, yields the checksums of the bytes that landed,
    [blocks, slabs], computed while they are in the cache; it fails if `landed` fails. Callers must
    not cancel these futures. `moved_at` (the event loop's clock) is the time of the last progress:
    the READ was created, bytes of it were posted or landed, or, before any is posted, earlier READs
    made progress.
    """

    landed: asyncio.Future[None]
    settled: asyncio.Future[None]
    checksums: asyncio.Future[NDArray[np.uint64]] | None

    @property
    def moved_at(self) -> float: ...

    def abandon(self) -> None:
        """Post nothing more of this READ. If nothing is in flight, the READ has failed and settled
        when this returns; else it settles with the bytes in flight."""
        ...


class Mover(Protocol):
    kind: str  # "nixl" or "memory"
    slabs: int  # KV head slabs of a local block: columns of `checksums`
    block_bytes: int  # of the local pool
    bridges_sizes: bool  # blocks of another size can be read into the local pool

    def describe(self) -> PeerPool:
        """Describe the local pool, with the local boot id, for a peer's `connect`."""
        ...

    async def connect(self, peer: PeerPool) -> None:
        """Make the peer's pool readable. Idempotent per boot id. Raises ReadFailed."""
        ...

    def peer(self, boot_id: bytes) -> PeerPool:
        """Return a connected peer's pool. Raises ReadFailed if it is not connected."""
        ...

    def shape(self, boot_id: bytes) -> ReadShape:
        """Return the shape of READs from a connected peer. Raises ReadFailed."""
        ...

    def forget(self, boot_id: bytes) -> None:
        """Drop everything cached about a dead peer."""
        ...

    def read(
        self,
        boot_id: bytes,
        remote: Sequence[int],
        local: Sequence[int],
        seeds: Sequence[int] | None = None,
    ) -> Read:
        """Start reading the peer's blocks `remote` into the own blocks `local`, unit by unit: each
        has the parts of one unit after another (`shape`), which is a block where both ends are
        alike. Where the peer's blocks have another size, `local` are cells (block_sizes.py). With
        `seeds`, one for each unit, checksum them when they have landed. Never blocks the event
        loop."""
        ...

    async def put_in_order(
        self, boot_id: bytes, blocks: Sequence[int], filled: Sequence[int]
    ) -> None:
        """Put what READs from a peer with another block size have brought into the own order, off
        the event loop: see `LocalPool.put_in_order`. It does not end before no more is written."""
        ...

    async def checksums(self, blocks: Sequence[int], seeds: Sequence[int]) -> NDArray[np.uint64]:
        """Return the checksums of own blocks, [blocks, slabs], computed off the event loop."""
        ...

    async def compute(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, run in the thread of the checksums: it is short, and needs
        no event loop."""
        ...

    def failure_reason(self) -> str | None:
        """Return why no block can be read or checksummed any more; None while it can."""
        ...

    def oldest_checksum_s(self) -> float:
        """Return the age of the oldest pending call of `checksums`; 0: none is pending."""
        ...

    def hold_progress(self) -> None:
        """Serve peers' READs promptly until `drop_progress`, while a lease exists. Calls are
        counted."""
        ...

    def drop_progress(self) -> None: ...

    async def close(self) -> None: ...


class ChecksumMonitor:
    """The age of a granter's checksum calls, and whether their thread is stuck. The mover reports
    the begin and the end of each call in the thread, since a caller that stops waiting does not
    free a stuck thread. Pure: time is passed in."""

    def __init__(self) -> None:
        self._pending: dict[object, float] = {}  # the oldest first
        self._ended_s = 0.0

    def begin(self, call: object, now_s: float) -> None:
        self._pending[call] = now_s

    def end(self, call: object, now_s: float) -> None:
        self._pending.pop(call, None)
        self._ended_s = now_s

    def oldest_s(self, now_s: float) -> float:
        """Return the age of the oldest pending call; 0: none is pending."""
        return max(0.0, now_s - next(iter(self._pending.values()), now_s))

    def failure_reason(self, now_s: float) -> str | None:
        """Return why no checksum can be computed any more; None while calls end."""
        if not self._pending:
            return None
        stuck_s = min(self.oldest_s(now_s), now_s - self._ended_s)
        if stuck_s < STUCK_S:
            return None
        return f"the checksum thread has ended no call for {stuck_s:.1f} s"
