"""Decides whether a request whose worker failed is retried, and when its retry may begin.

    decide ─▶ Retry ─▶ acquire (the retry budget) ─▶ the dispatcher places the next attempt
       └────▶ the error that ends the request: its attempts are used up

    acquire ─▶ queue ── a permit was released, failed or lapsed ──▶ a permit, or refused

There are two queues, in order of arrival: of requests whose worker had no memory for them, and of
all others, which come first. A request that waits costs nothing: the end of a permit calls the
next one, and one timer calls when permits lapse. Knows one attempt at a time, and no requests: the
dispatcher owns those and acts on the verdict. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from baton.router.dispatch.attempt import Attempt
from baton.router.dispatch.retry_budget import RetryBudget, RetryPermit
from baton.runtime import metrics
from baton.runtime.config import RouterConfig
from baton.runtime.errors import (
    BatonError,
    Draining,
    OutOfMemory,
    Overloaded,
    StalePlacement,
    WorkerLost,
)

BUSY_PAUSE_S = 0.25  # before a request that has begun asks an overloaded worker again


@dataclass(frozen=True, slots=True)
class Retry:
    """The verdict that a request goes on. `returned`: a draining worker returned it and nothing
    failed, so it needs no permit. `no_memory`: its worker had no memory for it, which the budget
    counts apart. `reason` is a label of the metric."""

    pause_s: float
    returned: bool
    no_memory: bool
    reason: str


class RetryPolicy:
    """`active` returns the number of attempts that the router has now: the budget is a share of
    it."""

    def __init__(self, config: RouterConfig, active: Callable[[], int]) -> None:
        self._max_attempts = config.max_attempts
        self._budget = RetryBudget(config.retry_share, config.retry_floor)
        self._queue = MigrationQueue(self._budget, active)

    def recheck(self) -> None:
        """Look for permits after the number of active attempts has grown."""
        self._queue.recheck()

    def decide(self, attempt: Attempt, error: BatonError) -> Retry:
        """End the permit of an attempt that failed with `error`, and return how its request is
        retried. Raises the error that ends it."""
        returned, overloaded = isinstance(error, Draining), isinstance(error, Overloaded)
        if isinstance(error, Overloaded):
            attempt.busy = error
        if returned or overloaded:  # neither counts as a failure
            self.release(attempt)
        elif attempt.permit is not None:
            self._queue.failed(attempt.permit, short=isinstance(error, OutOfMemory))
            attempt.permit = None
        if not returned and attempt.failures >= self._max_attempts:
            metrics.RETRIES_REFUSED.labels("attempts").inc()
            raise attempt.busy or error
        paused = overloaded and attempt.active_request.begun
        return Retry(
            pause_s=BUSY_PAUSE_S * attempt.attempt if paused else 0.0,
            returned=returned,
            no_memory=isinstance(error, OutOfMemory),
            reason=_reason(error),
        )

    async def acquire(self, attempt: Attempt, retry: Retry) -> None:
        """Wait until the budget has a permit for the attempt, where it needs one. Raises
        Overloaded if failed retries have used the budget up."""
        if retry.returned:
            return
        try:
            attempt.permit = await self._queue.take(short=retry.no_memory)
        except Overloaded:
            metrics.RETRIES_REFUSED.labels("budget").inc()
            raise

    def release(self, attempt: Attempt) -> None:
        """Return the attempt's permit, if it has one: its worker has answered, or is no longer
        asked to."""
        if attempt.permit is not None:
            permit, attempt.permit = attempt.permit, None
            self._queue.release(permit)


def _reason(error: BatonError) -> str:
    """Return the label of the metric for the error that an attempt failed with."""
    reasons: tuple[tuple[type[BatonError], str], ...] = (
        (StalePlacement, "stale_placement"),  # before Draining, of which it is one
        (Draining, "draining"),
        (WorkerLost, "worker_lost"),
        (Overloaded, "overloaded"),
        (OutOfMemory, "out_of_memory"),
    )
    return next((reason for kind, reason in reasons if isinstance(error, kind)), "failed")


class MigrationQueue:
    """The requests that wait for a permit. `active` returns how many attempts there are now.
    Permits end here, not at the budget: other requests may wait for them."""

    def __init__(self, budget: RetryBudget, active: Callable[[], int]) -> None:
        self._budget = budget
        self._active = active
        # those with a worker that lacked memory, and else
        self._queues: dict[bool, dict[asyncio.Future[RetryPermit], None]] = {False: {}, True: {}}
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, *, short: bool) -> RetryPermit:
        """Wait for a permit; `short` as in the budget. Raises Overloaded once failed retries have
        used the budget up. If cancelled, it holds none."""
        turn: asyncio.Future[RetryPermit] = asyncio.get_running_loop().create_future()
        self._queues[short][turn] = None
        self.recheck()
        try:
            return await turn  # bounded by the request's deadline, which cancels
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:
                self.release(turn.result())
            raise
        finally:
            self._queues[short].pop(turn, None)

    def release(self, permit: RetryPermit) -> None:
        self._budget.release(permit)
        self.recheck()

    def failed(self, permit: RetryPermit, *, short: bool) -> None:
        self._budget.failed(permit, asyncio.get_running_loop().time(), short=short)
        self.recheck()

    def recheck(self) -> None:
        """Answer the first in the queues for which the budget has an answer. Call it as well
        after the number of active attempts has grown."""
        for short, queue in self._queues.items():
            while queue:
                turn = next(iter(queue))
                if not turn.done() and not self._answer(turn, short):
                    break
                del queue[turn]
        self._expect_change()

    def _answer(self, turn: asyncio.Future[RetryPermit], short: bool) -> bool:
        now_s = asyncio.get_running_loop().time()
        try:
            permit = self._budget.take(self._active(), now_s, short=short)
        except Overloaded as error:
            turn.set_exception(error)
            return True
        if permit is not None:
            turn.set_result(permit)
        return permit is not None

    def _expect_change(self) -> None:
        """Keep an earlier timer: permits lapse in the order of time."""
        if self._timer is None and any(self._queues.values()):
            change_s = self._budget.change_s()
            if change_s is not None:
                self._timer = asyncio.get_running_loop().call_at(change_s, self._changed)

    def _changed(self) -> None:
        self._timer = None
        self.recheck()
