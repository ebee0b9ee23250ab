"""The queues of READ segments that are not yet posted, one for each peer.

    add ─▶ in its peer's queue ─▶ take: posted ─▶ ended
                   └──── abandon: never posted

An agent posts few segments at a time from each peer; the others are queued. A READ's time thus
begins when its bytes can move, and an abandoned READ costs nothing. The queue serves peers in
turn, so that a disconnected one does not delay the others. Several threads use it, under one lock.
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
    """The queue of one peer. `moved_at`: the last end of a segment while others were queued."""

    waiting: deque[ReadSegment] = field(default_factory=deque)
    moved_at: float = 0.0


class SegmentQueue:
    """The queue between a mover's event loop, which adds segments, and its agents, which take
    them."""

    def __init__(self) -> None:
        self._queues: dict[bytes, _PeerQueue] = {}  # by boot id; the next to serve is first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of queued segments."""
        with self._lock:
            return sum(len(queue.waiting) for queue in self._queues.values())

    def add(self, segments: Sequence[ReadSegment]) -> None:
        """Queue the segments of one READ."""
        with self._lock:
            self._queues.setdefault(segments[0].read.boot_id, _PeerQueue()).waiting.extend(segments)

    def take(self, full: Collection[bytes] = ()) -> ReadSegment | None:
        """Return the next segment to post, except of `full` peers; None: there is none."""
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
        """Record that a taken segment has landed, failed, or could not be posted. After a failure
        no other segment of its READ is posted."""
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
        """Post no further segment of this READ. Returns whether this ends the READ: then no byte
        of it can land any more, and its `ended` is not called."""
        with self._lock:
            dropped = self._drop(read)
        return read.count_ended(dropped, ReadFailed("the READ was abandoned"))

    def moved_at(self, read: SegmentedRead) -> float:
        """Return the time of a READ's last progress, by the monotonic clock: a segment of it was
        posted or ended, or, with none in flight, a segment of its peer ended and made room."""
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
