"""The block events of one worker: watched while its link is up, and applied to the radix index.

After a gap or a broken stream the worker's blocks leave the index, and a new stream begins with a
snapshot. Owned by the worker's link.
"""

from __future__ import annotations

import asyncio

from baton.proto import worker_pb2
from baton.router.fleet.dialer import Connection
from baton.router.fleet.radix_index import RadixIndex, snapshot_slices
from baton.runtime import logs
from baton.runtime.links import LinkClosed

WATCH_RETRY_S = 0.5

log = logs.get(__name__)


class BlockWatcher:
    def __init__(self, worker_id: str, index: RadixIndex) -> None:
        self._worker_id = worker_id
        self._index = index

    async def run(self, connection: Connection, boot_id: bytes) -> None:
        """Apply the events of this boot of the worker until cancelled."""
        while True:
            try:
                async for events in connection.watch_blocks():
                    if events.boot_id != boot_id:
                        raise LinkClosed("block events of another boot")
                    if not await self._apply(events):
                        log.warning("block event missed", worker_id=self._worker_id)
                        break
            except LinkClosed:
                log.info("block events ended", worker_id=self._worker_id)
            self._index.remove(self._worker_id)
            # A worker that ends each stream at once must not fill a core.
            await asyncio.sleep(WATCH_RETRY_S)

    async def _apply(self, events: worker_pb2.BlockEvents) -> bool:
        """Apply a message; return False after a gap. A large part of a snapshot is applied in
        slices, between which the event loop delivers tokens."""
        parts = snapshot_slices(events)
        for part in parts:
            if not self._index.apply(self._worker_id, part):
                return False
            if len(parts) > 1:
                await asyncio.sleep(0)
        return True
