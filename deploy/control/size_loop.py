"""Asks the orchestrator for more or fewer workers, beside the role loop, which leads and reads.

    number asked for ─▶ SizeController ─▶ metrics, log ─▶ a step: memory ─▶ dry run ─▶ drain of the
    worker that leaves ─▶ PATCH

A worker drains only once a dry run was accepted, so that an account without rights drains none.
Where the PATCH fails after that, the drained worker ends, and its pod starts it again: the number
stays, and the next step waits. Owns no worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from baton.deploy.control import control_metrics
from baton.deploy.control.worker_count import WorkerCount
from baton.planner.controller import Decision
from baton.planner.controller_load import FleetSample
from baton.planner.fleet_size import PoolState, SizeController, SizeDecision, SizeStep
from baton.runtime import logs
from baton.runtime.errors import BatonError

ANSWER_S = 0.5  # wait for the number in one tick; a later answer is for the next tick
REPEAT_S = 60.0  # before an unchanged reason is logged again

log = logs.get(__name__)


class WorkerPool(Protocol):
    """All methods raise BatonError if the orchestrator refuses or does not answer."""

    async def count(self) -> WorkerCount: ...

    async def check(self, seen: WorkerCount, workers: int) -> None:
        """Ask whether `resize` would be accepted now. Changes nothing."""
        ...

    async def resize(self, seen: WorkerCount, workers: int) -> None:
        """Ask for another number, if the present one is still `seen`."""
        ...

    async def close(self) -> None:
        """End the connections."""
        ...


@dataclass(frozen=True, slots=True)
class SizeGate:
    """The role loop's answers before each action. `hindrance` returns why no action may be taken
    now, `keep` why the successor's memory could not be written; both return None otherwise."""

    hindrance: Callable[[], str | None]
    keep: Callable[[SizeStep], Awaitable[str | None]]


class SizeLoop:
    """`drain` orders a boot to drain, and returns once the worker has accepted that."""

    def __init__(
        self,
        pool: WorkerPool,
        controller: SizeController,
        drain: Callable[[str], Awaitable[None]],
        clock: Callable[[], float],
    ) -> None:
        self.controller = controller
        self._pool = pool
        self._drain = drain
        self._clock = clock
        self._reading: asyncio.Task[WorkerCount] | None = None
        self._logged: tuple[str, int | None] | None = None
        self._logged_s = 0.0
        self._unread_s = -math.inf  # when it was last logged that the number is not known
        self.decision: SizeDecision | None = None

    async def tick(
        self, roles: Decision, sample: FleetSample, changing: int, gate: SizeGate
    ) -> SizeDecision | None:
        """Decide and act once, as the leader. Return the decision; None while the number is not
        known."""
        seen = await self._count()
        if seen is None:
            return None
        control_metrics.ASKED_WORKERS.set(seen.asked)
        pool = PoolState(seen.asked, seen.last_id, changing)
        decision = self.controller.decide(roles, sample, pool, self._clock())
        self.decision = decision
        control_metrics.SIZE_DECISIONS.labels(decision.reason).inc()
        self._log(decision, seen.asked)
        if decision.step is not None:
            await self._act(decision.step, seen, gate)
        return decision

    async def close(self) -> None:
        try:
            if self._reading is not None:
                self._reading.cancel()
                with contextlib.suppress(asyncio.CancelledError, BatonError):
                    await self._reading
        finally:
            await self._pool.close()

    async def _count(self) -> WorkerCount | None:
        """Return the number asked for; None where it is not known yet, or not now."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._pool.count())
        await asyncio.wait({self._reading}, timeout=ANSWER_S)
        if not self._reading.done():
            return None
        reading, self._reading = self._reading, None
        try:
            return reading.result()
        except BatonError as error:
            control_metrics.SIZE_FAILURES.inc()
            if self._clock() - self._unread_s >= REPEAT_S:
                self._unread_s = self._clock()
                log.warning("number of workers not read", reason=str(error))
            return None

    async def _act(self, step: SizeStep, seen: WorkerCount, gate: SizeGate) -> None:
        fields = {"workers": step.workers, "before": step.before}
        reason = gate.hindrance() or await gate.keep(step) or gate.hindrance()
        if reason is not None:  # asked again, since the write may take long
            log.warning("workers not asked for", **fields, reason=reason)
            return
        drained = False
        try:
            if step.leaving is not None:
                await self._pool.check(await self._unchanged(seen), step.workers)
                if (reason := gate.hindrance()) is not None:
                    log.warning("workers not asked for", **fields, reason=reason)
                    return
                await self._drain(step.leaving.boot_id)
                drained = True
                log.info("worker leaves", worker=step.leaving.worker_id, **fields)
            await self._pool.resize(await self._unchanged(seen), step.workers)
        except BatonError as error:
            self.controller.failed(self._clock())
            control_metrics.SIZE_FAILURES.inc()
            log.warning("workers not asked for", **fields, drained=drained, reason=str(error))
        else:
            self.controller.took(step, self._clock())
            log.info("workers asked for", **fields)

    async def _unchanged(self, seen: WorkerCount) -> WorkerCount:
        """Return the number as it is now: its version changes with each pod that is ready or not.
        Raises BatonError if another number was asked for since."""
        found = await self._pool.count()
        if found.asked != seen.asked:
            raise BatonError(
                f"the number of workers asked for is now {found.asked}; it was {seen.asked} at "
                "the decision"
            )
        return found

    def _log(self, decision: SizeDecision, asked: int) -> None:
        """Log a decision that differs from the last one, or once in REPEAT_S."""
        said = (decision.reason, decision.needed)
        if said == self._logged and decision.at_s - self._logged_s < REPEAT_S:
            return
        self._logged, self._logged_s = said, decision.at_s
        event = "size step decided" if decision.step is not None else "no size step"
        log.info(
            event,
            reason=decision.reason,
            detail=decision.text,
            asked=asked,
            needed=decision.needed,
        )
