"""Asks the orchestrator for more or fewer workers, beside the role loop, which leads and reads.

    number asked for ─▶ workers overdue ─▶ SizeController ─▶ metrics, log ─▶ a step (size_step.py)

A step that fails leaves the number as it is, or as its last call may still make it; the next step
waits. Owns no worker.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from baton.planner.control import control_metrics
from baton.planner.control.overdue_watch import OverdueWatch
from baton.planner.control.repeated_event import RepeatedEvent
from baton.planner.control.size_step import (
    SizeGate,
    StepRun,
    StepStopped,
    WorkerPool,
    within_call_time,
)
from baton.planner.control.worker_count import WorkerCount
from baton.planner.controller import Decision
from baton.planner.controller_load import FleetSample
from baton.planner.fleet_size import PoolState, SizeController, SizeDecision, SizeStep
from baton.planner.overdue_workers import OverdueWorker
from baton.runtime import logs
from baton.runtime.errors import BatonError

ANSWER_S = 0.5  # wait for the number in one tick; a later answer is for the next tick

log = logs.get(__name__)


class SizeLoop:
    """`drain` orders a boot to drain, and returns once the worker has accepted that. `start_s`: the
    longest start of a worker, after which it is overdue."""

    def __init__(
        self,
        pool: WorkerPool,
        controller: SizeController,
        drain: Callable[[str], Awaitable[None]],
        clock: Callable[[], float],
        start_s: float,
    ) -> None:
        self.controller = controller
        self._pool = pool
        self._drain = drain
        self._clock = clock
        self._watch = OverdueWatch(pool, start_s, clock)
        self._overdue: list[OverdueWorker] = []
        self._reading: asyncio.Task[WorkerCount] | None = None
        self._decided, self._stopped, self._unread = (RepeatedEvent() for _ in range(3))
        self.decision: SizeDecision | None = None

    async def tick(
        self, roles: Decision, sample: FleetSample, changing: frozenset[str], gate: SizeGate
    ) -> SizeDecision | None:
        """Decide and act once, as the leader. Return the decision; None while the number is not
        known."""
        seen = await self._count()
        if seen is None:
            return None
        control_metrics.ASKED_WORKERS.set(seen.asked)
        self._overdue = self._watch.look(seen, sample)
        overdue = len(self._overdue)
        pool = PoolState(seen.asked, seen.last_id, changing, overdue, seen.least)
        decision = self.controller.decide(roles, sample, pool, self._clock())
        self.decision = decision
        control_metrics.SIZE_DECISIONS.labels(decision.reason).inc()
        self._log(decision, seen.asked)
        if decision.step is not None:
            await self._act(decision.step, seen, gate)
        return decision

    def rest(self) -> None:
        """Report nothing: another controller leads, or none."""
        self._overdue = []
        self.decision = None
        control_metrics.ASKED_WORKERS.set(0)
        self._watch.rest()

    def report(self) -> dict[str, Any]:
        """Return the last decision and the overdue workers as JSON can hold them; empty without
        a decision."""
        if self.decision is None:
            return {}
        return {**asdict(self.decision), "overdue": [asdict(each) for each in self._overdue]}

    async def close(self) -> None:
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(self._pool.close)
            closing.push_async_callback(self._watch.close)
            if self._reading is not None:
                self._reading.cancel()
                with contextlib.suppress(asyncio.CancelledError, BatonError):
                    await self._reading

    async def _count(self) -> WorkerCount | None:
        """Return the number asked for; None where it is not known yet, or not now."""
        if self._reading is None:
            counting = within_call_time("the reading of the number", self._pool.count())
            self._reading = asyncio.create_task(counting)
        await asyncio.wait({self._reading}, timeout=ANSWER_S)
        if not self._reading.done():
            return None
        reading, self._reading = self._reading, None
        try:
            return reading.result()
        except BatonError as error:
            control_metrics.SIZE_FAILURES.inc()
            if self._unread.should_log(str(error), self._clock()):
                log.warning("number of workers not read", reason=str(error))
            return None

    async def _act(self, step: SizeStep, seen: WorkerCount, gate: SizeGate) -> None:
        fields = {"workers": step.workers, "before": step.before}
        run = StepRun(step, self._pool, self._drain, gate)
        try:
            await run.take(seen)
        except (BatonError, StepStopped) as error:
            leaving = None if step.leaving is None else step.leaving.boot_id  # its counters grow
            said = (step.workers, step.before, leaving, run.drained, str(error))
            if self._stopped.should_log(said, self._clock()):
                log.warning(
                    "workers not asked for", **fields, drained=run.drained, reason=str(error)
                )
            if run.drained or not isinstance(error, StepStopped):
                self.controller.failed(self._clock())
                control_metrics.SIZE_FAILURES.inc()
            if run.may_drain and not run.drained and step.leaving is not None:
                self.controller.unanswered(step.leaving.worker_id, self._clock())
        else:
            self.controller.took(step, self._clock())
            log.info("workers asked for", **fields)

    def _log(self, decision: SizeDecision, asked: int) -> None:
        if not self._decided.should_log((decision.reason, decision.needed), decision.at_s):
            return
        log.info(
            "size step withheld" if decision.step is None else "size step decided",
            reason=decision.reason,
            detail=decision.text,
            asked=asked,
            needed=decision.needed,
        )
