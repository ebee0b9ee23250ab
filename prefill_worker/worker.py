"""The prefill worker: handoffs in, KV offers out. Its loop plans, runs and commits steps.

    open ─▶ queue ─▶ blocks for all of it ─▶ plan ─ run ─ commit ─▶ offers, first tokens
                        └▶ READ what ─▶─┘      └── chunk after chunk ──┘
                           another worker holds

One event loop owns all state; the next step is planned while one runs. The worker sends no tokens
to routers, only its load; it answers the readers that opened a handoff, through the granter. To
another prefill worker it grants what its cache holds.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from baton.engine.scheduling.batch import StepBatch, StepResult
from baton.engine.scheduling.blocks import BlockPool
from baton.engine.scheduling.chunks import Chunk
from baton.engine.scheduling.engine import Engine
from baton.engine.scheduling.step_pipeline import CompletedStep
from baton.engine.scheduling.worker_loop import WorkerLoop
from baton.kv_transfer.checksum_cache import ChecksumCache
from baton.kv_transfer.conversion import Conversions, no_conversions
from baton.kv_transfer.granter import GrantedPrompt
from baton.kv_transfer.mover import Mover
from baton.kv_transfer.peers.cached_prefix import CachedGranter
from baton.kv_transfer.peers.converted_prompt import Converter
from baton.kv_transfer.peers.grants import Grants
from baton.kv_transfer.peers.handoff_reads import ReadingWorker
from baton.kv_transfer.peers.registered_peers import Peers, degraded_entries
from baton.prefill_worker.cached_reads import CachedReads
from baton.prefill_worker.opening_parser import parse_opening
from baton.prefill_worker.prompts import Prompt
from baton.prefill_worker.scheduler import PrefillScheduler, StepPlan
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime import handoff_metrics, logs, metrics
from baton.runtime.config import Config
from baton.runtime.errors import BatonError, Draining, EngineError, WorkerLost
from baton.runtime.exposition import process_gauges
from baton.runtime.grammar.grammar_compiler import GrammarCompiler
from baton.runtime.links import LinkClosed
from baton.runtime.telemetry import tracing
from baton.runtime.wire import ModelLimits
from baton.runtime.worker.block_feed import BlockFeed
from baton.runtime.worker.step_log import StepLog
from baton.runtime.worker.work_counts import WorkCounts

log = logs.get(__name__)


class PrefillSession:
    """A router's session with a prefill worker: it carries load, and no requests."""

    def receive(self, message: worker_pb2.RouterMessage) -> None:
        log.warning("router message ignored", kind=message.WhichOneof("kind"))

    async def outputs(self) -> worker_pb2.StepOutputs:
        await asyncio.Event().wait()  # until the link's task is cancelled
        raise LinkClosed("a prefill worker has no outputs")

    def detach(self) -> None:
        pass  # nothing is parked here


class PrefillWorker:
    """All of a prefill worker above its seams. `run` serves until it is cancelled."""

    def __init__(
        self,
        *,
        worker_id: str,
        boot_id: bytes,
        engine: Engine,
        pool: BlockPool,
        mover: Mover,
        peers: Peers,
        limits: ModelLimits,
        config: Config,
        wall_offset_s: float,
        new_id: Callable[[], bytes],
        grammars: GrammarCompiler | None = None,
        conversions: Conversions = no_conversions,
    ) -> None:
        self.worker_id = worker_id
        self.boot_id = boot_id
        self.loop: WorkerLoop[StepPlan] = WorkerLoop(
            self,
            engine,
            pool,
            has_work=lambda: self._scheduler.computing > 0,
            mover_failure=mover.failure_reason,
        )
        self.health, self.draining = self.loop.health, self.loop.draining
        self._grammars = grammars or GrammarCompiler(None)
        self._compiling: dict[asyncio.Task[None], Prompt] = {}  # grammars of prompts not yet queued
        self._pool, self._peers = pool, peers
        self._mover, self._limits, self._step = mover, limits, config.step
        self._wall_offset_s = wall_offset_s  # time.time() minus the loop's time
        checksum_cache = ChecksumCache(pool.total)
        self._scheduler = PrefillScheduler(
            pool,
            config.step,
            checksum_cache.forget,
            engine.draw_costs,
            lambda source: self._reads.usable(source.boot_id),
        )
        handoff, wake = config.handoff, self.loop.wake.set
        self._converter = Converter(
            conversions, limits, mover, boot_id, handoff, unpin=pool.unpin, on_unpin=wake
        )
        self._cached = CachedGranter(
            pool, limits, pool.block_size, self.draining, self._room, self._converter
        )
        self.grants = Grants(self.admit, mover, boot_id, handoff, checksum_cache, wake)
        reading = ReadingWorker(
            peers=peers,
            mover=mover,
            boot_id=boot_id,
            config=handoff,
            limits=limits,
            block_size=pool.block_size,
            new_id=new_id,
            wall_offset_s=wall_offset_s,
        )
        self._reads = CachedReads(reading, self._scheduler, wake)
        self._counts, self._step_log = WorkCounts(), StepLog(config.step)
        self.feed = BlockFeed(boot_id, pool.identities)

    def admit(self, opening: handoff_pb2.OpenHandoff) -> GrantedPrompt:
        """Queue the prompt of a handoff, or grant what is cached of it. Raises BatonError if it is
        refused."""
        if self.draining.is_set():
            raise Draining("the prefill worker is stopping")
        if opening.cached_only:
            return self._cached.admit(opening)
        prompt = parse_opening(
            opening, self._limits, self._pool.block_size, self._ended, wall_s=self._wall()
        )
        prompt.converted_each = self._converter.parts(opening)
        if prompt.source is not None:
            prompt.imprecise_source = self._reads.loses(prompt.source.kv_dtype)
            if prompt.imprecise_source and prompt.source.kv_dtype != opening.kv_dtype:
                prompt.source = None  # its reader stores more precise KV
        if opening.sampling.HasField("grammar"):
            self._grammars.check(opening.sampling.grammar)
            compiling = asyncio.create_task(self._queue_constrained(prompt, opening))
            self._compiling[compiling] = prompt
            compiling.add_done_callback(self._compiling.pop)
        else:
            self._scheduler.submit(prompt)
            self._admit_waiting()
        self._counts.requests += 1
        return self._converter.granted(prompt, opening)

    async def _queue_constrained(self, prompt: Prompt, opening: handoff_pb2.OpenHandoff) -> None:
        """Compile the prompt's grammar, then queue the prompt; if that fails, it fails alone."""
        message = opening.sampling.grammar
        try:
            grammar = await self._grammars.compiled(message, prompt.trace)
            output = prompt.tokens[prompt.prompt_tokens :]
            prompt.constrain(self._grammars.masks(message, grammar, output))
            if not prompt.ended:
                self._scheduler.submit(prompt)
        except BatonError as error:
            prompt.events.put_nowait(error)
        except Exception as error:  # should be impossible: one prompt ends, not all
            log.exception("grammar failed", request_id=prompt.request_id)
            reason = f"the grammar could not be used: {type(error).__name__}"
            prompt.events.put_nowait(EngineError(reason))
        self._admit_waiting()

    def attach(
        self, hello: worker_pb2.RouterHello
    ) -> tuple[worker_pb2.WorkerHello, PrefillSession]:
        hello_back = self._limits.hello(
            self.worker_id, self.boot_id, "prefill", self._pool.block_size, self._pool.total
        )
        hello_back.vocabulary = self._grammars.digest
        hello_back.step_tokens = self._step.prefill_tokens
        hello_back.chunk_tokens = self._step.chunk_tokens
        hello_back.unknown_requests.extend(resume.request_id for resume in hello.resume)
        return hello_back, PrefillSession()

    def load(self) -> worker_pb2.Load:
        counts = self._pool.counts()
        return worker_pb2.Load(
            running=self._scheduler.computing,
            waiting=self._scheduler.waiting,
            free_blocks=counts.available,
            total_blocks=counts.total,
            queued_tokens=self._scheduler.queued_tokens,
            fetching=self.grants.open,
            pool=worker_pb2.PoolBlocks(**counts.by_state()),
            draining=self.draining.is_set(),
            step_ms=self.loop.step_ms,
            overdue_ms=int(1000 * self.health.overdue_s()),
            not_ready_reason=self.health.not_ready_reason() or "",
            overdue_requests=self._overdue_requests(),
            degraded_peers=self._peers.degraded(),
            queued_pairs=self._scheduler.queued_pairs,
            chunk_step=self._step_log.last(chunks=True),
        )

    def publish_gauges(self) -> None:
        """Set the gauges of this worker, when its metrics are scraped."""
        process_gauges.set_pool_gauges(self._pool.counts().by_state())
        oldest_s = max(self._mover.oldest_checksum_s(), self._reads.oldest_unverified_s())
        handoff_metrics.OLDEST_CHECKSUM_SECONDS.set(oldest_s)
        process_gauges.set_handoff_gauges([*self.grants.ages(), *self._reads.ages()])
        metrics.RUNNING_REQUESTS.set(self._scheduler.computing)
        metrics.WAITING_REQUESTS.set(self._scheduler.waiting)
        metrics.QUEUED_TOKENS.set(self._scheduler.queued_tokens)
        metrics.PROMISED_BLOCKS.set(0)  # it may have been a decode worker

    def _overdue_requests(self) -> list[str]:
        """Return the requests of the running step, once it is overdue."""
        plan = self.loop.overdue_plan()
        if plan is None:
            return []
        return sorted({chunk.key.request_id for chunk in plan.chunks})

    def red_in_s(self) -> float:
        """Same as `StepHealth.red_in_s`."""
        return self.health.red_in_s()

    def audit(self, *, check: bool = True) -> dict[str, Any]:
        """Return the worker's present state. `check` adds up the pool's blocks in O(blocks) and
        raises RuntimeError if they do not match its total."""
        if check:
            self._pool.check()
        return {
            "worker_id": self.worker_id,
            "boot_id": self.boot_id.hex(),
            "role": "prefill",
            "blocks": self._pool.counts().by_state(),
            "waiting": self._scheduler.waiting,
            "running": self._scheduler.computing,
            "step_s": self.loop.steps.running_s(),  # so far; None between steps
            "reading": self._scheduler.reading,
            "open_handoffs": self.grants.open + self._reads.open,
            "draining": self.draining.is_set(),
            "degraded_peers": degraded_entries(self._peers),
            "work": self.loop.work(self._scheduler.queued_tokens)
            | asdict(self._counts)
            | self._step_log.audit(),
        }

    async def drain(self, within_s: float) -> None:
        """Refuse new handoffs; return once every offered block was read or its lease is over, or
        after `within_s`. Prompts that are not complete then fail when `run` is cancelled."""
        await self.loop.drain(self.grants.idle, within_s)

    async def run(self) -> None:
        """Serve until cancelled; then every prompt that is not complete fails, so that its
        reader goes elsewhere at once. Pinned blocks stay pinned until their handoff ends."""
        try:
            await self.loop.run()
        finally:
            ending = Draining if self.draining.is_set() else WorkerLost
            for compiling, prompt in self._compiling.items():
                compiling.cancel()
                prompt.events.put_nowait(ending("the prefill worker is stopping"))
            self._scheduler.stop(ending("the prefill worker is stopping"))
            await self._reads.close()

    def plan_step(self, tokens_per_s: float) -> StepPlan:
        self._admit_waiting()
        return self._scheduler.plan(tokens_per_s)

    def plan_probe(self, batch: StepBatch) -> StepPlan:
        return StepPlan(batch, [])

    def step_ended(self) -> None:
        self._admit_waiting()
        self._publish()

    def pausing(self) -> None:
        self._publish()

    def commit_step(self, over: CompletedStep[StepPlan], result: StepResult) -> None:
        for chunk in over.plan.chunks:  # before the commit sends the first tokens
            chunk.key.timeline.mark("step wait", over.started_s + self._wall_offset_s)
            count = chunk.end - chunk.start
            chunk.key.timeline.mark("chunk", over.ended_s + self._wall_offset_s, count)
        computed = self._scheduler.commit(over.plan, result)
        # after the readers' tasks, which the commit has woken
        asyncio.get_running_loop().call_soon(self._record, over, result, computed)

    def step_failed(self, plan: StepPlan, error: EngineError) -> None:
        log.error("step failed", detail=str(error), slices=len(plan.batch.slices))

    def abandon_step(self, plan: StepPlan, error: EngineError) -> None:
        self._scheduler.abandon_step(plan, error)

    def _record(
        self, over: CompletedStep[StepPlan], result: StepResult, computed: list[Chunk[Prompt]]
    ) -> None:
        process_gauges.show_step(
            "prefill", result.device_s, len(over.plan.batch.slices), result.shortages
        )
        tokens = sum(c.end - c.start for c in computed)
        metrics.TOKENS.labels("prompt").inc(tokens)
        self._counts.prompt_tokens += tokens
        started = over.started_s + self._wall_offset_s
        ended = over.ended_s + self._wall_offset_s
        if not result.failed and self._step_log.due(ended, chunks=True):
            spans = [(chunk.start, chunk.end) for chunk in over.plan.chunks]  # ended prompts' too
            self._step_log.record(spans, (), ended, ended - started)
        for chunk in computed:
            self._record_chunk(chunk, started, ended)

    def _record_chunk(self, chunk: Chunk[Prompt], started: float, ended: float) -> None:
        """Record the spans of a chunk. Its blocks were offered by now, unless they are converted
        before that."""
        prompt, size = chunk.key, self._pool.block_size
        tracing.record(
            tracing.CHUNK,
            started,
            ended,
            prompt.trace,
            start=chunk.start,
            end=chunk.end,
            critical=prompt.unanswered,
        )
        blocks = (-(-chunk.end // size) if chunk.last else chunk.end // size) - chunk.start // size
        if blocks and not prompt.converted_each:
            tracing.record(
                tracing.OFFER,
                ended,
                self._wall(),
                prompt.trace,
                blocks=blocks,
                hidden=not chunk.last,
            )
        if chunk.last:
            tracing.record(
                tracing.PREFILL,
                prompt.admitted_wall_s,
                ended,
                prompt.trace,
                cached_tokens=prompt.cached * size,
                read_tokens=prompt.read * size,
            )

    def _admit_waiting(self) -> None:
        """Admit waiting prompts, also beside a running step: an admitted prompt offers its cached
        blocks at once."""
        for prompt in self._scheduler.admit():
            self.loop.wake.set()
            if prompt.reading_to and prompt.source is not None:
                self._reads.start(prompt, prompt.source.worker)
            again, prompt.admitted_wall_s = prompt.admitted_wall_s > 0, self._wall()
            prompt.timeline.mark("prefill queue", prompt.admitted_wall_s)
            if again:  # it could not replace destinations of its READ, and is counted already
                continue
            metrics.QUEUE_SECONDS.observe(prompt.admitted_wall_s - prompt.arrived_wall_s)
            metrics.PREFIX_QUERIED_TOKENS.inc(len(prompt.tokens))
            metrics.PREFIX_CACHED_TOKENS.inc(prompt.cached * self._pool.block_size)
            tracing.record(
                tracing.PREFILL_QUEUE,
                prompt.arrived_wall_s,
                prompt.admitted_wall_s,
                prompt.trace,
                critical=prompt.unanswered,
            )

    def _ended(self, prompt: Prompt) -> None:
        self._scheduler.end(prompt)
        self._reads.cancel(prompt)
        if self._scheduler.waiting:  # its blocks may be enough for the next
            self.loop.wake.set()

    def _room(self, converted: bool) -> int:
        """Return the blocks that a grant of cached ones may pin. One that is `converted` takes
        further blocks: there are none while a prompt waits."""
        return 0 if converted and self._scheduler.waiting else sys.maxsize

    def _publish(self) -> None:
        self.feed.publish(*self._pool.drain_events())

    def _wall(self) -> float:
        return asyncio.get_running_loop().time() + self._wall_offset_s
