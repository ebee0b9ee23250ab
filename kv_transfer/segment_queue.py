"""The queue of READ segments that wait until they may be posted, one for each peer.

    add ─▶ waits in its peer's queue ─▶ take: posted ─▶ ended
                   └──── abandon: never posted

An agent posts little at a time from each peer, and the rest waits here. So a READ's time begins
when its bytes can move, whatever else is to be read, and an abandoned READ costs nothing. Peers
take turns, so that one that is cut off delays no other. Several threads use it, under one lock.
It posts nothing and knows no NIXL.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from baton.kv_transfer.read_segments import ReadSegment, SegmentedRead
from baton.runtime.errors import ReadFailed


@dataclass(slots=True)
class _PeerQueue:
    """`moved_at`: when a segment from this peer last ended, while others waited."""

    waiting: deque[ReadSegment] = field(default_factory=deque)
    moved_at: float = 0.0


class SegmentQueue:
    """Shared by the agents of a mover, which take segments, and its event loop, which adds them."""

    def __init__(self) -> None:
        self._queues: dict[bytes, _PeerQueue] = {}  # by boot id; whose turn is next comes first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Pieces that wait."""
        with self._lock:
            return sum(len(queue.waiting) for queue in self._queues.values())

    def add(self, segments: Sequence[ReadSegment]) -> None:
        """The segments of one READ."""
        with self._lock:
            self._queues.setdefault(segments[0].read.boot_id, _PeerQueue()).waiting.extend(segments)

    def take(self, full: Collection[bytes] = ()) -> ReadSegment | None:
        """The next segment to post, but of no peer that is `full`; None: there is none."""
        with self._lock:
            boot_id = next((peer for peer in self._queues if peer not in full), None)
            if boot_id is None:
                return None
            queue = self._queues.pop(boot_id)
            segment = queue.waiting.popleft()
            if queue.waiting:
                self._queues[boot_id] = queue  # behind the other peers
            segment.read.under_way += 1
            segment.read.moved_at = time.monotonic()
            return segment

    def ended(self, segment: ReadSegment, failure: ReadFailed | None) -> None:
        """A segment that was taken has landed, failed, or could not be posted. After a failure no
        other segment of its READ is posted."""
        read = segment.read
        with self._lock:
            read.under_way -= 1
            read.moved_at = time.monotonic()
            queue = self._queues.get(read.boot_id)
            if queue is not None:
                queue.moved_at = read.moved_at
            dropped = self._drop(read) if failure is not None else 0
        read.segments_ended(1 + dropped, failure)

    def abandon(self, read: SegmentedRead) -> bool:
        """Post no further segment of this READ. Returns whether it has ended by that: then no byte
        of it can land any more, and its `ended` is not called."""
        with self._lock:
            dropped = self._drop(read)
        return read.count_ended(dropped, ReadFailed("the READ was abandoned"))

    def moved_at(self, read: SegmentedRead) -> float:
        """Return the time of a READ's last progress, by the monotonic clock: a segment of it was
        posted or ended; with none under way, one from its peer, which made room, ended."""
        with self._lock:
            queue = self._queues.get(read.boot_id)
            if queue is None or read.under_way:
                return read.moved_at
            return max(read.moved_at, queue.moved_at)

    def _drop(self, read: SegmentedRead) -> int:
        queue = self._queues.get(read.boot_id)
        if queue is None:
            return 0
        kept = deque(segment for segment in queue.waiting if segment.read is not read)
        dropped = len(queue.waiting) - len(kept)
        queue.waiting = kept
        if not kept:
            del self._queues[read.boot_id]
        return dropped
