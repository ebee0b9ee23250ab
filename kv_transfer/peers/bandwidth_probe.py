"""The bandwidth probe: measures how fast a peer's pool can be read.

Unconfigured systems fall back to TCP without a message and are a hundred times slower. A pair below
the configured floor is marked degraded in the log, the metrics and the load report; a pair whose
pool cannot be read is rejected. The probe leases destination blocks from the own pool and discards
the bytes. When it measures is decided in peer_measurements.py.
"""

from __future__ import annotations

import asyncio

from baton.kv_transfer.mover import Mover, PeerPool
from baton.kv_transfer.peers.block_store import BlockStore
from baton.kv_transfer.preflight import (
    ROUNDS,
    PreflightFailed,
    PreflightReport,
    measure,
    transport_name,
)
from baton.proto import worker_pb2
from baton.runtime import handoff_metrics, logs
from baton.runtime.errors import OutOfBlocks
from baton.runtime.wire import MAX_DEGRADED_PEERS

log = logs.get(__name__)

READ_BYTES = 8 << 20
READ_BLOCKS = 8


class BandwidthProbe:
    """Measures peers for one worker."""

    def __init__(self, mover: Mover, pool: BlockStore, floor_gb_per_s: float) -> None:
        self._mover = mover
        self._pool = pool
        self.floor_gb_per_s = floor_gb_per_s
        self._checks: set[asyncio.Task[PreflightReport | None]] = set()
        self._degraded: dict[bytes, worker_pb2.DegradedPeer] = {}  # by boot id, the oldest first
        self._transports: dict[bytes, str] = {}  # by boot id, of those that were measured

    def degraded(self) -> list[worker_pb2.DegradedPeer]:
        """Return the peers whose last measurement was below the floor."""
        return list(self._degraded.values())

    def transport(self, boot_id: bytes) -> str:
        """Return in a word or two how READs of a connected peer travel: as it was measured, else
        as UCX_TLS permits."""
        known = self._transports.get(boot_id)
        if known is None:
            known = transport_name(self._mover, self._mover.peer(boot_id), None)
        return known.split(", ")[0].split(" (")[0]

    def forget(self, boot_id: bytes) -> None:
        """Remove a peer's mark, and what was measured of it."""
        self._degraded.pop(boot_id, None)
        self._transports.pop(boot_id, None)

    async def check(
        self, worker_id: str, peer: PeerPool, rounds: int = ROUNDS
    ) -> PreflightReport | None:
        """Measure a peer by `rounds` READs after a first one, and return the report. Raises
        ReadFailed if its pool cannot be read. Without a free block in the own pool, the
        measurement is skipped, and None returned.

        If the caller is cancelled, the measurement continues, since its READ may still land, and
        marks none."""
        check = asyncio.create_task(self._check(worker_id, peer, rounds))
        self._checks.add(check)
        check.add_done_callback(self._checks.discard)
        check.add_done_callback(lambda done: done.cancelled() or done.exception())
        report = await asyncio.shield(check)
        if report is not None:
            self._transports[peer.boot_id] = report.transport
            self.mark(worker_id, peer.boot_id, report.gb_per_s)
        return report

    async def _check(self, worker_id: str, peer: PeerPool, rounds: int) -> PreflightReport | None:
        shape, ratio = self._mover.shape(peer.boot_id), peer.ratio
        units = min(
            READ_BLOCKS, READ_BYTES // shape.unit_bytes, peer.num_blocks // shape.granter_parts
        )
        units = max(1, units)
        try:
            own = self._pool.lease(-(-units * ratio.split // ratio.joined))
        except OutOfBlocks:
            log.info("peer measurement skipped", worker=worker_id, reason="no free block")
            return None
        try:
            report = await measure(
                self._mover,
                peer.boot_id,
                range(units * shape.granter_parts),
                [cell for cells in ratio.cells(own, units) for cell in cells],
                self.floor_gb_per_s,
                rounds=rounds,
            )
        except PreflightFailed as failed:
            if failed.settled is not None:
                self._quarantine(worker_id, own, failed.settled)
                own = []
            raise
        finally:
            self._pool.end_lease(own)
        (log.warning if report.degraded else log.info)(
            "peer measured",
            worker=worker_id,
            transport=report.transport,
            memory=report.memory,
            gb_per_s=round(report.gb_per_s, 2),
            degraded=report.degraded,
        )
        handoff_metrics.PEERS.labels("degraded" if report.degraded else "good").inc()
        return report

    def mark(self, worker_id: str, boot_id: bytes, gb_per_s: float) -> None:
        """Mark a peer as degraded if it is below the floor, else remove its mark."""
        self._degraded.pop(boot_id, None)
        if gb_per_s >= self.floor_gb_per_s:
            return
        self._degraded[boot_id] = worker_pb2.DegradedPeer(
            worker_id=worker_id, boot_id=boot_id, gb_per_s=gb_per_s
        )
        if len(self._degraded) > MAX_DEGRADED_PEERS:
            del self._degraded[next(iter(self._degraded))]

    def _quarantine(self, worker_id: str, blocks: list[int], settled: asyncio.Future[None]) -> None:
        self._pool.quarantine(blocks)
        handoff_metrics.QUARANTINED_BLOCKS.inc(len(blocks))
        log.warning("blocks quarantined", worker=worker_id, blocks=len(blocks))

        def lift(_: asyncio.Future[None]) -> None:
            self._pool.end_quarantine(blocks)
            handoff_metrics.QUARANTINED_BLOCKS.dec(len(blocks))

        settled.add_done_callback(lift)
