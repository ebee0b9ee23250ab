"""All handoffs that a worker grants, of either role: each from its stream to the end of its lease.

`Grants` counts them, and says when none is open. What is granted is the worker's: `admit` gives the
prompt of an opening. Owned by the worker's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from baton.kv_transfer.checksum_cache import ChecksumCache
from baton.kv_transfer.granter import Admit, GranterLink, GrantingWorker, GrantReport, grant
from baton.kv_transfer.mover import Mover
from baton.runtime import handoff_metrics, logs
from baton.runtime.config import HandoffConfig
from baton.runtime.errors import BatonError, Draining, Overloaded
from baton.runtime.links import LinkClosed

EXPECTED_READS_S = 5.0  # a reader measures READs after its handshake

log = logs.get(__name__)


@dataclass(slots=True)
class _OpenGrant:
    """When a handoff was opened and when it last offered blocks, on the loop's clock."""

    opened_s: float
    offered_s: float | None = None


class Grants:
    """`checksum_cache` has the checksums of blocks that are offered again and again. `on_end` is
    called after each handoff: its blocks are unpinned."""

    def __init__(
        self,
        admit: Admit,
        mover: Mover,
        boot_id: bytes,
        config: HandoffConfig,
        checksum_cache: ChecksumCache | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._admit = admit
        self._mover = mover
        self._worker = GrantingWorker(mover, boot_id, config, checksum_cache)
        self._on_end = on_end
        self._open: dict[GranterLink, _OpenGrant] = {}
        self.idle = asyncio.Event()  # none is open
        self.idle.set()

    @property
    def open(self) -> int:
        return len(self._open)

    def ages(self) -> Iterator[tuple[str, float]]:
        """Yield the state of each open handoff, and the seconds since its opening, or since its
        last offer once there is one."""
        now = asyncio.get_running_loop().time()
        for one in self._open.values():
            if one.offered_s is None:
                yield "waiting", now - one.opened_s
            else:
                yield "reading", now - one.offered_s

    def expect_reads(self, after_s: float = 0.0) -> None:
        """Serve peers' READs promptly for a while, from that time on: a reader that has completed
        its handshake measures READs before any lease exists."""
        loop = asyncio.get_running_loop()

        def expect() -> None:
            self._mover.hold_progress()
            loop.call_later(EXPECTED_READS_S, self._mover.drop_progress)

        if after_s:
            loop.call_later(after_s, expect)
        else:
            expect()

    async def serve(self, link: GranterLink) -> None:
        """Serve one handoff stream; returns when the handoff is over, however long after its
        stream has broken."""
        clock = asyncio.get_running_loop().time
        open_grant = self._open[link] = _OpenGrant(clock())
        self.idle.clear()

        def offered() -> None:
            open_grant.offered_s = clock()

        try:
            report = await grant(link, self._admit, self._worker, offered)
            handoff_metrics.HANDOFFS.labels(report.end).inc()
            if report.end == "expired":
                handoff_metrics.LEASES_EXPIRED.inc()
            _log_handoff(report)
        finally:
            del self._open[link]
            if not self._open:
                self.idle.set()
            self._on_end()


def _log_handoff(report: GrantReport) -> None:
    """Log one event for each handoff; that of a failure names it, which the reader may not do."""
    failure = report.failure
    harmless = failure is None or isinstance(failure, Draining | Overloaded | LinkClosed)
    unknown = failure is not None and not isinstance(failure, BatonError)
    log_at = log.info if harmless and report.end != "expired" else log.warning
    (log.error if unknown else log_at)(
        "handoff ended",
        request_id=report.request_id,
        end=report.end,
        offered_blocks=report.offered_blocks,
        seconds=round(report.seconds, 4),
        detail=str(failure or ""),
        exc_info=failure if unknown else None,
    )
