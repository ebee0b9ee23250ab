"""The bookkeeping of KV blocks: holds, the prefix cache, and eviction.

Pure: no tensors, no clock, no I/O. The worker's loop owns it. A block is held any number of
times, each time for one reason; with no hold left it is cached (it has an identity) or free.

                    allocate                    release, no identity
        free ─────────────────────▶ held ─────────────────────────────▶ free
          ▲                          ▲ │
          │ evicted, oldest first    │ │ release, identified
          └────────── cached ◀───────┼─┘
                         └───────────┘ match

    Hold.USED         a sequence computes or decodes with it
    Hold.LEASED       the destination of an open handoff (reader)
    Hold.PINNED       offered to a reader under a lease (granter)
    Hold.QUARANTINED  an abandoned READ may still write to it
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from baton.engine.scheduling.tenant_shares import TenantShares
from baton.runtime.errors import OutOfBlocks


class Hold(IntEnum):
    """Why a block may not be reused. Where several apply, the audit counts the largest."""

    USED = 0
    LEASED = 1
    PINNED = 2
    QUARANTINED = 3


_USED, _LEASED, _PINNED, _QUARANTINED = map(int, Hold)
_UNHELD = [0] * len(Hold)


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Blocks by state; each is in exactly one, so the sum is `total`."""

    total: int
    free: int
    cached: int
    used: int
    leased: int
    pinned: int
    quarantined: int

    @property
    def available(self) -> int:
        """Blocks that an allocation could take now."""
        return self.free + self.cached

    def by_state(self) -> dict[str, int]:
        """Return the counts by name (`asdict` copies deeply and is ten times slower)."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class _Block:
    holds: list[int]  # count per Hold
    hold: int = -1  # the largest of them, or -1
    identity: bytes | None = None
    tokens: bytes = b""


class BlockPool:
    """Reference counts, prefix cache with LRU eviction, and the events they cause."""

    def __init__(self, total: int, block_size: int, tenant_share: float = 1.0) -> None:
        """`tenant_share`: fraction of the pool above which a tenant's cached blocks are evicted
        before those of other tenants."""
        self.total = total
        self.block_size = block_size
        self._blocks = [_Block(_UNHELD.copy()) for _ in range(total)]
        self._by_hold = [0] * len(Hold)  # blocks by their largest hold
        self._free = list(range(total - 1, -1, -1))
        self._by_identity: dict[bytes, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached, oldest first
        self._shares = TenantShares(int(tenant_share * total)) if tenant_share < 1 else None
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    @property
    def available(self) -> int:
        """Blocks that an allocation could get now: free and cached."""
        return len(self._free) + len(self._evictable)

    @property
    def pinned(self) -> int:
        return self._by_hold[_PINNED]

    @property
    def quarantined(self) -> int:
        return self._by_hold[_QUARANTINED]

    def allocate(self, count: int, hold: Hold) -> list[int]:
        """Allocate `count` blocks with undefined content; evicts the least recently used.

        Raises OutOfBlocks and changes nothing if fewer are available.
        """
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks requested, {self.available} available")
        blocks, states, free, level = [], self._blocks, self._free, int(hold)
        for _ in range(count):
            if not free:
                self._evict()
            block = free.pop()
            state = states[block]
            state.holds[level] = 1
            state.hold = level
            blocks.append(block)
        self._by_hold[level] += count
        return blocks

    def held_prefix(self, identities: Sequence[bytes]) -> int:
        """Count the leading blocks of this chain that are in the pool, without a hold on them."""
        count = 0
        for identity in identities:
            if identity not in self._by_identity:
                break
            count += 1
        return count

    def match(
        self,
        identities: Sequence[bytes],
        tokens: Sequence[int],
        hold: Hold,
        limit: int,
        first: int = 0,
    ) -> list[int]:
        """Hold the longest run of blocks in the pool, from index `first` up to index `limit`.

        `tokens` of the sequence are compared with those of each block, so that a hash collision
        yields a miss and never a wrong block.
        """
        blocks: list[int] = []
        size = self.block_size
        for index, identity in enumerate(identities[first:limit], first):
            block = self._by_identity.get(identity)
            if block is None:
                break
            if self._blocks[block].tokens != _packed(tokens[index * size : (index + 1) * size]):
                break
            blocks.append(block)
        self.hold(blocks, hold)
        return blocks

    def hold(self, blocks: Iterable[int], hold: Hold) -> None:
        """Add a hold to blocks that are held or cached."""
        states, by_hold, shares, level = self._blocks, self._by_hold, self._shares, int(hold)
        for block in blocks:
            state = states[block]
            state.holds[level] += 1
            before = state.hold
            if before < level:
                state.hold = level
                by_hold[level] += 1
                if before >= 0:
                    by_hold[before] -= 1
                else:
                    self._evictable.pop(block, None)
            if shares is not None:
                shares.taken(block)

    def release(self, blocks: Sequence[int], hold: Hold) -> None:
        """Remove one hold from each block. The tail of a prefix becomes the oldest, so that
        eviction shortens a prefix from its end."""
        states, by_hold, level = self._blocks, self._by_hold, int(hold)
        for block in reversed(blocks):
            state = states[block]
            holds = state.holds
            if holds[level] <= 0:
                raise RuntimeError(f"block {block} has no hold {hold.name} to release")
            holds[level] -= 1
            if holds[level] or state.hold > level:
                continue  # the largest is as before
            state.hold = after = _largest(holds)
            by_hold[level] -= 1
            if after >= 0:
                by_hold[after] += 1
            elif state.identity is None:
                self._free.append(block)
            else:
                self._evictable[block] = None
                if self._shares is not None:
                    self._shares.cached(block)

    def convert(self, blocks: Sequence[int], old: Hold, new: Hold) -> None:
        """Replace the hold `old` by `new`."""
        self.hold(blocks, new)
        self.release(blocks, old)

    # -- what handoffs need of it (`kv_transfer.peers.block_store.BlockStore`) ------------------

    def lease(self, count: int) -> list[int]:
        """Allocate destinations of READs. Raises OutOfBlocks."""
        return self.allocate(count, Hold.LEASED)

    def end_lease(self, blocks: Sequence[int]) -> None:
        self.release(blocks, Hold.LEASED)

    def quarantine(self, blocks: Sequence[int]) -> None:
        """Set leased blocks aside into which an abandoned READ may still write."""
        self.convert(blocks, Hold.LEASED, Hold.QUARANTINED)

    def end_quarantine(self, blocks: Sequence[int]) -> None:
        self.release(blocks, Hold.QUARANTINED)

    def pin_cached(
        self, identities: Sequence[bytes], tokens: Sequence[int], first: int
    ) -> list[int]:
        """Pin the blocks that are in the pool, from index `first` to the first that is not."""
        return self.match(identities, tokens, Hold.PINNED, len(identities), first)

    def pin_targets(self, count: int) -> list[int]:
        """Allocate blocks that converted ones go into, pinned at once. Raises OutOfBlocks."""
        return self.allocate(count, Hold.PINNED)

    def unpin(self, blocks: Sequence[int]) -> None:
        self.release(blocks, Hold.PINNED)

    def identify(
        self, block: int, identity: bytes, tokens: Sequence[int], tenant: bytes = b""
    ) -> None:
        """Publish a held, full block as the cache of a tenant's prefix; it is immutable from then.

        Does nothing if another block has this identity.
        """
        state = self._blocks[block]
        if identity in self._by_identity or state.identity is not None:
            return
        state.identity = identity
        state.tokens = _packed(tokens)
        self._by_identity[identity] = block
        self._removed.pop(identity, None)
        self._stored[identity] = None
        if self._shares is not None:
            self._shares.identified(block, tenant)

    def unpublish(self, blocks: Iterable[int]) -> None:
        """Remove these held blocks from the prefix cache because their content is invalid."""
        for block in blocks:
            if self._blocks[block].identity is not None:
                self._drop_identity(block)

    def identity_of(self, block: int) -> bytes | None:
        return self._blocks[block].identity

    def is_held(self, block: int, hold: Hold) -> bool:
        return self._blocks[block].holds[hold] > 0

    def writable(self, block: int) -> bool:
        """Return whether exactly one sequence holds the block and its content is unpublished."""
        state = self._blocks[block]
        return state.identity is None and state.holds == [1, 0, 0, 0]

    def identities(self) -> list[bytes]:
        """Return all published identities, for a snapshot."""
        return list(self._by_identity)

    def drain_events(self) -> tuple[list[bytes], list[bytes]]:
        """Return identities stored and removed since the last call, each by its last change."""
        stored, removed = list(self._stored), list(self._removed)
        self._stored, self._removed = {}, {}
        return stored, removed

    def counts(self) -> PoolCounts:
        used, leased, pinned, quarantined = self._by_hold
        free, cached = len(self._free), len(self._evictable)
        return PoolCounts(self.total, free, cached, used, leased, pinned, quarantined)

    def check(self) -> None:
        """Raise RuntimeError on inconsistent bookkeeping. O(blocks): for audits and tests."""
        free, evictable, by_hold = set(self._free), set(self._evictable), [0] * len(Hold)
        for number, state in enumerate(self._blocks):
            hold, cached, is_free = state.hold, number in evictable, number in free
            simply_free = is_free and hold < 0 and not cached and state.identity is None
            if simply_free and state.holds == _UNHELD:
                continue  # the common case
            if (hold >= 0) + cached + is_free != 1:
                states = (hold >= 0, cached, is_free)
                raise RuntimeError(f"block {number}: held, cached, free = {states}")
            if cached and state.identity is None:
                raise RuntimeError(f"block {number} is cached without an identity")
            if is_free and state.identity is not None:
                raise RuntimeError(f"block {number} is free with an identity")
            if hold >= 0:
                by_hold[hold] += 1
            if min(state.holds) < 0 or hold != _largest(state.holds):
                raise RuntimeError(f"block {number} has holds {state.holds}, the largest {hold}")
        if len(free) != len(self._free):
            raise RuntimeError("a block is twice in the free list")
        if by_hold != self._by_hold:
            raise RuntimeError(f"blocks by hold are {by_hold}, counted {self._by_hold}")
        for identity, number in self._by_identity.items():
            if self._blocks[number].identity != identity:
                raise RuntimeError(f"identity of block {number} differs from the index")
        if self._shares is not None:
            self._shares.check(set(self._by_identity.values()), evictable)

    def _evict(self) -> None:
        block = None if self._shares is None else self._shares.victim()
        if block is None:
            block = next(iter(self._evictable))
        del self._evictable[block]
        self._drop_identity(block)
        self._free.append(block)

    def _drop_identity(self, block: int) -> None:
        state = self._blocks[block]
        assert state.identity is not None
        if self._shares is not None:
            self._shares.forgotten(block)
        del self._by_identity[state.identity]
        self._stored.pop(state.identity, None)
        self._removed[state.identity] = None
        state.identity, state.tokens = None, b""


def _largest(holds: Sequence[int]) -> int:
    """Return the largest hold, or -1."""
    used, leased, pinned, quarantined = holds
    if quarantined:
        return _QUARANTINED
    if pinned:
        return _PINNED
    if leased:
        return _LEASED
    return _USED if used else -1


def _packed(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()
