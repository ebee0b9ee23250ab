"""The reader's end of a handoff: fetches the blocks that a granter offers and verifies them.

    offer ─▶ READ ─▶ landed ─▶ lease still trusted? ─▶ own checksums ─▶ equal? ─▶ verified
             in the window                             while the next READ is in flight

    from blocks of another size      equal? ─▶ whole own block ─▶ put into the own order ─▶ verified

When `fetch` ends in any way, it posts nothing more, quarantines the destinations of READs in
flight and blocks that are being put into the own order, and sends `closed` once no READ is left;
`finished` waits for that. The owner of the destination blocks does not use quarantined blocks until
their future is done. Time is the event loop's. A READ's futures are never cancelled.

A granter may renew the lease and still withhold what it owes: checksums of landed blocks, further
offers after the first tokens, the first tokens after the last offer, or what it holds of cached
blocks. The reader waits `read_timeout_s` for each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.block_sizes import ALIKE
from baton.kv_transfer.fetch_ledger import FetchLedger, Window
from baton.kv_transfer.fetch_report import FetchReport
from baton.kv_transfer.mover import Mover, Read
from baton.kv_transfer.own_order import OwnOrder
from baton.kv_transfer.session import ReaderLink, ReaderSession
from baton.proto import handoff_pb2
from baton.runtime import waits
from baton.runtime.config import HandoffConfig
from baton.runtime.errors import (
    AnswerOverdue,
    ChecksumMismatch,
    HandoffError,
    LeaseLost,
    ReadFailed,
)

Quarantine = Callable[[Sequence[int], "asyncio.Future[None]"], None]


@dataclass(frozen=True, slots=True)
class _Landed:
    """Blocks that landed under a trusted lease, with their own checksums, [indices, slabs]."""

    indices: list[int]
    checksums: NDArray[np.uint64]
    since: float


class HandoffReader:
    """The reader of one handoff; `fetch` is called once.

    `peer` is the granter's boot id, connected in `mover`; `block_size` is that of the own blocks,
    in tokens. `quarantine` receives the destination blocks of an unfinished READ, and the future
    that completes when no byte of it can land any more.
    """

    def __init__(
        self,
        link: ReaderLink,
        mover: Mover,
        peer: bytes,
        block_size: int,
        config: HandoffConfig,
        quarantine: Quarantine,
    ) -> None:
        self._mover = mover
        self._peer = peer
        self._block_size = block_size
        self._config = config
        self._quarantine = quarantine
        self._session = ReaderSession(link, config, self._on_message, self._fail)
        self._window = Window(config.window_reads, config.window_bytes)
        self._ready: deque[int] = deque()  # offered indices, not yet read
        self._suspect: set[int] = set()  # indices with a wrong checksum
        self._reads: dict[Read, list[int]] = {}  # not landed, with their own cells
        self._tasks: set[asyncio.Task[None]] = set()  # per READ, until its checksums are computed
        self._unverified: list[_Landed] = []  # waiting for the granter's checksums
        self._order: OwnOrder | None = None  # of blocks that have another size than the own ones
        self.report = FetchReport()
        self._ratio = ALIKE
        self._first_received = False  # the first tokens, or what a granter of cached blocks holds
        self._begun = False
        self._checksums_at = 0.0  # time of the last checksums
        self._answered_at = 0.0  # time of the last offer or first tokens
        self._overdue_timer: asyncio.TimerHandle | None = None

    async def fetch(
        self,
        opening: handoff_pb2.OpenHandoff,
        blocks: Sequence[int],
        tags: Sequence[bytes],
        on_first: Callable[[handoff_pb2.FirstTokens], None],
    ) -> FetchReport:
        """Fetch indices from `opening.held_blocks` on into the own `blocks`; `tags` are the
        granter's of the full blocks (see FetchLedger). Indices are those of the granter's blocks;
        where its size is another one, `blocks` hold all of them (`PeerPool.ratio`). `on_first` gets
        the first tokens when they arrive, once.

        Returns when every block is verified and the first tokens have arrived; of a `cached_only`
        opening, when every block is verified that the granter holds. Raises WorkerLost
        (stream broken), LeaseLost (granter dead or paused), ReadFailed, AnswerOverdue (the granter
        withholds what it owes), ChecksumMismatch, HandoffError (an invalid message of the
        granter), or the granter's own error (Overloaded: busy). It can be cancelled at any time.
        """
        loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[None] = loop.create_future()
        self._outcome.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._on_first = on_first
        self._choices = list(opening.choices)
        self._cached_only = opening.cached_only
        self.report.started = loop.time()
        try:
            peer = self._mover.peer(self._peer)
            shape = self._mover.shape(self._peer)
            self._block_bytes, self._ratio, count = shape.unit_bytes, peer.ratio, len(blocks)
            if not peer.ratio.alike:
                self._order = OwnOrder(self._mover, peer, self._config.read_bytes, self._ordered)
                count = -(-len(opening.tokens) // peer.block_size) - opening.held_blocks
            cells = peer.ratio.cells(blocks, count)
            self._ledger = FetchLedger(
                opening,
                cells,
                tags,
                peer,
                slabs=shape.granter_slabs or self._mover.slabs,
                block_size=peer.block_size or self._block_size,
                each=shape.granter_parts,
                read_slabs=shape.slabs,
            )
            self._begun = True
            self._session.start(opening)
            if self._cached_only:  # all is owed from the opening on
                self._answered_at = loop.time()
                self._watch_answers()
            await self._outcome  # bounded by lease, due answers and deadline
        finally:
            self._leave()
        return self.report

    async def finished(self) -> None:
        """Wait until `closed` is sent or the lease has ended, and the stream has ended."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._session.finished()

    @property
    def leading(self) -> int:
        """Return how many leading own blocks are verified and may be used, however the fetch
        ended."""
        return self._ratio.own_blocks(self._ledger.leading) if self._begun else 0

    def unverified_s(self) -> float:
        """Return how long the oldest blocks have waited for the granter's checksums."""
        return _now() - self._unverified[0].since if self._unverified else 0.0

    def _leave(self) -> None:
        if self._overdue_timer is not None:
            self._overdue_timer.cancel()
        for task in self._tasks:
            task.cancel()
        for read in self._reads:
            read.abandon()
        unsettled = {
            read.settled: cells for read, cells in self._reads.items() if not read.settled.done()
        }
        if self._order is None:
            for settled, own in unsettled.items():
                self._quarantine(own, settled)
        else:
            self._order.quarantine(unsettled, self._quarantine)
        self._session.leave(list(unsettled))

    def _fail(self, error: Exception) -> None:
        outcome = self._outcome
        if not outcome.done():
            outcome.set_exception(error)

    def _on_message(self, message: handoff_pb2.GranterMessage) -> None:
        kind = message.WhichOneof("kind")
        report, now = self.report, _now()
        if kind == "checksums":
            self._checksums_at = now
        else:
            self._answered_at = now
        if self._session.opened_at is not None:
            report.opened = self._session.opened_at
        if kind == "offer":
            if not report.offers:
                report.first_offer = now
            indices = self._ledger.record_offer(message.offer)
            report.record_offer(indices, now)
            self._ready.extend(indices)
            if self._ledger.all_offered:
                report.last_offer = now
            self._start_reads()
        elif kind == "checksums":
            self._ledger.record_checksums(message.checksums)
            self._verify_landed()
        elif kind == "first_tokens":
            self._take_first(message.first_tokens, now)
        elif kind == "held":
            self._take_held(message.held)
        self._watch_answers()

    def _take_first(self, first: handoff_pb2.FirstTokens, now: float) -> None:
        choices = [token.choice for token in first.tokens]
        wrong = self._cached_only or sorted(choices) != sorted(self._choices)
        if self._first_received or wrong:
            raise HandoffError(
                f"the granter's first tokens are for choices {choices}, not once for each of "
                f"{self._choices}"
            )
        self._first_received = True
        self.report.first_tokens = now
        self._on_first(first)
        self._conclude()

    def _take_held(self, held: handoff_pb2.Held) -> None:
        if self._first_received or not self._cached_only:
            raise HandoffError("the granter names what it holds twice, or to a prompt to compute")
        self._ledger.record_held(held.blocks)
        self._first_received = True
        self._conclude()

    def _start_reads(self) -> None:
        """Start READs of offered blocks, while the window admits them and the lease is trusted."""
        most = min(self._config.window_bytes, self._config.read_bytes) // self._block_bytes
        while self._ready and not self._outcome.done():
            reads = -(-len(self._ready) // max(1, most))
            count = -(-len(self._ready) // reads)  # equal sizes, since they run in parallel
            indices = [self._ready[i] for i in range(count)]
            size = len(indices) * self._block_bytes
            if not self._window.admits(size):
                return
            if not self._session.trusted():  # the granter may have unpinned
                self._fail(LeaseLost("the lease ran out before a READ was started"))
                return
            own = self._ledger.own(indices)
            seeds = self._ledger.seeds(indices) if self._config.verify else None
            read = self._mover.read(self._peer, self._ledger.remote(indices), own, seeds)
            for _ in indices:
                self._ready.popleft()
            self._window.started(size)
            self._reads[read] = own
            self.report.record_read(indices, self._block_bytes)
            task = asyncio.create_task(self._finish_read(read, indices, size))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _finish_read(self, read: Read, indices: list[int], size: int) -> None:
        try:
            await self._await_landing(read)
            if not self._session.trusted():
                raise LeaseLost("the lease ended before a READ was known to be complete")
            self.report.record_landed(indices, _now())
            self._window.ended(size)
            self._reads.pop(read)
            self._start_reads()
            if read.checksums is not None:
                if not await waits.done_within(read.checksums, self._config.read_timeout_s):
                    raise ReadFailed("the checksums of a READ were not computed in time")
                self._unverified.append(_Landed(indices, read.checksums.result(), _now()))
                self._verify_landed()
                self._watch_answers()
            else:
                self._verified(indices)
                self._conclude()
        except Exception as error:  # every failure ends the fetch
            self._fail(error)

    async def _await_landing(self, read: Read) -> None:
        """Wait until a READ has landed. Raises ReadFailed if it makes no progress for
        `read_timeout_s`; the lease and the request's deadline bound a slow READ."""
        timeout_s = self._config.read_timeout_s
        while not read.landed.done():
            left_s = read.moved_at + timeout_s - _now()
            if left_s <= 0:
                raise ReadFailed(f"a READ made no progress for {timeout_s:g} s")
            await waits.done_within(read.landed, left_s)
        read.landed.result()

    def _verify_landed(self) -> None:
        """Compare own checksums with the granter's if both are present; read blocks with wrong
        checksums again, once."""
        waiting, self._unverified = self._unverified, []
        for landed in waiting:
            if not self._ledger.have_checksums(landed.indices):
                self._unverified.append(landed)
                continue
            wrong = self._ledger.mismatched(landed.indices, landed.checksums)
            again = [index for index in wrong if index in self._suspect]
            self.report.wrong_blocks += len(wrong)
            if again:
                raise ChecksumMismatch(
                    f"block {self._ledger.remote(again)[0]} of worker {self._peer.hex()[:8]}, "
                    f"index {again[0]}, has wrong checksums after a second READ"
                )
            self._verified([p for p in landed.indices if p not in set(wrong)])
            self.report.rereads += bool(wrong)
            self.report.reread_blocks += len(wrong)
            self._suspect.update(wrong)
            self._ready.extendleft(reversed(wrong))
        self._start_reads()
        self._conclude()

    # -- due answers of the granter -------------------------------------------------------------

    def _answers_due(self) -> float:
        """Return when the next answer is overdue; infinite if the granter owes none."""
        due = float("inf")
        if self._unverified:
            due = max(self._checksums_at, self._unverified[0].since)
        if self._owed() is not None:
            due = min(due, self._answered_at)
        return due + self._config.read_timeout_s

    def _owed(self) -> str | None:
        """Return what the granter owes now beside checksums; None if nothing. Offers of blocks
        that it still computes are not owed: a prompt may wait, and the router watches the granter's
        steps. A granter of cached blocks computes nothing."""
        offered, first = self._ledger.all_offered, self._first_received
        if self._cached_only and not first:
            return "number of held blocks"
        if not offered and (first or self._cached_only):
            return "offers"
        return "first tokens" if offered and not first else None

    def _watch_answers(self) -> None:
        if self._overdue_timer is None and not self._outcome.done():
            due = self._answers_due()
            if due < float("inf"):
                loop = asyncio.get_running_loop()
                self._overdue_timer = loop.call_at(due, self._check_answers)

    def _check_answers(self) -> None:
        self._overdue_timer = None
        if _now() < self._answers_due():  # an answer has come in between
            self._watch_answers()
            return
        owed = self._owed()
        missing = "checksums" if owed is None else owed
        self._fail(
            AnswerOverdue(
                f"worker {self._peer.hex()[:8]} keeps its lease and has sent no {missing} for "
                f"{self._config.read_timeout_s:g} s"
            )
        )

    def _verified(self, indices: Sequence[int]) -> None:
        if self._order is None:
            self._record_verified(indices)
        else:
            self._order.add(self._ledger, self._ledger.record_checked(indices))

    def _record_verified(self, indices: Sequence[int]) -> None:
        self._ledger.record_verified(indices)
        self.report.record_verified(indices, _now())

    def _ordered(self, indices: Sequence[int], failure: BaseException | None) -> None:
        if failure is not None:
            self._fail(ReadFailed(f"blocks of another size were not put into order: {failure}"))
            return
        self._record_verified(indices)
        self._conclude()

    def _conclude(self) -> None:
        """Complete the fetch once all blocks are verified and the first tokens have arrived."""
        if self._ledger.complete and self._first_received and not self._outcome.done():
            self.report.verified = _now()
            self._outcome.set_result(None)


def _now() -> float:
    return asyncio.get_running_loop().time()
