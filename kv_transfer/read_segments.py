"""READs in segments, which a mover's threads share: whichever is free takes the next.

Where a READ is a copy by the host, no thread then stands idle while another still has segments, and
what a segment brought is summed while a core's cache holds it. It posts nothing and knows no NIXL.
What waits is in segment_queue.py; the segments of a READ that have ended are counted here, under a
lock of the READ's own.
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

SEGMENT_BYTES = 4 << 20  # few enough that a core's caches still hold it when it has landed
DEVICE_BYTES = 64 << 20  # a READ of the default size

# both are called in the thread that saw a segment end
Landed = Callable[[int, int], None]  # of a READ's blocks, those from the first to the end
Ended = Callable[[ReadFailed | None], None]


class SegmentedRead:
    """A READ from the peer `boot_id`. `landed` is called for each segment as it lands, `ended`
    once, when no byte can land any more, with the first failure if there was one. `under_way`
    (segments that are posted) and `moved_at` (monotonic) are the queue's."""

    def __init__(self, boot_id: bytes, segments: int, landed: Landed | None, ended: Ended) -> None:
        self.boot_id = boot_id
        self.landed = landed
        self.failure: ReadFailed | None = None
        self.under_way = 0
        self.moved_at = time.monotonic()
        self._ended = ended
        self._segments = segments  # that have not ended
        self._counting = threading.Lock()

    def segments_ended(self, segments: int, failure: ReadFailed | None) -> None:
        """Count segments that landed, failed, or will never be posted; call `ended` after all."""
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
    """Blocks `first` to `end` of a READ: the peer's, and the own ones that they go to."""

    read: SegmentedRead
    first: int
    end: int
    remote: NDArray[np.int32]
    local: NDArray[np.int32]


def blocks_each(pool: LocalPool) -> int:
    """Blocks of a segment of a READ into this pool. Into a device's memory a READ goes whole: no
    core copies it."""
    return max(1, SEGMENT_BYTES // pool.block_bytes) if pool.memory == DRAM else pool.blocks


def blocks_enough(pool: LocalPool) -> int:
    """With more blocks than these under way from a peer, an agent posts no further segment: two
    segments keep a link busy, and what is posted lands soon, on a slow link too."""
    return max(1, (SEGMENT_BYTES if pool.memory == DRAM else DEVICE_BYTES) // pool.block_bytes)


def cut(
    boot_id: bytes,
    remote: Sequence[int],
    local: Sequence[int],
    step: int,
    landed: Landed | None,
    ended: Ended,
) -> list[ReadSegment]:
    """One READ of at least one block, in segments of `step` blocks, in order."""
    firsts = range(0, len(local), step)
    read = SegmentedRead(boot_id, len(firsts), landed, ended)
    theirs, ours = (np.asarray(blocks, dtype=np.int32) for blocks in (remote, local))
    return [
        ReadSegment(read, first, first + len(part), theirs[first : first + step], part)
        for first in firsts
        for part in [ours[first : first + step]]
    ]
