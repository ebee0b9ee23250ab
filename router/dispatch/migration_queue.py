"""The line of requests that wait for a move: each gets one as soon as the budget allows it.

    take ─▶ line ── a move got on, failed or was forgotten ──▶ a move, or refused

There are two, in order of arrival: of those whose worker had no memory for them, and of all
others, who are first where both wait. Whoever waits costs nothing: the end of a move calls the
next one, and one timer calls for all when the budget forgets by itself. Knows the budget and no
requests. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.router.dispatch.retry_budget import RetryBudget, RetryPermit
from baton.runtime.errors import Overloaded


class MigrationQueue:
    """`active` tells how many requests are being served now. Ends of moves are told here, and not
    to the budget: others may wait for them."""

    def __init__(self, budget: RetryBudget, active: Callable[[], int]) -> None:
        self._budget = budget
        self._active = active
        # those with a worker that lacked memory, and else
        self._lines: dict[bool, dict[asyncio.Future[RetryPermit], None]] = {False: {}, True: {}}
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, *, short: bool) -> RetryPermit:
        """Wait for a move; `short` as in the budget. Raises Overloaded once moves that failed
        have used the budget up. Cancelled, it has taken none."""
        turn: asyncio.Future[RetryPermit] = asyncio.get_running_loop().create_future()
        self._lines[short][turn] = None
        self.look()
        try:
            return await turn  # bounded by the request's deadline, which cancels
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:
                self.got_on(turn.result())
            raise
        finally:
            self._lines[short].pop(turn, None)

    def got_on(self, move: RetryPermit) -> None:
        self._budget.got_on(move)
        self.look()

    def failed(self, move: RetryPermit, *, short: bool) -> None:
        self._budget.failed(move, asyncio.get_running_loop().time(), short=short)
        self.look()

    def look(self) -> None:
        """Call those in front whom the budget has an answer for; to be called too when more
        requests are being served than before."""
        for short, line in self._lines.items():
            while line:
                turn = next(iter(line))
                if not turn.done() and not self._answer(turn, short):
                    break
                del line[turn]
        self._expect_change()

    def _answer(self, turn: asyncio.Future[RetryPermit], short: bool) -> bool:
        now_s = asyncio.get_running_loop().time()
        try:
            move = self._budget.take(self._active(), now_s, short=short)
        except Overloaded as error:
            turn.set_exception(error)
            return True
        if move is not None:
            turn.set_result(move)
        return move is not None

    def _expect_change(self) -> None:
        """What was timed before comes no later: the budget forgets in the order of time."""
        if self._timer is None and any(self._lines.values()):
            change_s = self._budget.change_s()
            if change_s is not None:
                self._timer = asyncio.get_running_loop().call_at(change_s, self._changed)

    def _changed(self) -> None:
        self._timer = None
        self.look()
