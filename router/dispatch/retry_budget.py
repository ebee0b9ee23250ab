"""The retry budget: how many requests may be retried while others are being served.

    taken ─▶ under way ─▶ released      its new worker sent the first output
                │   ├──▶ released       its new worker drains or is overloaded
                │   └──▶ lapsed         HOLD_S are over: it waits in a worker's queue
                └──────▶ failed         counted for HOLD_S

The limit is a share of the active attempts, and a floor. While retries succeed, another one waits
for a permit: a burst of losses is paced and none is refused. Once failed retries fill the limit,
another one is refused at once. So a fleet that fails everything gets at most as many retries as
the limit in any HOLD_S, beside new requests. Retries for want of memory are counted apart: a
request that fits nowhere takes no permit from others. Pure: time is given.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

from baton.runtime.errors import Overloaded

HOLD_S = 10.0


@dataclass(slots=True, eq=False)
class RetryPermit:
    """The right to one retry; `lapses_s` ends its hold on the budget."""

    lapses_s: float


class RetryBudget:
    """Each permit ends once, by `release` or `failed`. `take` gives the same answer until a permit
    ends, `change_s` is over, or more attempts are active."""

    def __init__(self, share: float, floor: int) -> None:
        self._share = share
        self._floor = floor
        self._under_way: dict[RetryPermit, None] = {}  # in the order of their taking
        # for want of memory, and else: when each is forgotten
        self._failed: dict[bool, deque[float]] = {True: deque(), False: deque()}

    def limit(self, active: int) -> int:
        """Return the permits at once while `active` attempts exist, the retried ones included."""
        return max(self._floor, int(self._share * active))

    def take(self, active: int, now_s: float, *, short: bool = False) -> RetryPermit | None:
        """Return a permit, or None while others are under way: ask when one has ended. `short`:
        the retry is for want of memory. Raises Overloaded, with the time until the budget has
        room, if failed retries of the same kind have used it up."""
        self._forget(now_s)
        limit, failed = self.limit(active), self._failed[short]
        if len(failed) >= limit:
            why = "the worker had no memory for it" if short else "the worker failed"
            raise Overloaded(
                f"{why}, and {len(failed)} requests that migrated to others "
                f"have just failed there too: try again later",
                failed[len(failed) - limit] - now_s,
            )
        if len(self._under_way) + len(failed) >= limit:
            return None
        permit = RetryPermit(now_s + HOLD_S)
        self._under_way[permit] = None
        return permit

    def release(self, permit: RetryPermit) -> None:
        """End a permit without a failure: its worker answered or returned it, or it was dropped."""
        self._under_way.pop(permit, None)

    def failed(self, permit: RetryPermit, now_s: float, *, short: bool = False) -> None:
        """End a permit whose new worker failed too; `short`: for want of memory."""
        self._under_way.pop(permit, None)
        self._failed[short].append(now_s + HOLD_S)

    def change_s(self) -> float | None:
        """Return when the next permit lapses or failure is forgotten; None: it counts nothing."""
        oldest = [failed[0] for failed in self._failed.values() if failed]
        oldest += [permit.lapses_s for permit in islice(self._under_way, 1)]
        return min(oldest, default=None)

    def _forget(self, now_s: float) -> None:
        for failed in self._failed.values():
            while failed and failed[0] <= now_s:
                failed.popleft()
        while self._under_way and (oldest := next(iter(self._under_way))).lapses_s <= now_s:
            del self._under_way[oldest]
