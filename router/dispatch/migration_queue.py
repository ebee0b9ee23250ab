"""The queue of requests that wait for a retry permit: each gets one once the budget has room.

    take ─▶ queue ── a permit was released, failed or lapsed ──▶ a permit, or refused

There are two queues, in order of arrival: of requests whose worker had no memory for them, and of
all others, which come first. A request that waits costs nothing: the end of a permit calls the
next one, and one timer calls when permits lapse. Knows the budget and no requests. Owned by the
event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.router.dispatch.retry_budget import RetryBudget, RetryPermit
from baton.runtime.errors import Overloaded


class MigrationQueue:
    """`active` returns how many attempts there are now. Permits end here, not at the budget:
    other requests may wait for them."""

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
