"""The calls that put blocks read from a granter with another block size into the own order.

    whole own blocks, verified ─▶ a call in the checksums' thread ─▶ `ordered`
                                        └ end of the fetch: quarantine until the call is over

The calls are short, so that checksums of other handoffs come between them. A fetch does not stop a
call: the thread writes until it returns. The handoff's reader owns it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from baton.kv_transfer.fetch_ledger import FetchLedger
from baton.kv_transfer.mover import Mover, PeerPool
from baton.runtime import handoff_metrics

CALLS_PER_READ = 8

# The granter's blocks that are in the own order now, or why they are not.
Ordered = Callable[[Sequence[int], BaseException | None], None]


class OwnOrder:
    """The calls of one fetch from `peer`, each of `read_bytes` / CALLS_PER_READ, or of one block.
    `ordered` is called after each."""

    def __init__(self, mover: Mover, peer: PeerPool, read_bytes: int, ordered: Ordered) -> None:
        self._mover = mover
        self._peer = peer
        self._ordered = ordered
        span_bytes = peer.unit_bytes * peer.ratio.joined
        self._most = max(1, read_bytes // CALLS_PER_READ // span_bytes)
        self._calls: dict[asyncio.Task[None], list[int]] = {}  # with their own blocks

    def add(self, ledger: FetchLedger, spans: Sequence[range]) -> None:
        """Order the own blocks of these `spans` of indices (see FetchLedger.record_checked)."""
        for start in range(0, len(spans), self._most):
            some = spans[start : start + self._most]
            indices = [index for span in some for index in span]
            blocks = self._peer.ratio.blocks_of(ledger.own(indices))
            filled = [len(span) for span in some]
            ordering = self._mover.put_in_order(self._peer.boot_id, blocks, filled)
            call = asyncio.create_task(ordering)
            self._calls[call] = blocks
            call.add_done_callback(partial(self._over, indices))

    def quarantine(
        self,
        reads: Mapping[asyncio.Future[None], Sequence[int]],
        quarantine: Callable[[Sequence[int], asyncio.Future[None]], None],
    ) -> None:
        """Quarantine what may still be written, by calls or by `reads`, with the cells of each. All
        of it ends together, since several READs may have one own block."""
        blocks = [block for own in self._calls.values() for block in own]
        for cells in reads.values():
            blocks += self._peer.ratio.blocks_of(cells)
        if not blocks:
            return
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ends = asyncio.gather(*reads, *self._calls, return_exceptions=True)
        ends.add_done_callback(lambda _: settled.set_result(None))
        quarantine(list(dict.fromkeys(blocks)), settled)

    def _over(self, indices: Sequence[int], call: asyncio.Task[None]) -> None:
        del self._calls[call]
        failure = asyncio.CancelledError() if call.cancelled() else call.exception()
        if failure is None:
            handoff_metrics.REORDERED_BLOCKS.inc(len(indices))
        self._ordered(indices, failure)
