"""The handoffs of a decode worker: fetch a group's KV from one candidate after another.

Each group has one task, which ends in exactly one of six ways: the blocks are verified; no prefill
worker remains and one has failed (the group is prefilled locally); all have left without a failure
(StalePlacement: the router knows the present workers); all that remain are busy (Overloaded);
quarantined destinations cannot be replaced (OutOfBlocks); or it is cancelled (the grant was
revoked, or all sequences of the group have ended). The module knows
the scheduler's groups and the reader; the worker's loop decides the next action.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from opentelemetry.context import Context

from baton.decode_worker.credit import blocks_for
from baton.decode_worker.scheduler import DecodeScheduler
from baton.decode_worker.sequences import Group, Request
from baton.engine.scheduling.blocks import BlockPool, Hold
from baton.kv_transfer.fetch_report import FetchReport
from baton.kv_transfer.peers.handoff_reads import HandoffReads, ReadingWorker, SharedConnectionLost
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime import handoff_metrics, logs
from baton.runtime.errors import (
    AnswerOverdue,
    BatonError,
    Draining,
    EngineError,
    HandoffError,
    LeaseLost,
    OutOfBlocks,
    OutOfMemory,
    Overloaded,
    StalePlacement,
    Unavailable,
    WorkerLost,
)
from baton.runtime.telemetry import tracing
from baton.runtime.worker.kv_bridge import loses

log = logs.get(__name__)

BUSY_TIMEOUT_S = 30.0
BUSY_PAUSE_S = 0.05
MAX_BUSY_PAUSE_S = 1.0
WITHHELD_PENALTY_S = 10.0  # a granter that withheld answers is the last candidate for so long

OnFirst = Callable[[Group, handoff_pb2.FirstTokens], None]


PEER_FAULTS = (WorkerLost, HandoffError, EngineError)
# The prompt may be too large; and a connection that breaks counts once.
NOT_PEER_FAULTS = (OutOfMemory, SharedConnectionLost)


class FetchOutcome(Enum):
    VERIFIED = "verified"
    NO_CANDIDATE = "no_candidate"


class Handoffs:
    """The reader's side of all handoffs of one decode worker."""

    def __init__(
        self,
        worker: ReadingWorker,
        pool: BlockPool,
        scheduler: DecodeScheduler,
        on_room: Callable[[], None],
    ) -> None:
        self._peers = worker.peers
        self._reads = HandoffReads(worker)
        self._kv_dtype = worker.limits.kv_dtype
        self._boot_id = worker.boot_id
        self._config = worker.config
        self._pool = pool
        self._scheduler = scheduler
        self._new_id = worker.new_id
        self._wall_offset_s = worker.wall_offset_s
        self._on_room = on_room  # blocks have left quarantine
        self._withheld: dict[bytes, float] = {}  # by boot id: the end of its penalty
        self.open = 0

    async def fetch(self, group: Group, on_first: OnFirst) -> FetchOutcome:
        """Fetch a group's blocks. Raises Overloaded when every living candidate stays busy,
        StalePlacement when every candidate has left and none has failed, OutOfBlocks when
        quarantined destinations cannot be replaced."""
        loop = asyncio.get_running_loop()
        busy_until = loop.time() + BUSY_TIMEOUT_S
        pause = BUSY_PAUSE_S
        candidates = self._in_order(group.request.candidates)
        all_left = bool(candidates)
        while candidates:
            for candidate in list(candidates):
                try:
                    await self._try(group, candidate, on_first)
                    return FetchOutcome.VERIFIED
                except Overloaded as error:
                    log.info("handoff refused", worker=candidate.worker_id, detail=str(error))
                except BatonError as error:
                    self._give_up(group, candidate, error)
                    candidates.remove(candidate)
                    all_left = all_left and _has_left(error)
                self._scheduler.reservations.replace_leased(group)
                group.request.timeline.mark("lost handoff", self._wall())
            if candidates and loop.time() > busy_until:
                raise Overloaded("every prefill worker is busy")
            if candidates:
                # A prefill worker does not report that it is free again: it is asked again later.
                await asyncio.sleep(pause)
                group.request.timeline.mark("lost handoff", self._wall())
                pause = min(2 * pause, MAX_BUSY_PAUSE_S)
        if all_left:
            raise StalePlacement("every prefill worker of the placement has left")
        return FetchOutcome.NO_CANDIDATE

    def oldest_unverified_s(self) -> float:
        """Return how long the oldest landed blocks have waited for a granter's checksums."""
        return self._reads.oldest_unverified_s()

    async def finished(self) -> None:
        """Wait until every reader has sent `closed`, or its lease is over."""
        await self._reads.finished()

    def ages(self) -> Iterator[tuple[str, float]]:
        """Yield the state and the age in seconds of each open handoff."""
        return self._reads.ages()

    async def _try(
        self,
        group: Group,
        candidate: worker_pb2.Candidate,
        on_first: OnFirst,
    ) -> None:
        self._report_prefill(group.request, candidate.boot_id)
        self.open += 1
        outcome = "cancelled"
        called_off: asyncio.CancelledError | None = None

        def take_first(first: handoff_pb2.FirstTokens) -> None:
            nonlocal outcome
            wanted = group.live
            group.request.timeline.take_first(first, candidate.worker_id, self._wall())
            on_first(group, first)
            if wanted and not group.live:  # they were its last: it needs no KV
                outcome = "completed"

        try:
            with tracing.span(
                tracing.HANDOFF, group.request.trace, worker=candidate.worker_id
            ) as context:
                opening = self._opening(group, candidate, tracing.inject(context))
                try:
                    report = await self._read(group, candidate, opening, take_first)
                except asyncio.CancelledError as cancelled:
                    if outcome != "completed":
                        raise
                    called_off = cancelled  # behind the span: the handoff did not fail
                else:
                    group.request.timeline.take_fetch(report, self._wall_offset_s)
                    _annotate(context, report)
                    # not before the group is in the batch
                    asyncio.get_running_loop().call_soon(self._record_fetch, report, context)
            if called_off is not None:
                raise called_off
            outcome = "completed"
        except BatonError as error:
            outcome = "refused" if isinstance(error, Draining) else "failed"
            raise
        finally:
            self.open -= 1
            handoff_metrics.HANDOFFS.labels(outcome).inc()

    async def _read(
        self,
        group: Group,
        candidate: worker_pb2.Candidate,
        opening: handoff_pb2.OpenHandoff,
        take_first: Callable[[handoff_pb2.FirstTokens], None],
    ) -> FetchReport:
        def quarantine(blocks: Sequence[int], settled: asyncio.Future[None]) -> None:
            self._quarantine(group, candidate.worker_id, list(blocks), settled)

        async with self._reads.reader(candidate, quarantine) as reader:
            group.request.timeline.mark("connect", self._wall())
            granter = self._reads.granter_kv_dtype(candidate.boot_id)
            end, opening.held_blocks = self._whole_blocks(group, candidate.boot_id)
            report = await reader.fetch(
                opening,
                group.blocks[group.held : end],
                self._reads.tags(candidate.boot_id, opening, group.identities[group.held :]),
                take_first,
            )
            group.private = loses(granter, self._kv_dtype)
            return report

    def _whole_blocks(self, group: Group, boot_id: bytes) -> tuple[int, int]:
        """Return how many own blocks hold the whole blocks of this granter, and how many of these
        the group holds already. Raises OutOfBlocks if what it reserved ends within one."""
        ratio = self._reads.ratio(boot_id)
        size, blocks = self._pool.block_size * ratio.split, len(group.blocks)
        end = blocks_for(len(group.tokens), size) * ratio.split
        if group.held % ratio.split or end > blocks:
            raise OutOfBlocks(
                f"{blocks} blocks, {group.held} of them held, do not hold whole blocks of the "
                f"prefill worker, which are {ratio.split} each: this handoff is given up"
            )
        return end, ratio.granter_blocks(group.held)

    def _wall(self) -> float:
        return asyncio.get_running_loop().time() + self._wall_offset_s

    def _in_order(self, ranked: Sequence[worker_pb2.Candidate]) -> list[worker_pb2.Candidate]:
        """Return the router's ranking with candidates that recently withheld answers at its end.
        Otherwise each request would wait for them and occupy the waiting grants' share of the
        pool."""
        now = asyncio.get_running_loop().time()
        self._withheld = {boot: until for boot, until in self._withheld.items() if until > now}
        return sorted(ranked, key=lambda candidate: candidate.boot_id in self._withheld)

    def _opening(
        self,
        group: Group,
        candidate: worker_pb2.Candidate,
        trace: dict[str, str],
    ) -> handoff_pb2.OpenHandoff:
        request = group.request
        return handoff_pb2.OpenHandoff(
            handoff_id=self._new_id(),
            granter_boot_id=candidate.boot_id,
            reader_boot_id=self._boot_id,
            request_id=request.request_id,
            attempt=request.attempt,
            tokens=group.tokens,
            prompt_tokens=len(request.prompt),
            sampling=request.wire_sampling,
            choices=[sequence.choice for sequence in group.sequences],
            cache_salt=request.cache_salt,
            trace_context=trace,
            lease_ms=round(self._config.lease_s * 1000),
            deadline_ms=request.left_ms(asyncio.get_running_loop().time()),
            source=request.source,
            kv_dtype=self._kv_dtype,
        )

    def _quarantine(
        self, group: Group, granter: str, blocks: list[int], settled: asyncio.Future[None]
    ) -> None:
        self._scheduler.reservations.quarantine(group, blocks)
        handoff_metrics.QUARANTINED_BLOCKS.inc(len(blocks))
        log_at = log.warning if group.live else log.info  # READs of an ended group are called off
        log_at("blocks quarantined", worker=granter, blocks=len(blocks))

        def lift(_: asyncio.Future[None]) -> None:
            self._pool.release(blocks, Hold.QUARANTINED)
            handoff_metrics.QUARANTINED_BLOCKS.dec(len(blocks))
            self._on_room()

        settled.add_done_callback(lift)

    def _give_up(self, group: Group, candidate: worker_pb2.Candidate, error: BatonError) -> None:
        log_at = log.info if isinstance(error, Draining) else log.warning
        log_at("handoff failed", worker=candidate.worker_id, code=error.code, detail=str(error))
        if isinstance(error, LeaseLost):  # each handoff has a lease of its own
            handoff_metrics.LEASES_EXPIRED.inc()
        if isinstance(error, AnswerOverdue):
            self._withheld[candidate.boot_id] = (
                asyncio.get_running_loop().time() + WITHHELD_PENALTY_S
            )
        if isinstance(error, PEER_FAULTS) and not isinstance(error, NOT_PEER_FAULTS):
            failed = group.request.failed_prefills
            failed.extend({candidate.boot_id} - set(failed))
            if isinstance(error, WorkerLost):
                self._peers.forget(candidate.boot_id)
        self._report_prefill(group.request, b"")

    def _report_prefill(self, request: Request, prefill: bytes) -> None:
        """Report to the router which prefill worker the request waits for, if that has changed:
        the router notices a worker that heartbeats and computes nothing."""
        if prefill == request.reported_prefill:
            return
        request.reported_prefill = prefill
        request.emit(
            worker_pb2.PrefillSwitch(
                request_id=request.request_id,
                attempt=request.attempt,
                prefill_boot_id=prefill,
                failed_boot_ids=request.failed_prefills,
            )
        )

    def _record_fetch(self, report: FetchReport, parent: Context) -> None:
        handoff_metrics.HANDOFF_BYTES.inc(report.bytes)
        handoff_metrics.READ_SECONDS.inc(report.read_s)
        handoff_metrics.HANDOFF_SECONDS.observe(report.seconds)
        handoff_metrics.HANDOFF_TAIL_SECONDS.observe(report.verified - report.last_offer)
        if not tracing.is_sampled(parent):
            return
        for offer in report.offers:
            hidden_s = offer.hidden_s(report.first_tokens)
            tracing.record(
                tracing.FETCH,
                offer.received + self._wall_offset_s,
                offer.verified + self._wall_offset_s,
                parent,
                first=offer.first,
                blocks=offer.blocks,
                bytes=offer.bytes,
                reads=offer.reads,
                gb_per_s=tracing.gb_per_s(offer.bytes, offer.landed - offer.received),
                transport=report.transport,
                landed_s=offer.landed + self._wall_offset_s,
                hidden=hidden_s >= offer.verified - offer.received,
                hidden_s=hidden_s,
            )


def _annotate(context: Context, report: FetchReport) -> None:
    """Add the counts of the whole fetch to the span of its handoff."""
    tracing.annotate(
        context,
        bytes=report.bytes,
        reads=report.reads,
        gb_per_s=tracing.gb_per_s(report.bytes, report.read_s),
        transport=report.transport,
    )


def _has_left(error: BatonError) -> bool:
    """Return whether a candidate no longer answers under its boot id, or did not answer within the
    time of a first contact. Neither counts as a failure."""
    return isinstance(error, Unavailable) and not isinstance(error, WorkerLost)
