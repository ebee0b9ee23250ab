"""The prefill worker: handoffs in, KV offers out. Its loop plans, runs and commits steps.

    open ─▶ queue ─▶ blocks for all of it ─▶ plan ─ run ─ commit ─▶ offers, first tokens
                                               └── chunk after chunk ──┘

One event loop owns all state; the next step is planned while one runs. The worker sends no tokens
to routers, only its load; it answers the readers that opened a handoff, through the granter.
"""

from __future__ import annotations

import asyncio
from typing import Any

from baton.engine.scheduling.batch import StepBatch, StepResult
from baton.engine.scheduling.blocks import BlockPool
from baton.engine.scheduling.chunks import Chunk
from baton.engine.scheduling.engine import Engine
from baton.engine.scheduling.step_pipeline import CompletedStep
from baton.engine.scheduling.worker_loop import WorkerLoop
from baton.kv_transfer.checksum_cache import ChecksumCache
from baton.kv_transfer.granter import GranterLink, GrantReport, grant
from baton.kv_transfer.mover import Mover
from baton.prefill_worker.opening_parser import parse_opening
from baton.prefill_worker.prompts import Prompt
from baton.prefill_worker.scheduler import PrefillScheduler, StepPlan
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime import logs, metrics, tracing
from baton.runtime.config import Config
from baton.runtime.errors import BatonError, Draining, EngineError, Overloaded, WorkerLost
from baton.runtime.exposition import process_gauges
from baton.runtime.grammar.grammar_compiler import GrammarCompiler
from baton.runtime.links import LinkClosed
from baton.runtime.wire import ModelLimits
from baton.runtime.worker.block_feed import BlockFeed

log = logs.get(__name__)

EXPECTED_READS_S = 5.0  # a reader measures READs after its handshake


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
        limits: ModelLimits,
        config: Config,
        wall_offset_s: float,
        grammars: GrammarCompiler | None = None,
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
        self._compiling: set[asyncio.Task[None]] = set()  # grammars of prompts not yet queued
        self._pool = pool
        self._mover = mover
        self._limits = limits
        self._config = config
        self._wall_offset_s = wall_offset_s  # time.time() minus the loop's time
        self._checksum_cache = ChecksumCache(pool.total)
        self._scheduler = PrefillScheduler(
            pool, config.step, self._checksum_cache.forget, engine.draw_costs
        )
        self._open_handoffs = 0
        self._granted: set[Prompt] = set()  # those of open handoffs
        self._no_handoff = asyncio.Event()
        self._no_handoff.set()
        self.feed = BlockFeed(boot_id, pool.identities)

    def expect_reads(self) -> None:
        """Serve peers' READs promptly for a while: a reader that has completed its handshake
        measures READs before any lease exists."""
        self._mover.hold_progress()
        asyncio.get_running_loop().call_later(EXPECTED_READS_S, self._mover.drop_progress)

    async def serve_handoff(self, link: GranterLink) -> None:
        """Serve one handoff stream; returns when the handoff is over, however long after its
        stream has broken."""
        self._open_handoffs += 1
        self._no_handoff.clear()
        try:
            report = await grant(
                link,
                self.admit,
                self._mover,
                self.boot_id,
                self._config.handoff,
                self._checksum_cache,
            )
            metrics.HANDOFFS.labels(report.end).inc()
            if report.end == "expired":
                metrics.LEASES_EXPIRED.inc()
            _log_handoff(report)
        finally:
            self._open_handoffs -= 1
            if not self._open_handoffs:
                self._no_handoff.set()

    def admit(self, opening: handoff_pb2.OpenHandoff) -> Prompt:
        """Queue the prompt of a handoff. Raises BatonError if it is refused."""
        if self.draining.is_set():
            raise Draining("the prefill worker is stopping")
        prompt = parse_opening(
            opening, self._limits, self._pool.block_size, self._ended, wall_s=self._wall()
        )
        if opening.sampling.HasField("grammar"):
            self._grammars.check(opening.sampling.grammar)
            compiling = asyncio.create_task(self._queue_constrained(prompt, opening))
            self._compiling.add(compiling)
            compiling.add_done_callback(self._compiling.discard)
        else:
            self._scheduler.submit(prompt)
            self._admit_waiting()
        self._granted.add(prompt)
        return prompt

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
        self._admit_waiting()

    def attach(
        self, hello: worker_pb2.RouterHello
    ) -> tuple[worker_pb2.WorkerHello, PrefillSession]:
        hello_back = self._limits.hello(
            self.worker_id, self.boot_id, "prefill", self._pool.block_size, self._pool.total
        )
        hello_back.vocabulary = self._grammars.digest
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
            fetching=self._open_handoffs,
            quarantined_blocks=counts.quarantined,
            draining=self.draining.is_set(),
            step_ms=self.loop.step_ms,
            overdue_ms=int(1000 * self.health.overdue_s()),
            not_ready_reason=self.health.not_ready_reason() or "",
            overdue_requests=self._overdue_requests(),
        )

    def publish_gauges(self) -> None:
        """Set the gauges of this worker, when its metrics are scraped."""
        now = self._wall()
        process_gauges.set_pool_gauges(self._pool.counts().by_state())
        metrics.OLDEST_CHECKSUM_SECONDS.set(self._mover.oldest_checksum_s())
        process_gauges.set_handoff_gauges(
            ("reading" if prompt.pinned else "waiting", now - prompt.arrived_wall_s)
            for prompt in self._granted
        )
        metrics.RUNNING_REQUESTS.set(self._scheduler.computing)
        metrics.WAITING_REQUESTS.set(self._scheduler.waiting)
        metrics.QUEUED_TOKENS.set(self._scheduler.queued_tokens)

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
            "open_handoffs": self._open_handoffs,
            "draining": self.draining.is_set(),
        }

    async def drain(self, within_s: float) -> None:
        """Refuse new handoffs; return once every offered block was read or its lease is over, or
        after `within_s`. Prompts that are not complete then fail when `run` is cancelled."""
        await self.loop.drain(self._no_handoff, within_s)

    async def run(self) -> None:
        """Serve until cancelled; then every prompt that is not complete fails, so that its
        reader goes elsewhere at once. Pinned blocks stay pinned until their handoff ends."""
        try:
            await self.loop.run()
        finally:
            for compiling in self._compiling:
                compiling.cancel()
            ending = Draining if self.draining.is_set() else WorkerLost
            self._scheduler.stop(ending("the prefill worker is stopping"))

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
        metrics.TOKENS.labels("prompt").inc(sum(c.end - c.start for c in computed))
        started = over.started_s + self._wall_offset_s
        ended = over.ended_s + self._wall_offset_s
        for chunk in computed:
            prompt = chunk.key
            tracing.record(
                tracing.CHUNK, started, ended, prompt.trace, start=chunk.start, end=chunk.end
            )
            if chunk.last:
                cached, admitted = prompt.cached * self._pool.block_size, prompt.admitted_wall_s
                tracing.record(tracing.PREFILL, admitted, ended, prompt.trace, cached_tokens=cached)

    def _admit_waiting(self) -> None:
        """Admit waiting prompts, also beside a running step: an admitted prompt offers its cached
        blocks at once."""
        for prompt in self._scheduler.admit():
            self.loop.wake.set()
            prompt.admitted_wall_s = self._wall()
            prompt.timeline.mark("prefill queue", prompt.admitted_wall_s)
            metrics.QUEUE_SECONDS.observe(prompt.admitted_wall_s - prompt.arrived_wall_s)
            metrics.PREFIX_QUERIED_TOKENS.inc(len(prompt.tokens))
            metrics.PREFIX_CACHED_TOKENS.inc(prompt.cached * self._pool.block_size)
            tracing.record(
                tracing.QUEUE, prompt.arrived_wall_s, prompt.admitted_wall_s, prompt.trace
            )

    def _ended(self, prompt: Prompt) -> None:
        self._granted.discard(prompt)
        self._scheduler.end(prompt)
        if self._scheduler.waiting:  # its blocks may be enough for the next
            self.loop.wake.set()

    def _publish(self) -> None:
        self.feed.publish(*self._pool.drain_events())

    def _wall(self) -> float:
        return asyncio.get_running_loop().time() + self._wall_offset_s


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
