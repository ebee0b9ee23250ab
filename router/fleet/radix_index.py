"""The radix index: which worker holds which blocks, by the workers' block events.

A block's identity names its whole prefix, so the radix tree needs no nodes: following an edge
is one lookup of an identity, whose result is the set of workers as a bit mask.

    identity of block 0 ─▶ 0b0111      match [0, 1, 2]: worker bits 0, 1, 2 hold one block,
    identity of block 1 ─▶ 0b0101      bits 0 and 2 hold two, bit 2 holds three
    identity of block 2 ─▶ 0b0100

The index is a hint: workers match their own caches again. Beyond its capacity it evicts the blocks
that were matched or stored longest ago, of a prefix the last block first, since blocks behind a
missing one match nothing. Pure: no I/O, no clock. When a worker's blocks are void, its bit leaves
`live` at once; the bit is removed from the entries in small parts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from baton.proto import worker_pb2
from baton.router.fleet.worker_view import WorkerView
from baton.runtime import metrics
from baton.runtime.identity import IDENTITY_BYTES

CAPACITY_BLOCKS = 4 << 20  # some 200 bytes each
SLICE_BYTES = 4096 * IDENTITY_BYTES  # of a snapshot in one slice: two milliseconds
SWEEP_BLOCKS = 20_000  # in one call of `sweep`: a few milliseconds


@dataclass(slots=True)
class _Watched:
    boot_id: bytes
    mask: int
    sequence: int
    complete: bool = False  # the snapshot has ended


@dataclass(frozen=True, slots=True)
class Holders:
    """The workers that hold leading blocks of a prompt: `groups` of bits, each with its number of
    blocks, the largest first. Valid until the index changes."""

    groups: Sequence[tuple[int, int]] = ()

    def sets(self) -> Iterator[tuple[int, bool, int]]:
        """Yield all workers by the blocks that they hold: (bits, false, blocks) for each group,
        then (all bits, true, 0) for all other workers."""
        holders = 0
        for bits, blocks in self.groups:
            holders |= bits
            yield bits, False, blocks
        yield holders, True, 0

    def blocks(self, worker: WorkerView) -> int:
        return next((blocks for bits, blocks in self.groups if bits & worker.bit), 0)


class RadixIndex:
    """An index of the workers that hold each block, made from block events. Once it is half full,
    `_holders` is ordered by last use; before that no block is evicted soon, and a lookup costs less
    without the order."""

    def __init__(
        self,
        capacity_blocks: int = CAPACITY_BLOCKS,
        changed: Callable[[str], None] = lambda worker_id: None,
    ) -> None:
        self._changed = changed
        self.capacity_blocks = capacity_blocks
        self._holders: OrderedDict[bytes, int] = OrderedDict()
        self._watched: dict[str, _Watched] = {}
        self._names: dict[int, str] = {}  # of the watched workers, by their bits
        self._live = 0
        self._retired = 0  # bits that are still in some entries
        self._sweeping: list[bytes] = []
        self._swept_mask = 0

    def __len__(self) -> int:
        return len(self._holders)

    def apply(self, worker_id: str, events: worker_pb2.BlockEvents) -> bool:
        """Apply one message of a worker's stream. After a gap or another boot id return False: the
        worker's blocks are dropped, and a new stream is needed."""
        watched = self._watched.get(worker_id)
        if events.snapshot:
            if watched is None or watched.complete or watched.boot_id != events.boot_id:
                self.remove(worker_id)
                watched = _Watched(events.boot_id, self._free_bit(), events.sequence)
                self._watch(worker_id, watched)
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
        self._change(watched.mask, events.stored, events.removed)
        return True

    def add(self, worker_id: str) -> None:
        """Watch a worker without blocks, whose changes come by `record` and not by a stream."""
        self._watch(worker_id, _Watched(b"", self._free_bit(), 0, complete=True))

    def record(self, worker_id: str, stored: bytes, removed: bytes) -> None:
        """Apply changes of an added worker's blocks: identities, joined. The capacity simulator
        does so."""
        self._change(self._watched[worker_id].mask, stored, removed)

    def complete(self, worker_id: str) -> bool:
        """Return whether the worker's snapshot is complete."""
        watched = self._watched.get(worker_id)
        return watched is not None and watched.complete

    def remove(self, worker_id: str) -> None:
        """Drop all blocks of a worker: none of them matches from now on."""
        watched = self._watched.pop(worker_id, None)
        if watched is not None:
            self._live &= ~watched.mask
            del self._names[watched.mask]
            self._changed(worker_id)
            self._retired |= watched.mask

    def match(self, identities: Sequence[bytes]) -> dict[str, int]:
        """Return how many leading blocks each worker holds, without workers that hold none."""
        groups = self.holders(identities).groups
        return {self._names[bit]: blocks for bits, blocks in groups for bit in _single(bits)}

    def workers_with(self, identity: bytes) -> list[str]:
        """Return the workers that hold this block. It does not count as a use of the block."""
        bits = self._holders.get(identity, 0) & self._live
        return sorted(self._names[bit] for bit in _single(bits))

    def bit(self, worker_id: str) -> int:
        """Return the worker's bit, 0 if it has none. `changed` is called when the bit changes."""
        watched = self._watched.get(worker_id)
        return 0 if watched is None else watched.mask

    def holders(self, identities: Sequence[bytes]) -> Holders:
        """Return the workers that hold leading blocks."""
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
        """Remove retired bits from up to `blocks` entries. To be called regularly; a bit that is
        in no entry any more is used again."""
        metrics.INDEX_BLOCKS.set(len(self._holders))
        if not self._sweeping:
            if not self._retired:
                return
            self._sweeping = list(dict.keys(self._holders))  # unordered: ten times as fast
            self._swept_mask = self._retired
        part = self._sweeping[-blocks:]
        del self._sweeping[-blocks:]
        for identity in part:
            self._clear(identity, self._swept_mask)
        if not self._sweeping:
            self._retired &= ~self._swept_mask
            self._swept_mask = 0

    def _free_bit(self) -> int:
        """Return the lowest bit that no entry has."""
        taken = self._live | self._retired
        return ~taken & (taken + 1)

    def _watch(self, worker_id: str, watched: _Watched) -> None:
        self._live |= watched.mask
        self._names[watched.mask] = worker_id
        self._changed(worker_id)
        self._watched[worker_id] = watched

    def _change(self, mask: int, stored: bytes, removed: bytes) -> None:
        self._drop(mask, removed)
        if stored:
            self._store(mask, stored)

    @property
    def _ordered(self) -> bool:
        return 2 * len(self._holders) > self.capacity_blocks

    def _store(self, mask: int, joined: bytes) -> None:
        holders, ordered = self._holders, self._ordered
        count = len(joined) // IDENTITY_BYTES
        for end in range(count * IDENTITY_BYTES, 0, -IDENTITY_BYTES):
            identity = joined[end - IDENTITY_BYTES : end]
            holders[identity] = holders.get(identity, 0) | mask
            if ordered:
                holders.move_to_end(identity)
        surplus = len(holders) - self.capacity_blocks
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
    """Split a part of a snapshot into parts of up to SLICE_BYTES; return other events unchanged."""
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
