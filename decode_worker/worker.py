"""The decode worker: requests in, tokens out. Its loop plans, runs and commits steps.

    submit ─▶ credit ─▶ handoff (a task) ─▶ batch ─▶ plan ─ run ─ commit ─▶ outputs
                           └─ or prefilled here

One event loop owns all state. The device works between plan and commit, while the loop plans the
next step; handoff tasks only touch groups that no step computes on. The worker knows no gRPC:
links, peers, mover and engine are interfaces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

from baton.decode_worker import gauges
from baton.decode_worker.handoffs import FetchOutcome, Handoffs
from baton.decode_worker.requests import Requests, record_local_chunks, record_local_start
from baton.decode_worker.scheduler import DecodeScheduler
from baton.decode_worker.sequences import Group, Phase, Request, RequestUpdate
from baton.decode_worker.sessions import RouterSessions
from baton.decode_worker.speculator import Speculator
from baton.decode_worker.step_plan import StepPlan
from baton.decode_worker.submit_parser import parse_submit
from baton.engine.scheduling.batch import StepBatch, StepResult
from baton.engine.scheduling.blocks import BlockPool
from baton.engine.scheduling.engine import Engine
from baton.engine.scheduling.step_pipeline import CompletedStep
from baton.engine.scheduling.worker_loop import WorkerLoop
from baton.kv_transfer.conversion import Conversions, no_conversions
from baton.kv_transfer.mover import Mover
from baton.kv_transfer.peers.cached_prefix import CachedGranter
from baton.kv_transfer.peers.converted_prompt import Converter
from baton.kv_transfer.peers.grants import Grants
from baton.kv_transfer.peers.handoff_reads import ReadingWorker
from baton.kv_transfer.peers.registered_peers import Peers, degraded_entries
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime import logs, metrics
from baton.runtime.config import Config
from baton.runtime.errors import (
    BatonError,
    Draining,
    EngineError,
    HandoffError,
    OutOfBlocks,
    Overloaded,
    Unavailable,
    WorkerLost,
)
from baton.runtime.exposition import process_gauges
from baton.runtime.grammar.grammar_compiler import GrammarCompiler
from baton.runtime.wire import ModelLimits
from baton.runtime.worker.block_feed import BlockFeed
from baton.runtime.worker.router_links import Session

log = logs.get(__name__)

IDLE_POLL_S = 1.0  # the longest pause of an idle loop


class DecodeWorker:
    """All of a decode worker above its seams. `run` serves until it is cancelled."""

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
        speculator: Speculator | None = None,
        conversions: Conversions = no_conversions,
    ) -> None:
        self.worker_id = worker_id
        self.boot_id = boot_id
        self.loop: WorkerLoop[StepPlan] = WorkerLoop(
            self,
            engine,
            pool,
            has_work=lambda: self._scheduler.running > 0,
            mover_failure=mover.failure_reason,
            poll_s=IDLE_POLL_S,
        )
        self.health, self.draining = self.loop.health, self.loop.draining
        self._grammars = grammars or GrammarCompiler(None)
        self._compiling: set[asyncio.Task[None]] = set()  # grammars of requests not yet queued
        self._pool, self._peers = pool, peers
        self._mover = mover
        self._limits, self._local_tokens = limits, config.step.local_prefill_tokens
        self._last_end_s: float | None = None  # of a step that another one follows at once
        self._wall_offset_s = wall_offset_s  # time.time() minus the loop's time
        self._scheduler = DecodeScheduler(
            pool, config.step, limits.key, engine.draw_costs, speculator
        )
        reading = ReadingWorker(
            peers=peers,
            mover=mover,
            boot_id=boot_id,
            config=config.handoff,
            limits=limits,
            block_size=pool.block_size,
            new_id=new_id,
            wall_offset_s=wall_offset_s,
        )
        self._handoffs = Handoffs(reading, pool, self._scheduler, self.loop.wake.set)
        handoff, wake, size = config.handoff, self.loop.wake.set, pool.block_size
        converter = Converter(
            conversions, limits, mover, boot_id, handoff, unpin=pool.unpin, on_unpin=wake
        )
        spare_blocks = partial(gauges.spare_blocks, pool, self._scheduler)
        cached = CachedGranter(pool, limits, size, self.draining, spare_blocks, converter)
        self.grants = Grants(cached.admit, mover, boot_id, handoff, None, wake)
        self._requests = Requests(self._scheduler, limits, self._wall, config.step)
        self._sessions = RouterSessions(self.submit, self.cancel, config.router.link_grace_s)
        self._fetches: dict[Group, asyncio.Task[None]] = {}
        self.feed = BlockFeed(boot_id, pool.identities)

    def attach(self, hello: worker_pb2.RouterHello) -> tuple[worker_pb2.WorkerHello, Session]:
        attachment, lost = self._sessions.attach(hello)
        hello_back = self._limits.hello(
            self.worker_id, self.boot_id, "decode", self._pool.block_size, self._pool.total
        )
        hello_back.vocabulary = self._grammars.digest
        hello_back.step_tokens = hello_back.chunk_tokens = self._local_tokens
        hello_back.unknown_requests.extend(lost)
        return hello_back, attachment

    def load(self) -> worker_pb2.Load:
        load = gauges.load_of(self._pool, self._scheduler, self._requests)
        load.fetching = len(self._fetches)
        load.draining = self.draining.is_set()
        load.step_ms = self.loop.step_ms
        load.overdue_ms = int(1000 * self.health.overdue_s())
        load.not_ready_reason = self.health.not_ready_reason() or ""
        load.overdue_requests.extend(self._overdue_requests())
        load.degraded_peers.extend(self._peers.degraded())
        return load

    def publish_gauges(self) -> None:
        gauges.publish(self._pool, self._mover, self._scheduler, self._handoffs, self.grants)

    def _overdue_requests(self) -> list[str]:
        """Return the requests of the running step, once it is overdue."""
        plan = self.loop.overdue_plan()
        if plan is None:
            return []
        requests = [s.request for s in plan.decoding] + [c.key.request for c in plan.chunks]
        return sorted({request.request_id for request in requests})

    def submit(self, submit: worker_pb2.Submit, emit: Callable[[RequestUpdate], None]) -> None:
        """Queue a request. Raises BatonError if it is refused."""
        if self.draining.is_set():
            raise Draining("the decode worker is stopping")
        if self._requests.get(submit.request_id) is not None:
            raise Unavailable("another router's request has this id on this worker")
        loop = asyncio.get_running_loop()
        now = loop.time()
        request = parse_submit(submit, self._limits, emit, now_s=now, wall_s=self._wall())
        if submit.sampling.HasField("grammar"):
            self._grammars.check(submit.sampling.grammar)
            compiling = asyncio.create_task(self._queue_constrained(request))
            self._compiling.add(compiling)
            compiling.add_done_callback(self._compiling.discard)
        else:
            self._scheduler.submit(request)
        self._requests.add(request)
        if submit.deadline_ms:
            request.deadline = loop.call_later(
                submit.deadline_ms / 1000, self._deadline_passed, request
            )
        self._admit()  # a step may be running: the handoff opens beside it

    async def _queue_constrained(self, request: Request) -> None:
        """Compile the request's grammar, then queue the request; if that fails, it fails alone."""
        message = request.wire_sampling.grammar
        try:
            grammar = await self._grammars.compiled(message, request.trace)
            for sequence in request.sequences:
                sequence.masks = self._grammars.masks(message, grammar, sequence.output)
            if not request.ended:
                self._scheduler.submit(request)
        except BatonError as error:
            for sequence in request.sequences:
                self._requests.fail(sequence, error)
        except Exception as error:  # should be impossible: one request ends, not all
            log.exception("grammar failed", request_id=request.request_id)
            for sequence in request.sequences:
                reason = f"the grammar could not be used: {type(error).__name__}"
                self._requests.fail(sequence, EngineError(reason))
        self._admit()

    def cancel(self, request_id: str, attempt: int, choices: Collection[int] = ()) -> None:
        """Cancel the named choices of a request, or all where none is named."""
        request = self._requests.get(request_id)
        if request is not None and request.attempt == attempt:
            self._requests.cancel(request, choices)
            self._after_ends()

    # -- the loop -----------------------------------------------------------------------------

    async def drain(self, within_s: float) -> None:
        """Refuse new requests; return once every request has ended, or after `within_s`. Requests
        that are left are returned to their routers when `run` is cancelled."""
        await self.loop.drain(self._requests.idle, within_s)

    async def run(self) -> None:
        """Serve until cancelled; then every request fails for another worker to continue, every
        handoff is closed and every block is free."""
        try:
            await self.loop.run()
        finally:
            for compiling in self._compiling:
                compiling.cancel()
            ending = Draining if self.draining.is_set() else WorkerLost
            for request in self._requests.living():
                for sequence in request.sequences:
                    self._requests.fail(sequence, ending("the decode worker is stopping"))
            self._after_ends()
            if self._fetches:
                await asyncio.wait(set(self._fetches.values()))
            await self._handoffs.finished()

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
            "role": "decode",
            "blocks": self._pool.counts().by_state(),
            "requests": len(self._requests.living()),
            "waiting": self._scheduler.waiting,
            "running": self._scheduler.running,
            "step_s": self.loop.steps.running_s(),  # so far; None between steps
            "open_handoffs": self._handoffs.open + self.grants.open,
            "sessions": self._sessions.count,
            "draining": self.draining.is_set(),
            "work": self.loop.work(self._scheduler.queued_tokens) | self._requests.work(),
            "preemptions": self._scheduler.preemptions,
            "degraded_peers": degraded_entries(self._peers),
        }

    def plan_step(self, tokens_per_s: float) -> StepPlan:
        self._refuse_blocked()
        # Running sequences grow before new grants take blocks.
        plan = self._scheduler.plan(tokens_per_s)
        self._requests.record_preemptions(self._scheduler.preemptions)
        self._take_back_if_starved()
        self._admit()
        return plan

    def plan_probe(self, batch: StepBatch) -> StepPlan:
        return StepPlan(batch, [], [])

    def step_ended(self) -> None:
        if self.loop.steps:  # else the next plan comes first
            self._admit()
        self._publish()

    def pausing(self) -> None:
        self._last_end_s = None

    def _admit(self) -> None:
        for group in self._scheduler.admit():
            now_wall = self._wall()
            request = group.request
            cached_tokens = group.held * self._pool.block_size
            self._requests.record_admission(group, cached_tokens, now_wall)
            if group.phase is Phase.FETCHING:
                with logs.bind_request(request.request_id, attempt=request.attempt):
                    fetch = self._fetches[group] = asyncio.create_task(self._fetch(group))
                fetch.add_done_callback(partial(self._fetch_ended, group))
            else:
                self.loop.wake.set()
                record_local_start(group, now_wall)

    def _refuse_blocked(self) -> None:
        """Refuse groups that do not fit beside a lasting quarantine: they may fit elsewhere."""
        for group in self._scheduler.blocked_by_quarantine(asyncio.get_running_loop().time()):
            self._fail(group, Overloaded("too much of the worker's pool is in quarantine"))

    def commit_step(self, over: CompletedStep[StepPlan], result: StepResult) -> None:
        if self._last_end_s is not None:
            result = replace(result, interval_s=over.ended_s - self._last_end_s)
        times = over.started_s + self._wall_offset_s, over.ended_s + self._wall_offset_s
        outcome = self._scheduler.commit(over.plan, result)
        self._requests.record_step(over.plan, result, outcome.chunks, *times)
        process_gauges.show_step(
            "decode", result.device_s, len(over.plan.batch.slices), result.shortages
        )
        self._requests.record_output(outcome.tokens)
        for sequence, drawn in outcome.drawn:
            self._requests.accept(sequence, drawn)
        for run in outcome.runs:
            self._requests.accept_run(run)
        for sequence in outcome.broken:
            metrics.BROKEN_SLICES.inc()
            self._requests.fail(sequence, EngineError("the model's numbers are not finite"))
        for sequence, reason in outcome.failed:
            self._requests.fail(sequence, reason)
        self._after_ends()
        self._last_end_s = over.ended_s if self._scheduler.running else None
        record_local_chunks(outcome.chunks, *times, self._pool.block_size)

    def step_failed(self, plan: StepPlan, error: EngineError) -> None:
        self._last_end_s = None
        log.error("step failed", detail=str(error), slices=len(plan.batch.slices))

    def abandon_step(self, plan: StepPlan, error: EngineError) -> None:
        for sequence in self._scheduler.abandon_step(plan):
            self._requests.fail(sequence, error)
        self._after_ends()

    def _wall(self) -> float:
        return asyncio.get_running_loop().time() + self._wall_offset_s

    def _publish(self) -> None:
        self.feed.publish(*self._pool.drain_events())

    async def _fetch(self, group: Group) -> None:
        """Fetch one group's KV, or let it be prefilled here, or fail it."""
        try:
            fetched = await self._handoffs.fetch(group, self._on_first)
            if fetched is FetchOutcome.VERIFIED:
                self._scheduler.fetched(group)
                group.request.batched_wall_s = self._wall()
            elif group.live:
                self._scheduler.to_local(group)
                record_local_start(group, self._wall())
        except OutOfBlocks:
            log.info("grant revoked", reason="its quarantined blocks cannot be replaced")
        except BatonError as error:
            self._fail(group, error)
        except Exception as error:  # should be impossible: one request ends, not all
            log.exception("handoff failed")
            self._fail(group, HandoffError(f"the handoff failed: {type(error).__name__}"))

    def _fetch_ended(self, group: Group, _: asyncio.Task[None]) -> None:
        """Take the group out of FETCHING, even if its task was cancelled before it began."""
        del self._fetches[group]
        if group.phase is Phase.FETCHING:
            self._scheduler.requeue(group)
        self._publish()
        self.loop.wake.set()

    def _fail(self, group: Group, error: BatonError) -> None:
        for sequence in group.sequences:
            self._requests.fail(sequence, error)

    def _on_first(self, group: Group, first: handoff_pb2.FirstTokens) -> None:
        request = group.request
        request.cached_tokens = max(request.cached_tokens, first.cached_tokens)
        self._requests.accept_first(group, first)
        if any(sequence.ended for sequence in group.sequences):
            self._after_ends()

    def _take_back_if_starved(self) -> None:
        group = self._scheduler.youngest_fetching() if self._scheduler.starved else None
        if group is not None and group in self._fetches:
            log.info(
                "grant revoked",
                request_id=group.request.request_id,
                reason="a running sequence needs its blocks",
            )
            if not self._fetches[group].cancelling():
                metrics.PREEMPTIONS.labels("fetching").inc()
            self._fetches[group].cancel()

    def _after_ends(self) -> None:
        """Cancel the handoffs of groups whose sequences have ended, and plan again."""
        for group, task in self._fetches.items():
            if not group.live:
                task.cancel()
        self.loop.wake.set()

    def _deadline_passed(self, request: Request) -> None:
        self._requests.deadline_passed(request)
        self._after_ends()
