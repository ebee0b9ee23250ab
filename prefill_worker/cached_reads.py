"""READs of cached blocks that another worker holds, by a prefill worker, instead of computing them.

    admitted prompt ─▶ stream to its source ─▶ READ, verify ─▶ scheduler.read_ended ─▶ the rest is
                                    └─ any failure: what is verified by then counts ─┘   computed

The handoff is the one by which a decode worker reads, in the other direction: lease, checksums and
quarantine are the same. A failure fails no prompt. A source that failed is not asked again for a
while, since each prompt would wait for its lease. A first contact that takes longer than CONTACT_S
goes on beside the prompt, which is computed; soon the source is asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from baton.kv_transfer.block_sizes import block_ratio
from baton.kv_transfer.peers.handoff_reads import HandoffReads, ReadingWorker, SharedConnectionLost
from baton.prefill_worker.prompts import Prompt
from baton.prefill_worker.scheduler import PrefillScheduler
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime import handoff_metrics, logs
from baton.runtime.errors import (
    BatonError,
    Draining,
    HandoffError,
    LeaseLost,
    Unavailable,
    WorkerLost,
)
from baton.runtime.telemetry import tracing
from baton.runtime.worker.kv_bridge import loses

FAILED_SOURCE_S = 10.0  # for which a source is not asked again
CONTACT_S = 0.3  # for which a prompt waits for a first contact
UNREACHED_SOURCE_S = 1.0  # for which a source without a contact is not asked again

log = logs.get(__name__)


class CachedReads:
    """One task for each prompt that reads. `on_end` is called after each, once the scheduler has
    its result."""

    def __init__(
        self, worker: ReadingWorker, scheduler: PrefillScheduler, on_end: Callable[[], None]
    ) -> None:
        self._peers = worker.peers
        self._reads = HandoffReads(worker)
        self._kv_dtype = worker.limits.kv_dtype
        self._boot_id = worker.boot_id
        self._config = worker.config
        self._scheduler = scheduler
        self._block_size = worker.block_size
        self._new_id = worker.new_id
        self._wall_offset_s = worker.wall_offset_s
        self._on_end = on_end
        self._tasks: dict[Prompt, asyncio.Task[None]] = {}
        self._verified: dict[Prompt, int] = {}  # leading blocks
        self._failed: dict[bytes, float] = {}  # by boot id: until when it is not asked

    @property
    def open(self) -> int:
        return len(self._tasks)

    def ages(self) -> Iterator[tuple[str, float]]:
        """Yield the state and the age in seconds of each handoff that reads cached blocks."""
        return self._reads.ages()

    def oldest_unverified_s(self) -> float:
        return self._reads.oldest_unverified_s()

    def usable(self, boot_id: bytes) -> bool:
        """Return whether a source may be asked: another worker, which has neither failed of late
        nor is read slowly."""
        now = asyncio.get_running_loop().time()
        self._failed = {boot: until for boot, until in self._failed.items() if until > now}
        slow = {peer.boot_id for peer in self._peers.degraded()}
        return boot_id not in {self._boot_id, *self._failed, *slow}

    def loses(self, kv_dtype: str) -> bool:
        """Return whether KV of a source with this dtype is less precise than the own: what follows
        from it is computed for its own reader, and not cached for others."""
        return loses(kv_dtype, self._kv_dtype)

    def start(self, prompt: Prompt, source: worker_pb2.Candidate) -> None:
        """Read the blocks that the scheduler has leased for a prompt from its source."""
        self._verified[prompt] = 0
        with logs.bind_request(prompt.request_id, attempt=prompt.attempt):
            task = self._tasks[prompt] = asyncio.create_task(self._read(prompt, source))
        task.add_done_callback(partial(self._ended, prompt))

    def cancel(self, prompt: Prompt) -> None:
        """End the READs of a prompt whose handoff is over, if it has some."""
        if (task := self._tasks.get(prompt)) is not None:
            task.cancel()

    async def close(self) -> None:
        """End all READs, and wait until every lease is closed or over."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks.values()))
        await self._reads.finished()

    async def _read(self, prompt: Prompt, source: worker_pb2.Candidate) -> None:
        wanted = prompt.reading_to - prompt.cached
        started_s, outcome = self._wall(), "cancelled"
        try:
            await self._fetch(prompt, source)
            outcome = "complete" if self._verified[prompt] == wanted else "partial"
        except BatonError as error:
            self._note_failure(source.worker_id, source.boot_id, error)
            outcome = "partial" if self._verified[prompt] else "failed"
        except Exception as error:  # should be impossible: the prompt is computed
            log.exception("cached read failed")
            self._note_failure(source.worker_id, source.boot_id, HandoffError(repr(error)))
            outcome = "failed"
        finally:
            handoff_metrics.CACHED_READS.labels(outcome).inc()
            handoff_metrics.CACHED_READ_BLOCKS.inc(self._verified[prompt])
            tracing.record(
                tracing.HANDOFF,
                started_s,
                self._wall(),
                prompt.trace,
                worker=source.worker_id,
                cached=True,
                outcome=outcome,
                blocks=self._verified[prompt],
            )

    async def _fetch(self, prompt: Prompt, source: worker_pb2.Candidate) -> None:
        def quarantine(blocks: Sequence[int], settled: asyncio.Future[None]) -> None:
            self._quarantine(prompt, source.worker_id, list(blocks), settled)

        first, end = prompt.cached, prompt.reading_to
        async with self._reads.reader(source, quarantine, CONTACT_S) as reader:
            try:
                granter = self._reads.granter_kv_dtype(source.boot_id)
                if self.loses(granter) and not prompt.imprecise_source:
                    raise HandoffError(
                        f"the source stores KV as {granter}, which its placement did not say"
                    )
                ratio = self._reads.ratio(source.boot_id)
                if ratio != block_ratio(source.block_size or self._block_size, self._block_size):
                    raise HandoffError("the source has another block size than its placement said")
                opening = self._opening(prompt, source.boot_id)
                opening.held_blocks = ratio.granter_blocks(first)
                await reader.fetch(
                    opening,
                    prompt.blocks[first:end],
                    self._reads.tags(source.boot_id, opening, prompt.identities[first:end]),
                    lambda first_tokens: None,  # none comes
                )
            finally:
                self._verified[prompt] = reader.leading
                handoff_metrics.CACHED_READ_BYTES.inc(reader.report.bytes)

    def _opening(self, prompt: Prompt, granter: bytes) -> handoff_pb2.OpenHandoff:
        return handoff_pb2.OpenHandoff(
            handoff_id=self._new_id(),
            granter_boot_id=granter,
            reader_boot_id=self._boot_id,
            request_id=prompt.request_id,
            attempt=prompt.attempt,
            tokens=prompt.tokens[: prompt.reading_to * self._block_size],
            cache_salt=prompt.cache_salt,
            lease_ms=round(self._config.lease_s * 1000),
            deadline_ms=prompt.deadline_ms,
            cached_only=True,
            kv_dtype=self._kv_dtype,
        )

    def _quarantine(
        self, prompt: Prompt, source: str, blocks: list[int], settled: asyncio.Future[None]
    ) -> None:
        self._scheduler.quarantine(prompt, blocks)
        handoff_metrics.QUARANTINED_BLOCKS.inc(len(blocks))
        log.warning("blocks quarantined", worker=source, blocks=len(blocks))

        def lift(_: asyncio.Future[None]) -> None:
            self._scheduler.end_quarantine(blocks)
            handoff_metrics.QUARANTINED_BLOCKS.dec(len(blocks))
            self._on_end()

        settled.add_done_callback(lift)

    def _note_failure(self, worker_id: str, boot_id: bytes, error: BatonError) -> None:
        log_at = log.info if isinstance(error, Draining) else log.warning
        log_at("cached read failed", worker=worker_id, code=error.code, detail=str(error))
        pause_s = UNREACHED_SOURCE_S if type(error) is Unavailable else FAILED_SOURCE_S
        self._failed[boot_id] = asyncio.get_running_loop().time() + pause_s
        if isinstance(error, LeaseLost):
            handoff_metrics.LEASES_EXPIRED.inc()
        if isinstance(error, WorkerLost) and not isinstance(error, SharedConnectionLost):
            self._peers.forget(boot_id)

    def _ended(self, prompt: Prompt, _: asyncio.Task[None]) -> None:
        """Return the prompt to the scheduler, even if its task was cancelled before it began."""
        del self._tasks[prompt]
        prompt.timeline.mark("cached read", self._wall())
        self._scheduler.read_ended(prompt, self._verified.pop(prompt))
        self._on_end()

    def _wall(self) -> float:
        return asyncio.get_running_loop().time() + self._wall_offset_s
