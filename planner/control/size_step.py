"""One step of the number of workers, bounded in time, under a leadership that outlasts each call.

    renew ─▶ memory ─▶ number as it is ─▶ dry run ─▶ memory ─▶ drain of the one that leaves ─▶ PATCH

Before each call the leadership is renewed, and the call is not made unless the leadership lasts
longer than the call may. No call takes longer than CALL_S, and no step longer than STEP_S: a
leader whose lease has ended stops before the next call, and its successor knows the step from the
memory. A worker drains only once a dry run was accepted, so that an account without rights drains
none. Where the PATCH fails after that, the drained worker ends, and its pod starts it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from baton.planner.control.order_rules import OrderUnanswered
from baton.planner.control.worker_count import WorkerCount
from baton.planner.fleet_size import SizeStep
from baton.planner.overdue_workers import WorkerProblem
from baton.runtime import logs
from baton.runtime.errors import BatonError, Unavailable

CALL_S = 4.0  # of one call: an order may take as long, and a leadership lasts longer (TERM_S)
STEP_S = 20.0  # of all calls: roles are not decided for as long

T = TypeVar("T")
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

    async def problems(self, missing: Collection[str]) -> Mapping[str, WorkerProblem]:
        """Return what keeps these workers from getting ready, by worker id, as far as the
        orchestrator says it."""
        ...

    async def close(self) -> None:
        """End the connections."""
        ...


@dataclass(frozen=True, slots=True)
class SizeGate:
    """The role loop's answers before each call, after it has renewed its leadership. `hindrance`
    returns why no step may begin or go on, `lost` the same once a worker drains, when the age of
    the reports does not matter any more, and `keep` why the successor's memory could not be
    written; all return None otherwise."""

    hindrance: Callable[[], Awaitable[str | None]]
    lost: Callable[[], Awaitable[str | None]]
    keep: Callable[[SizeStep], Awaitable[str | None]]


class StepStopped(Exception):
    """The step was not continued, since this controller may not act now."""


class StepRun:
    """A step that is being taken. `drain` orders a boot to drain, and returns once the worker has
    accepted that. `drained`: it has. `may_drain`: it has, or may still do so."""

    def __init__(
        self,
        step: SizeStep,
        pool: WorkerPool,
        drain: Callable[[str], Awaitable[None]],
        gate: SizeGate,
    ) -> None:
        self._step = step
        self._pool = pool
        self._drain = drain
        self._gate = gate
        self.drained = False
        self.may_drain = False

    async def take(self, seen: WorkerCount) -> None:
        """Ask for the number. Raises StepStopped if this controller may not act, before any call
        with effect or between two; BatonError if a call failed or took too long."""
        try:
            async with asyncio.timeout(STEP_S):
                await self._take(seen)
        except TimeoutError as error:
            raise Unavailable(
                f"the step was not complete after {STEP_S:g} s; what its last call asked for may "
                "still happen: the next reading of the number shows it"
            ) from error

    async def _take(self, seen: WorkerCount) -> None:
        step, leaving = self._step, self._step.leaving
        if (stopped := await self._gate.hindrance()) is not None:
            raise StepStopped(stopped)
        await self._keep()
        if leaving is not None:
            found = await self._unchanged(seen)
            await self._call("the dry run", lambda: self._pool.check(found, step.workers))
            await self._keep()  # again, since a successor counts the age of the order from here
            await self._call("the order to drain", lambda: self._order(leaving.boot_id))
            self.drained = True
            log.info(
                "worker drain ordered",
                worker=leaving.worker_id,
                workers=step.workers,
                before=step.before,
            )
        now = await self._unchanged(seen)
        await self._call("the request", lambda: self._pool.resize(now, step.workers))

    async def _keep(self) -> None:
        if (stopped := await self._gate.keep(self._step)) is not None:
            raise StepStopped(stopped)

    async def _order(self, boot_id: str) -> None:
        self.may_drain = True
        try:
            await self._drain(boot_id)
        except OrderUnanswered:
            raise
        except BatonError:
            self.may_drain = False
            raise

    async def _unchanged(self, seen: WorkerCount) -> WorkerCount:
        """Return the number as it is now: its version changes with each pod that is ready or not.
        Raises BatonError if another number was asked for since."""
        found = await self._call("the reading of the number", self._pool.count)
        if found.asked != seen.asked:
            raise BatonError(
                f"the number of workers asked for is now {found.asked}; it was {seen.asked} at "
                "the decision"
            )
        return found

    async def _call(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """Make one call, if this controller may still act."""
        asks = self._gate.lost if self.drained else self._gate.hindrance
        if (stopped := await asks()) is not None:
            raise StepStopped(stopped)
        return await within_call_time(name, call())


async def within_call_time(name: str, call: Awaitable[T]) -> T:
    """Return a call's answer. Raises Unavailable after CALL_S."""
    try:
        async with asyncio.timeout(CALL_S):
            return await call
    except TimeoutError as error:
        raise Unavailable(
            f"{name} has no answer after {CALL_S:g} s; what it asked for may still happen"
        ) from error
