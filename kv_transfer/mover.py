"""The `Mover` seam: bytes between two pools, by one-sided READ into the caller's own pool.

A mover knows one local pool and its peers' pools by boot id. It never writes into a peer's
memory (invariant I1). It knows nothing about leases: the reader decides whether to trust the
bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PeerPool:
    """A peer's pool, as it describes itself in its handshake. `memory` and `device_id` are NIXL's
    names of where it lies, the device as the peer counts; it need not be what the own one is.
    `versions` are those of the mover's libraries, which have to be equal."""

    boot_id: bytes
    mover: str
    metadata: bytes
    base_address: int
    block_bytes: int
    num_blocks: int
    device_id: int = 0
    memory: str = "DRAM"
    versions: Mapping[str, str] = field(default_factory=dict)


class Read(Protocol):
    """One READ under way.

    `landed` completes when every byte is in place, or fails with ReadFailed. `settled`
    completes once no byte of this READ can land any more, whatever became of it: until then
    its destination blocks must not be used for anything else (quarantine). A READ that landed
    has settled. `sums`, if the READ was given seeds, brings the checksums of the bytes that
    landed, [blocks, slabs], taken while they are still in the cache; it fails as `landed` does.
    No future of these is to be cancelled. `moved_at` (the event loop's clock) is its last
    progress: it was made, bytes of it were posted or landed, or, while none of it is posted, the
    READs before it made progress.
    """

    landed: asyncio.Future[None]
    settled: asyncio.Future[None]
    sums: asyncio.Future[NDArray[np.uint64]] | None

    @property
    def moved_at(self) -> float: ...

    def abandon(self) -> None:
        """Post nothing more of this READ. If nothing is under way it has failed and settled when
        this returns, else the bytes under way settle it."""
        ...


class Mover(Protocol):
    kind: str  # "nixl" or "memory"
    slabs: int  # KV head slabs of a local block: columns of `checksums`

    def describe(self) -> PeerPool:
        """The local pool for a peer's `connect`; carries the local boot id."""
        ...

    async def connect(self, peer: PeerPool) -> None:
        """Make the peer's pool readable. Idempotent per boot id. Raises ReadFailed."""
        ...

    def peer(self, boot_id: bytes) -> PeerPool:
        """A connected peer's pool. Raises ReadFailed if it is not connected."""
        ...

    def forget(self, boot_id: bytes) -> None:
        """Drop all that is cached about a peer that has died."""
        ...

    def read(
        self,
        boot_id: bytes,
        remote: Sequence[int],
        local: Sequence[int],
        seeds: Sequence[int] | None = None,
    ) -> Read:
        """Start reading the peer's blocks `remote` into the own blocks `local`, pairwise, and
        sum them with `seeds` once they are here. Never blocks the event loop."""
        ...

    async def checksums(self, blocks: Sequence[int], seeds: Sequence[int]) -> NDArray[np.uint64]:
        """Return the checksums of own blocks, [blocks, slabs], computed off the event loop."""
        ...

    def failure_reason(self) -> str | None:
        """Return why no block can be moved or summed any more; None while it can."""
        ...

    def oldest_checksum_s(self) -> float:
        """The age of the oldest pending call of `checksums`; 0 where none is pending."""
        ...

    def hold_progress(self) -> None:
        """Serve peers' READs promptly until `drop_progress`, as while a lease exists. Counted."""
        ...

    def drop_progress(self) -> None: ...

    async def close(self) -> None: ...
