"""The loop that both kinds of worker run: plan, run, commit, and what a step shows of them.

    wake ─▶ plan ─▶ submit ─▶ next ─▶ commit ─▶ step_ended ─▶ plan ...
             └─ nothing to do: a probe, or pause until `wake`

A worker gives its plans and takes their results through `StepOwner`. Knows no requests, no links
and no metrics. Owns the step pipeline and the health that follows from it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from baton.engine.scheduling.batch import StepBatch, StepResult
from baton.engine.scheduling.blocks import BlockPool
from baton.engine.scheduling.engine import Engine
from baton.engine.scheduling.step_health import StepHealth
from baton.engine.scheduling.step_pipeline import CompletedStep, Planned, StepPipeline
from baton.runtime.errors import EngineError

STEP_SMOOTHING = 0.1  # share of the newest step in `step_ms`

Plan = TypeVar("Plan", bound=Planned)


class StepOwner(Protocol[Plan]):
    """A worker, as its loop sees it. All methods return at once."""

    def plan_step(self, tokens_per_s: float) -> Plan:
        """Plan the next step; one with an empty batch if there is nothing to compute."""
        ...

    def plan_probe(self, batch: StepBatch) -> Plan:
        """Return a plan of this batch, which belongs to no request."""
        ...

    def commit_step(self, over: CompletedStep[Plan], result: StepResult) -> None:
        """Take the result of a step."""
        ...

    def abandon_step(self, plan: Plan, error: EngineError) -> None:
        """Give up a step that failed, which was no probe."""
        ...

    def step_failed(self, plan: Plan, error: EngineError) -> None:
        """Log a step or probe that failed."""
        ...

    def step_ended(self) -> None:
        """Act between two steps, after each commit."""
        ...

    def pausing(self) -> None:
        """Act before the loop waits for `wake`."""
        ...


class WorkerLoop(Generic[Plan]):
    """`run` serves a worker until it is cancelled. `wake` makes an idle loop plan; without a
    `poll_s` nothing else does."""

    def __init__(
        self,
        owner: StepOwner[Plan],
        engine: Engine,
        pool: BlockPool,
        *,
        has_work: Callable[[], bool],
        mover_failure: Callable[[], str | None],
        poll_s: float | None = None,
    ) -> None:
        self._owner = owner
        self._block_size = pool.block_size
        self._poll_s = poll_s
        self.steps: StepPipeline[Plan] = StepPipeline(engine)
        self.wake = asyncio.Event()
        self.draining = asyncio.Event()
        self.step_ms = 0.0  # smoothed
        self.busy_s = 0.0  # device time of all committed steps
        self.committed_steps = 0
        self.health = StepHealth(
            pool,
            steps=self.steps,
            has_work=has_work,
            mover_failure=mover_failure,
            wake=self.wake.set,
        )

    async def run(self) -> None:
        """Plan, submit and commit steps until cancelled; then abandon those under way."""
        try:
            while True:
                self.wake.clear()
                plan = self._owner.plan_step(self.steps.tokens_per_s())
                if not plan.batch.slices and not self.steps:
                    plan = self._owner.plan_probe(self.health.probe_batch())
                if plan.batch.slices:
                    self._submit(plan)
                elif not self.steps:
                    self._owner.pausing()
                    await self._pause()
                while (over := await self.steps.next()) is not None:
                    self._commit(over)
                    self._owner.step_ended()
        finally:
            self.steps.close()

    async def drain(self, idle: asyncio.Event, within_s: float) -> None:
        """Set `draining`; return once `idle` is set, or after `within_s`."""
        self.draining.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await idle.wait()

    def work(self, queued_tokens: int) -> dict[str, float]:
        """Return the part of the worker's audit from which a role controller learns its speed."""
        return {
            "busy_s": self.busy_s,
            "steps": self.committed_steps,
            "queued_tokens": queued_tokens,
            "block_tokens": self._block_size,
        }

    def overdue_plan(self) -> Plan | None:
        """Return the running step's plan, if it is overdue."""
        plan = self.steps.running()
        return plan if plan is not None and self.health.overdue_s() else None

    async def _pause(self) -> None:
        """Wait for `wake`, at most `poll_s`."""
        if self._poll_s is None:
            await self.wake.wait()
            return
        timer = asyncio.get_running_loop().call_later(self._poll_s, self.wake.set)
        try:
            await self.wake.wait()
        finally:
            timer.cancel()

    def _submit(self, plan: Plan) -> None:
        try:
            self.steps.submit(plan)
        except EngineError as error:
            self._fail(plan, error)

    def _commit(self, over: CompletedStep[Plan]) -> None:
        if isinstance(over.outcome, EngineError):
            self._fail(over.plan, over.outcome)
        elif not self.health.record_step(over.plan.batch, over.outcome):
            self.step_ms += STEP_SMOOTHING * (over.outcome.device_s * 1000 - self.step_ms)
            self.busy_s += over.outcome.device_s
            self.committed_steps += 1
            self._owner.commit_step(over, over.outcome)

    def _fail(self, plan: Plan, error: EngineError) -> None:
        self._owner.step_failed(plan, error)
        if not self.health.record_step(plan.batch, error):
            self._owner.abandon_step(plan, error)
