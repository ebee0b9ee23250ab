"""All handoffs that a worker reads, of either role: a stream of a peer and its reader.

    async with reads.reader(granter, quarantine) as reader:   # opens the stream
        await reader.fetch(...)                               # `closed` follows by itself

Streams of one peer share a connection. The first handoff that loses it reports the peer; the others
raise SharedConnectionLost. Owned by the worker's loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from baton.kv_transfer.block_sizes import BlockRatio
from baton.kv_transfer.checksum import converted_tag
from baton.kv_transfer.fetch_report import FetchReport
from baton.kv_transfer.mover import Mover
from baton.kv_transfer.peers.peer_client import HandoffLink
from baton.kv_transfer.peers.registered_peers import Peers
from baton.kv_transfer.reader import HandoffReader, Quarantine
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime import handoff_metrics, identity, logs
from baton.runtime.config import HandoffConfig
from baton.runtime.errors import WorkerLost
from baton.runtime.wire import ModelLimits

log = logs.get(__name__)


class SharedConnectionLost(WorkerLost):
    """The loss of a connection that several handoffs share: another handoff has already reported
    it and dropped the peer, and there may be a new connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingWorker:
    """The worker that reads, as its handoffs need it. `new_id` returns 16 random bytes;
    `wall_offset_s` is time.time() minus the loop's time."""

    peers: Peers
    mover: Mover
    boot_id: bytes
    config: HandoffConfig
    limits: ModelLimits
    block_size: int
    new_id: Callable[[], bytes]
    wall_offset_s: float


class HandoffReads:
    def __init__(self, worker: ReadingWorker) -> None:
        self._limits = worker.limits
        self._block_size = worker.block_size
        self._peers = worker.peers
        self._mover = worker.mover
        self._config = worker.config
        self._closing: dict[asyncio.Task[None], float] = {}  # begun at
        self._open: set[HandoffReader] = set()
        # Each peer's streams on its one connection; streams of a broken connection are in none.
        self._streams: dict[bytes, set[HandoffLink]] = {}

    @asynccontextmanager
    async def reader(
        self,
        granter: worker_pb2.Candidate,
        quarantine: Quarantine,
        contact_s: float = math.inf,
    ) -> AsyncIterator[HandoffReader]:
        """Open a stream to a granter, for one fetch; `contact_s` as for `Peers.open`, and the same
        errors."""
        link = await self._peers.open(granter, contact_s)
        self._streams.setdefault(granter.boot_id, set()).add(link)
        reader = HandoffReader(
            link, self._mover, granter.boot_id, self._block_size, self._config, quarantine
        )
        reader.report.transport = self._peers.transport(granter.boot_id)
        self._open.add(reader)
        try:
            yield reader
        except WorkerLost as error:
            if link not in self._streams.get(granter.boot_id, ()):
                raise SharedConnectionLost(str(error)) from error
            del self._streams[granter.boot_id]
            raise
        finally:
            self._open.discard(reader)
            self._remove_stream(granter.boot_id, link)
            _count_checksum_failures(reader.report)
            task = asyncio.create_task(reader.finished())
            self._closing[task] = asyncio.get_running_loop().time()
            task.add_done_callback(self._closing.pop)

    def ratio(self, boot_id: bytes) -> BlockRatio:
        """Return the ratio of the block size of a granter, to which a stream is open, and the
        own one."""
        return self._mover.peer(boot_id).ratio

    def granter_kv_dtype(self, boot_id: bytes) -> str:
        """Return the KV dtype of a granter to which a stream is open."""
        other = self._mover.peer(boot_id).kv_dtype
        return self._limits.kv_dtype if other is None else other

    def tags(
        self, boot_id: bytes, opening: handoff_pb2.OpenHandoff, identities: Sequence[bytes]
    ) -> list[bytes]:
        """Return the granter's tags of its full blocks from `opening.held_blocks` on. `identities`
        are the own ones from there on: the same, unless it converts them, or has another block
        size."""
        granter, limits = self.granter_kv_dtype(boot_id), self._limits
        size = self._mover.peer(boot_id).block_size or self._block_size
        if granter == limits.kv_dtype and size == self._block_size:
            return list(identities)
        root = identity.root(limits.key, limits.fingerprint, granter, salt=opening.cache_salt)
        names = identity.chain(limits.key, root, opening.tokens, size)[opening.held_blocks :]
        if granter == limits.kv_dtype:
            return names
        return [converted_tag(name, limits.kv_dtype) for name in names]

    def ages(self) -> Iterator[tuple[str, float]]:
        """Yield the state of each handoff, and the seconds since it began to wait, since the last
        offer, or since it began to close."""
        now = asyncio.get_running_loop().time()
        for reader in self._open:
            report = reader.report
            if report.offers:
                yield "reading", now - max(offer.received for offer in report.offers)
            else:
                yield "waiting", now - report.started
        for begun in self._closing.values():
            yield "closing", now - begun

    def oldest_unverified_s(self) -> float:
        """Return how long the oldest landed blocks have waited for a granter's checksums."""
        return max((reader.unverified_s() for reader in self._open), default=0.0)

    async def finished(self) -> None:
        """Wait until every reader has sent `closed`, or its lease is over."""
        while self._closing:
            await asyncio.wait(set(self._closing))

    def _remove_stream(self, boot_id: bytes, link: HandoffLink) -> None:
        streams = self._streams.get(boot_id, set())
        streams.discard(link)
        if not streams:
            self._streams.pop(boot_id, None)


def _count_checksum_failures(report: FetchReport) -> None:
    """Count the report's wrong blocks, also those of a fetch that failed because of them."""
    handoff_metrics.CHECKSUM_FAILURES.inc(report.wrong_blocks)
    handoff_metrics.REREAD_BLOCKS.inc(report.reread_blocks)
    if report.reread_blocks:
        log.error("blocks reread", blocks=report.reread_blocks, reason="wrong checksums")
