"""The radix index: which worker holds which blocks, as far as the router has heard.

A block's identity names its whole prefix, so the radix tree needs no nodes: following an edge
is one lookup of an identity, and its answer is the set of workers as a bit mask.

    identity of block 0 ─▶ 0b0111      match [0, 1, 2]: worker bits 0, 1, 2 hold one block,
    identity of block 1 ─▶ 0b0101      bits 0 and 2 hold two, bit 2 holds three
    identity of block 2 ─▶ 0b0100

A hint, never a promise: workers match their own caches again. Beyond its capacity the index
forgets the blocks that were matched or stored longest ago, of a prefix the last block first: what
follows a block that is missing matches nothing. Pure: no I/O, no clock. A worker's bit leaves
`live` at once when its knowledge is void; its old bits are swept out in small parts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from baton.proto import worker_pb2
from baton.router.fleet.worker_view import WorkerView
from baton.runtime import metrics
from baton.runtime.config import RouterConfig
from baton.runtime.identity import IDENTITY_BYTES

CAPACITY_BLOCKS = RouterConfig().index_blocks  # some 200 bytes each
SLICE_BYTES = 4096 * IDENTITY_BYTES  # of a snapshot at once: two milliseconds
SWEEP_BLOCKS = 20_000  # looked at by one call of `sweep`: a few milliseconds


@dataclass(slots=True)
class _Watched:
    boot_id: bytes
    mask: int
    sequence: int
    complete: bool = False  # the snapshot has ended


@dataclass(frozen=True, slots=True)
class Holders:
    """Which workers hold how many leading blocks of a prompt: `groups` of bits, each with its
    blocks, the most first. To be used before the index changes."""

    groups: Sequence[tuple[int, int]] = ()

    def sets(self) -> Iterator[tuple[int, bool, int]]:
        """All workers by what they hold: bits, whether all others are meant, and blocks."""
        holders = 0
        for bits, blocks in self.groups:
            holders |= bits
            yield bits, False, blocks
        yield holders, True, 0

    def blocks(self, worker: WorkerView) -> int:
        return next((blocks for bits, blocks in self.groups if bits & worker.bit), 0)


class RadixIndex:
    """Block events in, held prefix lengths out. The order of `_holders` is that of their last use,
    once the index is half full: before, none is evicted soon, and a lookup costs less."""

    def __init__(
        self,
        capacity_blocks: int = CAPACITY_BLOCKS,
        changed: Callable[[str], None] = lambda worker_id: None,
    ) -> None:
        self._changed = changed
        self._capacity = capacity_blocks
        self._holders: OrderedDict[bytes, int] = OrderedDict()
        self._watched: dict[str, _Watched] = {}
        self._names: dict[int, str] = {}  # by the bit, of those that are watched
        self._live = 0
        self._retired = 0  # bits whose entries are not swept yet
        self._sweeping: list[bytes] = []
        self._swept_mask = 0

    def __len__(self) -> int:
        return len(self._holders)

    def apply(self, worker_id: str, events: worker_pb2.BlockEvents) -> bool:
        """Take one message of a worker's stream. False: a gap or another boot id was seen,
        everything known of the worker is dropped, and its blocks must be watched anew."""
        watched = self._watched.get(worker_id)
        if events.snapshot:
            if watched is None or watched.complete or watched.boot_id != events.boot_id:
                self.remove(worker_id)
                watched = self._watch(worker_id, events)
        elif (
            watched is None
            or not watched.complete
            or watched.boot_id != events.boot_id
            or events.sequence != watched.sequence + 1
        ):
            self.remove(worker_id)
            return False
        watched.sequence = events.sequence
        watched.complete = watched.complete or events.snapshot_end
        self._drop(watched.mask, events.removed)
        if events.stored:
            self._store(watched.mask, events.stored)
        return True

    def complete(self, worker_id: str) -> bool:
        """Whether all that the worker holds has been told, up to deltas under way."""
        watched = self._watched.get(worker_id)
        return watched is not None and watched.complete

    def remove(self, worker_id: str) -> None:
        """Forget all that is known of a worker; nothing of it matches from now on."""
        watched = self._watched.pop(worker_id, None)
        if watched is not None:
            self._live &= ~watched.mask
            del self._names[watched.mask]
            self._changed(worker_id)
            self._retired |= watched.mask

    def match(self, identities: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks each worker holds; workers that hold none are left out."""
        groups = self.holders(identities).groups
        return {self._names[bit]: blocks for bits, blocks in groups for bit in _single(bits)}

    def bit(self, worker_id: str) -> int:
        """Return the worker's bit, 0 where nothing is known of it. `changed` hears of another."""
        watched = self._watched.get(worker_id)
        return 0 if watched is None else watched.mask

    def holders(self, identities: Sequence[bytes]) -> Holders:
        """Return who holds leading blocks."""
        holders = self._holders
        alive = self._live
        groups: list[tuple[int, int]] = []
        held = 0
        for identity in identities:
            still = holders.get(identity, 0) & alive
            if still != alive:
                if held:
                    groups.append((alive & ~still, held))
                alive = still
                if not alive:
                    break
            held += 1
        if alive and held:
            groups.append((alive, held))
        if self._ordered:
            for identity in reversed(identities[:held]):
                holders.move_to_end(identity)
        return Holders(groups[::-1])

    def sweep(self, blocks: int = SWEEP_BLOCKS) -> None:
        """Remove entries of retired bits, looking at no more than `blocks` of them. To be
        called now and then; bits whose sweep is over are used again."""
        metrics.INDEX_BLOCKS.set(len(self._holders))
        if not self._sweeping:
            if not self._retired:
                return
            self._sweeping = list(dict.keys(self._holders))  # in no order: ten times as fast
            self._swept_mask = self._retired
        part = self._sweeping[-blocks:]
        del self._sweeping[-blocks:]
        for identity in part:
            self._clear(identity, self._swept_mask)
        if not self._sweeping:
            self._retired &= ~self._swept_mask
            self._swept_mask = 0

    def _watch(self, worker_id: str, events: worker_pb2.BlockEvents) -> _Watched:
        taken = self._live | self._retired
        mask = ~taken & (taken + 1)  # the lowest free bit
        self._live |= mask
        self._names[mask] = worker_id
        self._changed(worker_id)
        watched = self._watched[worker_id] = _Watched(events.boot_id, mask, events.sequence)
        return watched

    @property
    def _ordered(self) -> bool:
        return 2 * len(self._holders) > self._capacity

    def _store(self, mask: int, joined: bytes) -> None:
        holders, ordered = self._holders, self._ordered
        count = len(joined) // IDENTITY_BYTES
        for end in range(count * IDENTITY_BYTES, 0, -IDENTITY_BYTES):
            identity = joined[end - IDENTITY_BYTES : end]
            holders[identity] = holders.get(identity, 0) | mask
            if ordered:
                holders.move_to_end(identity)
        surplus = len(holders) - self._capacity
        for _ in range(surplus):
            holders.popitem(last=False)
        metrics.INDEX_EVICTIONS.inc(max(0, surplus))

    def _drop(self, mask: int, joined: bytes) -> None:
        for start in range(0, len(joined) - IDENTITY_BYTES + 1, IDENTITY_BYTES):
            self._clear(joined[start : start + IDENTITY_BYTES], mask)

    def _clear(self, identity: bytes, mask: int) -> None:
        known = self._holders.get(identity)
        if known is None:
            return
        if known & ~mask:
            self._holders[identity] = known & ~mask
        else:
            del self._holders[identity]


def _single(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest
        bits ^= lowest


def snapshot_slices(events: worker_pb2.BlockEvents) -> list[worker_pb2.BlockEvents]:
    """A part of a snapshot as parts of up to SLICE_BYTES; other events as they are."""
    if not events.snapshot or len(events.stored) <= SLICE_BYTES:
        return [events]
    return [
        worker_pb2.BlockEvents(
            boot_id=events.boot_id,
            sequence=events.sequence,
            snapshot=True,
            snapshot_end=events.snapshot_end and start + SLICE_BYTES >= len(events.stored),
            stored=events.stored[start : start + SLICE_BYTES],
        )
        for start in range(0, len(events.stored), SLICE_BYTES)
    ]
