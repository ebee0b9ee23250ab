"""Block events from a worker to every router that watches: a snapshot, then deltas.

The worker's loop publishes; each watcher has a bounded queue. A watcher that falls behind is
given a new snapshot instead of a backlog. Knows no pool: the snapshot comes from a callable.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from baton.proto import worker_pb2
from baton.runtime.identity import IDENTITY_BYTES

EVENT_QUEUE = 1024  # messages; beyond it a watcher gets a snapshot
SNAPSHOT_PART = 65_536  # identities per message: 1 MiB


class BlockFeed:
    """One per worker; `most` messages wait for one watcher. `publish` and `watch` run on the same
    event loop."""

    def __init__(
        self, boot_id: bytes, snapshot: Callable[[], Sequence[bytes]], most: int = EVENT_QUEUE
    ) -> None:
        self._boot_id = boot_id
        self.max_events = most
        self._snapshot = snapshot
        self._sequence = 0
        self._watchers: dict[asyncio.Queue[worker_pb2.BlockEvents], None] = {}  # first come first
        self._behind: set[asyncio.Queue[worker_pb2.BlockEvents]] = set()

    @property
    def watchers(self) -> int:
        """The number of routers that watch."""
        return len(self._watchers)

    @property
    def behind(self) -> int:
        """The number of routers that get no more events until they have a new snapshot."""
        return len(self._behind)

    def publish(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Send an event to every watcher. No identity may be in both lists."""
        if not stored and not removed:
            return
        self._sequence += 1
        event = worker_pb2.BlockEvents(
            boot_id=self._boot_id,
            sequence=self._sequence,
            stored=b"".join(stored),
            removed=b"".join(removed),
        )
        for watcher in self._watchers:
            if watcher.full():
                self._behind.add(watcher)
            if watcher not in self._behind:
                watcher.put_nowait(event)

    async def watch(self) -> AsyncIterator[worker_pb2.BlockEvents]:
        """A snapshot in parts, then deltas, for ever; a new snapshot after falling behind."""
        queue: asyncio.Queue[worker_pb2.BlockEvents] = asyncio.Queue(self.max_events)
        self._watchers[queue] = None
        try:
            for part in self._snapshot_parts():
                yield part
            while True:
                event = await queue.get()
                if queue not in self._behind:
                    yield event
                    continue
                while not queue.empty():
                    queue.get_nowait()
                self._behind.discard(queue)
                for part in self._snapshot_parts():
                    yield part
        finally:
            del self._watchers[queue]
            self._behind.discard(queue)

    def _snapshot_parts(self) -> list[worker_pb2.BlockEvents]:
        joined = b"".join(self._snapshot())
        width = SNAPSHOT_PART * IDENTITY_BYTES
        starts = range(0, max(len(joined), 1), width)
        return [
            worker_pb2.BlockEvents(
                boot_id=self._boot_id,
                sequence=self._sequence,
                snapshot=True,
                snapshot_end=start + width >= len(joined),
                stored=joined[start : start + width],
            )
            for start in starts
        ]
