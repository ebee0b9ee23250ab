"""The budget of moves: how many requests may be placed again while others are being served.

    taken ─▶ under way ─▶ got on             the first output of its new worker: given back
                │   ├──▶ its new worker drains or is full: given back, another try is another move
                │   └──▶ HOLD_S are over     it waits in a worker's queue: given back too
                └──────▶ failed              kept for HOLD_S: nobody is served by trying so often

The limit is a share of what is being served, and a floor. While moves get on, one more waits for
its turn, a burst of losses is paced and none is refused. Once those that failed fill the limit,
one more is refused at once. So a fleet that fails everything gets at most as many moves as the
limit in any HOLD_S, beside what clients ask. What finds no memory is counted apart: a request
that fits nowhere takes no move from those that would. Pure: time is given.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

from baton.runtime.errors import Overloaded

HOLD_S = 10.0


@dataclass(slots=True, eq=False)
class RetryPermit:
    """One request that is placed again; `lapses_s` ends its hold on the budget."""

    lapses_s: float


class RetryBudget:
    """Whoever takes a move tells its end once, by `got_on` or `failed`. Asking again before an end
    is told, `change_s`, or more are being served, gives the same answer."""

    def __init__(self, share: float, floor: int) -> None:
        self._share = share
        self._floor = floor
        self._under_way: dict[RetryPermit, None] = {}  # in the order of their taking
        # for want of memory, and else: when each is forgotten
        self._failed: dict[bool, deque[float]] = {True: deque(), False: deque()}

    def limit(self, active: int) -> int:
        """Permits at once while `active` requests are being served, the moved ones included."""
        return max(self._floor, int(self._share * active))

    def take(self, active: int, now_s: float, *, short: bool = False) -> RetryPermit | None:
        """A move, or None: others are under way, ask when one has ended. `short`: it is moved
        because a worker had no memory for it. Raises Overloaded, with the time until it can be
        otherwise, if moves that failed like that, or otherwise, have used the budget up."""
        self._forget(now_s)
        limit, failed = self.limit(active), self._failed[short]
        if len(failed) >= limit:
            why = "the worker had no memory for it" if short else "the worker failed"
            raise Overloaded(
                f"{why}, and {len(failed)} requests that were moved to others "
                f"have just failed there too: try again later",
                failed[len(failed) - limit] - now_s,
            )
        if len(self._under_way) + len(failed) >= limit:
            return None
        move = RetryPermit(now_s + HOLD_S)
        self._under_way[move] = None
        return move

    def got_on(self, move: RetryPermit) -> None:
        """Its new worker has answered or hands it back unharmed, or nobody wants it any more."""
        self._under_way.pop(move, None)

    def failed(self, move: RetryPermit, now_s: float, *, short: bool = False) -> None:
        """Its new worker has failed it too; `short`: has no memory for it either."""
        self._under_way.pop(move, None)
        self._failed[short].append(now_s + HOLD_S)

    def change_s(self) -> float | None:
        """When it next forgets something by itself; None: it counts nothing."""
        oldest = [failed[0] for failed in self._failed.values() if failed]
        oldest += [move.lapses_s for move in islice(self._under_way, 1)]
        return min(oldest, default=None)

    def _forget(self, now_s: float) -> None:
        for failed in self._failed.values():
            while failed and failed[0] <= now_s:
                failed.popleft()
        while self._under_way and (oldest := next(iter(self._under_way))).lapses_s <= now_s:
            del self._under_way[oldest]
