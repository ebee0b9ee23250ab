"""The turns of the event loop, shared among pieces of work that nothing can interrupt.

To parse, check and print what clients send is such work: the loop hears no worker meanwhile. In
one turn there is little of it, or one large piece; whoever else wants some waits for a later
turn, the smallest first. So however much arrives at once, links are kept alive. Knows nothing of
what is done. Owned by the validator; the event loop calls everything here.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

SHARE_S = 0.002  # of one turn: a piece more begins only in the next
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
        """What `work` gives, or raises. Of those who wait the smallest `size` is next; 0 is for
        what goes on with something begun."""
        if self._spent_s >= SHARE_S:
            mine = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (size, next(self._numbers), mine))
            await mine  # bounded by the caller's deadline
        begun_s = self._clock()
        try:
            return work(*given, **named)
        finally:
            self._spent_s += self._clock() - begun_s
            self._expect_turn()

    def _expect_turn(self) -> None:
        if not self._expected:
            self._expected = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._expected = False
        self._spent_s = 0.0
        while self._waiting:
            _, _, mine = heapq.heappop(self._waiting)
            if not mine.done():  # else its request has ended
                self._expect_turn()  # before it runs: what it takes is the next turn's
                mine.set_result(None)
                return
