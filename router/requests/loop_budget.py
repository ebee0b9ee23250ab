"""The budget of the event loop's turns for work that cannot be interrupted.

Parsing, checking and rendering what clients send is such work: no message of a worker is read while
it runs. One turn does a few small pieces or one large piece; other pieces wait for a later turn,
the smallest first. So links stay alive however much arrives at once. Knows nothing of the work.
Owned by the validator; the event loop calls everything here.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

SHARE_S = 0.002  # of one turn, after which no piece begins
_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


class LoopBudget:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock  # gives seconds
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap
        self._numbers = itertools.count()
        self._spent_s = 0.0  # in this turn
        self._expected = False  # the next turn is

    async def run(
        self, size: int, work: Callable[_Given, _Made], *given: _Given.args, **named: _Given.kwargs
    ) -> _Made:
        """Run `work` when the budget allows, and return or raise what it does. Of the waiting
        pieces the smallest `size` is next; 0 is for work that continues an earlier piece."""
        if self._spent_s >= SHARE_S:
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (size, next(self._numbers), turn))
            await turn  # bounded by the caller's deadline
        begun_s = self._clock()
        try:
            return work(*given, **named)
        finally:
            self._spent_s += self._clock() - begun_s
            self._expect_turn()

    def _expect_turn(self) -> None:
        if not self._expected:
            self._expected = True
            asyncio.get_running_loop().call_soon(self.begin_turn)

    def begin_turn(self) -> None:
        """Begin a turn of the loop: nothing of its budget is spent."""
        self._expected = False
        self._spent_s = 0.0
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():  # else its request has ended
                self._expect_turn()  # before it runs: its time counts for the next turn
                turn.set_result(None)
                return
