"""The reader's end of a handoff: fetches the blocks that a granter offers and verifies them.

    offer ─▶ READ ─▶ landed ─▶ lease still trusted? ─▶ own sums ─▶ equal? ─▶ verified
             in the window                             while the next READ is under way

However `fetch` ends, what is not posted of its READs never will be, the destinations of those in
flight go to quarantine, and `closed` is said once there are none; `finished` waits for that. The
owner of the destination blocks keeps the quarantined ones aside until their future is done. Time
is the event loop's. A READ's futures are never cancelled.

A granter may renew the lease and yet withhold what it owes: checksums of what has landed; offers
or first tokens, of which the ones follow the others at once. Each is waited for `read_timeout_s`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.fetch_ledger import FetchLedger
from baton.kv_transfer.fetch_report import FetchReport
from baton.kv_transfer.mover import Mover, Read
from baton.kv_transfer.session import ReaderLink, ReaderSession
from baton.kv_transfer.window import Window
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
    """Blocks that landed under a trusted lease, with their own sums, [indices, slabs]."""

    indices: list[int]
    sums: NDArray[np.uint64]
    since: float


class HandoffReader:
    """One handoff; `fetch` is called once.

    `peer` is the granter's boot id, connected in `mover`; `own` the local one. `quarantine`
    takes over the destination blocks of an unfinished READ, with the future after which no byte
    of it can land any more.
    """

    def __init__(
        self,
        link: ReaderLink,
        mover: Mover,
        peer: bytes,
        own: bytes,
        config: HandoffConfig,
        quarantine: Quarantine,
    ) -> None:
        self._mover = mover
        self._peer = peer
        self._own = own
        self._config = config
        self._quarantine = quarantine
        self._session = ReaderSession(link, config, self._on_message, self._fail)
        self._window = Window(config.window_reads, config.window_bytes)
        self._ready: deque[int] = deque()  # indices offered, not yet being read
        self._suspect: set[int] = set()  # indices whose sums were wrong once
        self._reads: dict[Read, list[int]] = {}  # that have not landed, to own blocks
        self._tasks: set[asyncio.Task[None]] = set()  # one per READ, until its own sums are in
        self._unverified: list[_Landed] = []  # waiting for the granter's sums
        self.report = FetchReport()
        self._first_received = False
        self._summed_at = 0.0  # when checksums came last
        self._answered_at = 0.0  # when an offer or the first tokens came last
        self._overdue_timer: asyncio.TimerHandle | None = None

    async def fetch(
        self,
        opening: handoff_pb2.OpenHandoff,
        blocks: Sequence[int],
        identities: Sequence[bytes],
        on_first: Callable[[handoff_pb2.FirstTokens], None],
    ) -> FetchReport:
        """Fetch indices `opening.held_blocks` and on into the own `blocks`; `identities` are
        those of the full ones among them. `on_first` gets the first tokens as they come, once.

        Returns when every block is verified and the first tokens are here. Raises WorkerLost
        (stream broken), LeaseLost (granter dead or paused), ReadFailed, AnswerOverdue (the granter
        withholds what it owes), ChecksumMismatch, HandoffError (the granter's word cannot be
        true), or the error that the granter named (Overloaded: busy). Can be cancelled at any
        time.
        """
        loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[None] = loop.create_future()
        self._outcome.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._on_first = on_first
        self._choices = list(opening.choices)
        self.report.started = loop.time()
        try:
            peer = self._mover.peer(self._peer)
            self._block_bytes = peer.block_bytes
            self._ledger = FetchLedger(opening, blocks, identities, peer, self._mover.slabs)
            self._session.start(opening)
            await self._outcome  # bounded by the lease, the answers due, and the deadline
        finally:
            self._leave()
        return self.report

    async def finished(self) -> None:
        """Wait until `closed` has been said or the lease is over, and the stream has ended."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._session.finished()

    def unverified_s(self) -> float:
        """How long the oldest blocks have waited for the granter's checksums."""
        return _now() - self._unverified[0].since if self._unverified else 0.0

    def _leave(self) -> None:
        if self._overdue_timer is not None:
            self._overdue_timer.cancel()
        for task in self._tasks:
            task.cancel()
        for read in self._reads:
            read.abandon()
        unsettled = [read for read in self._reads if not read.settled.done()]
        for read in unsettled:
            self._quarantine(self._reads[read], read.settled)
        self._session.leave([read.settled for read in unsettled])

    def _fail(self, error: Exception) -> None:
        outcome = self._outcome
        if not outcome.done():
            outcome.set_exception(error)

    def _on_message(self, message: handoff_pb2.GranterMessage) -> None:
        kind = message.WhichOneof("kind")
        report, now = self.report, _now()
        if kind == "checksums":
            self._summed_at = now
        else:
            self._answered_at = now
        if self._session.opened_at is not None:
            report.opened = self._session.opened_at
        if kind == "offer":
            if not report.offers:
                report.first_offer = now
            indices = self._ledger.offered(message.offer)
            report.record_offer(indices, now)
            self._ready.extend(indices)
            if self._ledger.all_offered:
                report.last_offer = now
            self._start_reads()
        elif kind == "checksums":
            self._ledger.summed(message.checksums)
            self._verify_landed()
        elif kind == "first_tokens":
            self._take_first(message.first_tokens, now)
        self._watch_answers()

    def _take_first(self, first: handoff_pb2.FirstTokens, now: float) -> None:
        choices = [token.choice for token in first.tokens]
        if self._first_received or sorted(choices) != sorted(self._choices):
            raise HandoffError(
                f"the granter's first tokens are of choices {choices}, wanted {self._choices} once"
            )
        self._first_received = True
        self.report.first_tokens = now
        self._on_first(first)
        self._conclude()

    def _start_reads(self) -> None:
        """Start READs of what is offered, while the window admits them and the lease is
        trusted."""
        most = min(self._config.window_bytes, self._config.read_bytes) // self._block_bytes
        while self._ready and not self._outcome.done():
            reads = -(-len(self._ready) // max(1, most))
            count = -(-len(self._ready) // reads)  # of even size: they run side by side
            indices = [self._ready[i] for i in range(count)]
            size = len(indices) * self._block_bytes
            if not self._window.admits(size):
                return
            if not self._session.trusted():  # as after a pause: the granter may have unpinned
                self._fail(LeaseLost("the lease ran out before a READ was started"))
                return
            own = self._ledger.own(indices)
            seeds = self._ledger.seeds(indices) if self._config.verify else None
            read = self._mover.read(self._peer, self._ledger.remote(indices), own, seeds)
            for _ in indices:
                self._ready.popleft()
            self._window.started(size)
            self._reads[read] = own
            self.report.reads += 1
            self.report.bytes += size
            task = asyncio.create_task(self._finish_read(read, indices, size))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _finish_read(self, read: Read, indices: list[int], size: int) -> None:
        try:
            await self._await_landing(read)
            if not self._session.trusted():
                raise LeaseLost("the lease ran out before a READ was seen complete")
            self.report.record_landed(indices, _now())
            self._window.ended(size)
            self._reads.pop(read)
            self._start_reads()
            if read.sums is not None:
                if not await waits.over(read.sums, self._config.read_timeout_s):
                    raise ReadFailed("the checksums of a READ were not computed in time")
                self._unverified.append(_Landed(indices, read.sums.result(), _now()))
                self._verify_landed()
                self._watch_answers()
            else:
                self._verified(indices)
                self._conclude()
        except Exception as error:  # every failure ends the fetch, none ends unseen
            self._fail(error)

    async def _await_landing(self, read: Read) -> None:
        """Wait until a READ has landed. Raises ReadFailed if it makes no progress for
        `read_timeout_s`; the lease and the request's deadline bound a READ that does."""
        timeout_s = self._config.read_timeout_s
        while not read.landed.done():
            left_s = read.moved_at + timeout_s - _now()
            if left_s <= 0:
                raise ReadFailed(f"a READ made no progress for {timeout_s:g} s")
            await waits.over(read.landed, left_s)
        read.landed.result()

    def _verify_landed(self) -> None:
        """Compare own sums with the granter's where both are here; read wrong blocks again,
        once."""
        waiting, self._unverified = self._unverified, []
        for landed in waiting:
            if not self._ledger.known(landed.indices):
                self._unverified.append(landed)
                continue
            wrong = self._ledger.wrong(landed.indices, landed.sums)
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

    # -- what the granter owes ------------------------------------------------------------------

    def _answers_due(self) -> float:
        """Until when the next answer has to come; infinite while the granter owes none. What it
        offers while it computes is not owed: a prompt may wait, and the router watches its steps.
        """
        due = float("inf")
        if self._unverified:
            due = max(self._summed_at, self._unverified[0].since)
        if self._ledger.all_offered != self._first_received:
            due = min(due, self._answered_at)
        return due + self._config.read_timeout_s

    def _watch_answers(self) -> None:
        if self._overdue_timer is None and not self._outcome.done():
            due = self._answers_due()
            if due < float("inf"):
                loop = asyncio.get_running_loop()
                self._overdue_timer = loop.call_at(due, self._check_answers)

    def _check_answers(self) -> None:
        self._overdue_timer = None
        if _now() < self._answers_due():  # something has come since
            self._watch_answers()
            return
        missing = "first tokens" if self._ledger.all_offered else "offers"
        if self._ledger.all_offered == self._first_received:
            missing = "checksums"
        self._fail(
            AnswerOverdue(
                f"worker {self._peer.hex()[:8]} keeps its lease and has sent no {missing} for "
                f"{self._config.read_timeout_s:g} s"
            )
        )

    def _verified(self, indices: Sequence[int]) -> None:
        self._ledger.verified(indices)
        self.report.record_verified(indices, _now())

    def _conclude(self) -> None:
        """The fetch is done once all blocks are verified and the first tokens are here."""
        if self._ledger.complete and self._first_received and not self._outcome.done():
            self.report.verified = _now()
            self._outcome.set_result(None)


def _now() -> float:
    return asyncio.get_running_loop().time()
