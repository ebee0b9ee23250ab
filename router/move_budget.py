"""The budget of moves: how many requests may be placed again while others are being served.

    taken ─▶ under way ─▶ got on             the first output of its new worker: given back
                │   ├──▶ its new worker drains or is full: given back, another try is another move
                │   └──▶ HOLD_S are over     it waits in a worker's queue: given back too
                └──────▶ failed              kept for HOLD_S: nobody is served by trying so often

The limit is a share of what is being served, and a floor. While moves get on, one more waits for
its turn, a burst of losses is paced and none is refused. Once those that failed fill the limit,
one more is refused at once. So a fleet that fails everything gets at most as many moves as the
limit in any HOLD_S, beside what clients ask. Pure: time is given.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from baton.runtime.errors import Overloaded

HOLD_S = 10.0


@dataclass(slots=True, eq=False)
class Move:
    """One request that is placed again; `lapses_s` ends its hold on the budget."""

    lapses_s: float


class MoveBudget:
    """Whoever takes a move tells its end once, by `got_on` or `failed`."""

    def __init__(self, share: float, floor: int) -> None:
        self._share = share
        self._floor = floor
        self._under_way: dict[Move, None] = {}  # in the order of their taking
        self._failed: deque[float] = deque()  # when each is forgotten

    def limit(self, active: int) -> int:
        """Moves at once while `active` requests are being served, the moved ones included."""
        return max(self._floor, int(self._share * active))

    def take(self, active: int, now_s: float) -> Move | None:
        """A move, or None: others are under way, ask again soon. Raises Overloaded, with the
        time until it can be otherwise, if moves that failed have used the budget up."""
        self._forget(now_s)
        limit = self.limit(active)
        if len(self._failed) >= limit:
            free_at_s = self._failed[len(self._failed) - limit]
            raise Overloaded(
                f"the worker failed, and {len(self._failed)} requests that were moved to others "
                f"have just failed there too: try again later",
                free_at_s - now_s,
            )
        if len(self._under_way) + len(self._failed) >= limit:
            return None
        move = Move(now_s + HOLD_S)
        self._under_way[move] = None
        return move

    def got_on(self, move: Move) -> None:
        """Its new worker has answered or hands it back unharmed, or nobody wants it any more."""
        self._under_way.pop(move, None)

    def failed(self, move: Move, now_s: float) -> None:
        """Its new worker has failed it too."""
        self._under_way.pop(move, None)
        self._failed.append(now_s + HOLD_S)

    def _forget(self, now_s: float) -> None:
        while self._failed and self._failed[0] <= now_s:
            self._failed.popleft()
        while self._under_way and (oldest := next(iter(self._under_way))).lapses_s <= now_s:
            del self._under_way[oldest]
