"""READs divided into segments, which the threads of a mover share: a free thread takes the next.

If the host copies READs, no thread is then idle while another has segments, and the blocks of a
segment are checksummed while they are in a core's cache. The module posts nothing and knows no
NIXL. `segment_queue` has the queued segments; this module counts the ended segments of a READ,
under the READ's own lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.local_pool import DRAM, LocalPool
from baton.runtime.errors import ReadFailed

SEGMENT_BYTES = 4 << 20  # fits into a core's caches
DEVICE_BYTES = 96 << 20  # a READ of a GPU worker's default size

# Both are called in the thread that polled the end of a segment.
Landed = Callable[[int, int], None]  # first and end of a range of a READ's units
Ended = Callable[[ReadFailed | None], None]


class SegmentedRead:
    """A READ from the peer `boot_id`. `landed` is called for each segment when it lands, `ended`
    once, when no byte can land any more, with the first failure or None. The queue owns
    `under_way` (posted segments) and `moved_at` (monotonic)."""

    def __init__(self, boot_id: bytes, segments: int, landed: Landed | None, ended: Ended) -> None:
        self.boot_id = boot_id
        self.landed = landed
        self.failure: ReadFailed | None = None
        self.under_way = 0
        self.moved_at = time.monotonic()
        self._ended = ended
        self._segments = segments  # not yet ended
        self._counting = threading.Lock()

    def segments_ended(self, segments: int, failure: ReadFailed | None) -> None:
        """Count segments that landed, failed, or will never be posted; call `ended` after the
        last."""
        if self.count_ended(segments, failure):
            self._ended(self.failure)

    def count_ended(self, segments: int, failure: ReadFailed | None) -> bool:
        """Same as `segments_ended`, without calling `ended`. Returns whether all have ended."""
        with self._counting:
            self._segments -= segments
            self.failure = self.failure or failure
            return segments > 0 and self._segments == 0


@dataclass(frozen=True, slots=True)
class ReadSegment:
    """Units `first` to `end` of a READ: the peer's blocks, and their own destinations."""

    read: SegmentedRead
    first: int
    end: int
    remote: NDArray[np.int32]
    local: NDArray[np.int32]


def units_each(pool: LocalPool, unit_bytes: int) -> int:
    """Return the units per segment of a READ into this pool. A READ into a device's memory is not
    divided, since no core copies it."""
    return max(1, SEGMENT_BYTES // unit_bytes) if pool.memory == DRAM else pool.blocks


def blocks_enough(pool: LocalPool) -> int:
    """Return the number of blocks in flight from a peer above which an agent posts no further
    segment. Two segments keep a link busy, and land soon even on a slow link."""
    return max(1, (SEGMENT_BYTES if pool.memory == DRAM else DEVICE_BYTES) // pool.block_bytes)


def cut(
    boot_id: bytes,
    remote: Sequence[int],
    local: Sequence[int],
    step: int,
    landed: Landed | None,
    ended: Ended,
    *,
    parts: tuple[int, int] = (1, 1),
) -> list[ReadSegment]:
    """Divide a READ of at least one unit into segments of `step` units, in order. `parts`: blocks
    of a unit at the peer, and here."""
    theirs, ours = (np.asarray(blocks, dtype=np.int32) for blocks in (remote, local))
    units, (peers, own) = len(ours) // parts[1], parts
    firsts = range(0, units, step)
    read = SegmentedRead(boot_id, len(firsts), landed, ended)
    return [
        ReadSegment(
            read, first, end, theirs[first * peers : end * peers], ours[first * own : end * own]
        )
        for first in firsts
        for end in [min(units, first + step)]
    ]
