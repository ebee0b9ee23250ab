"""The linked workers by kind, each kind in the orders of placement.

    put(view) ─▶ kind ─▶ members, takers, open ─▶ orders (worker_order.py)

A view is put again whenever its worker has changed; the cheapest workers for a request are found
by `Ranking` after a look at the first few of each order. Pure. Owned by the fleet.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

from baton.router.fleet.worker_order import WorkerOrder
from baton.router.fleet.worker_view import Numbers, Shape, Size, WorkerView

_Moments = list[tuple[float, str]]


class Kind:
    """Workers of one role that differ in their load alone. `members` are all, `takers` those that
    take work, `open` those of them whose queue has room, which are in the `orders`: of decode
    workers by `batch_cost` and `full_cost`, of prefill workers by `queue_tokens`."""

    def __init__(self, role: str, shape: Shape, size: Size) -> None:
        self.role = role
        self.shape = shape
        self.size = size
        self.members: dict[str, WorkerView] = {}
        self.takers: dict[str, WorkerView] = {}
        self.open: dict[str, WorkerView] = {}
        self.orders = [WorkerOrder() for _ in range(2 if role == "decode" else 1)]

    @property
    def numbers(self) -> Numbers:
        return self.shape[:2]

    def put(self, view: WorkerView, max_waiting: int) -> None:
        name = view.worker_id
        self.members[name] = view
        if view.draining:
            return
        self.takers[name] = view
        if view.role == "prefill" or view.queued_requests < max_waiting:
            self.open[name] = view
            for order, cost in zip(self.orders, _costs(view), strict=True):
                order.insert((cost, name, view.bit))

    def remove(self, view: WorkerView) -> None:
        name = view.worker_id
        del self.members[name]
        self.takers.pop(name, None)
        if self.open.pop(name, None) is not None:
            for order, cost in zip(self.orders, _costs(view), strict=True):
                order.remove((cost, name, view.bit))


def _costs(view: WorkerView) -> tuple[int, ...]:
    if view.role == "decode":
        return view.batch_cost, view.full_cost
    return (view.queue_tokens,)


_KindKey = tuple[str, Shape, Size]


class Roster:
    """A decode worker is open while fewer than `max_waiting` requests wait there."""

    def __init__(self, max_waiting: int = 512) -> None:
        self._max_waiting = max_waiting
        self._kinds: dict[_KindKey, Kind] = {}
        self._views: dict[str, WorkerView] = {}
        self._ends: _Moments = []  # of a request on decode workers on which requests wait
        self._known: _Moments = []  # until when these ends are
        self._idle = 0  # takers of the decode workers on which none waits
        self.room = 0  # requests that the queues of decode workers have room for

    def views(self) -> list[WorkerView]:
        return [*self._views.values()]

    def get(self, worker_id: str) -> WorkerView | None:
        return self._views.get(worker_id)

    def put(self, view: WorkerView) -> None:
        """Add a worker, or replace what was known of it."""
        self.remove(view.worker_id)
        self._views[view.worker_id] = view
        key = (view.role, view.shape, view.size)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = Kind(*key)
        kind.put(view, self._max_waiting)
        self._count(view, 1)
        if _waits(view):
            for moments, at_s in zip((self._ends, self._known), view.line or (), strict=True):
                insort(moments, (at_s, view.worker_id))

    def remove(self, worker_id: str) -> None:
        view = self._views.pop(worker_id, None)
        if view is None:
            return
        key = (view.role, view.shape, view.size)
        kind = self._kinds[key]
        kind.remove(view)
        if not kind.members:
            del self._kinds[key]
        self._count(view, -1)
        if _waits(view):
            for moments, at_s in zip((self._ends, self._known), view.line or (), strict=True):
                del moments[bisect_left(moments, (at_s, worker_id))]

    def kinds(self, role: str) -> list[Kind]:
        return [kind for kind in self._kinds.values() if kind.role == role]

    def expected_s(self, now_s: float) -> float:
        """Until the end of a request that is placed now, where it ends first; 0 where a decode
        worker has no queue, or it is not known how fast that is, or there is none."""
        if self._idle or not self._ends or now_s > self._known[0][0]:
            return 0.0
        return max(0.0, self._ends[0][0] - now_s)

    def _count(self, view: WorkerView, sign: int) -> None:
        if view.role == "decode" and not view.draining:
            self.room += sign * max(0, self._max_waiting - view.queued_requests)
            self._idle += sign * (view.line is None)


def _waits(view: WorkerView) -> bool:
    return view.role == "decode" and not view.draining and view.line is not None


class Ranking:
    """The `count` workers of the least price so far; of equal prices the lower id is first."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._best: list[tuple[int, str, WorkerView]] = []

    def views(self) -> list[WorkerView]:
        return [view for _, _, view in self._best]

    def search(
        self,
        kind: Kind,
        workers: int,
        others: bool,
        price: Callable[[WorkerView], int | None],
        floors: Sequence[int],
    ) -> None:
        """Look at the open workers of a kind that are in the set `workers`, or at all `others`. No
        price: not this one. None costs less than its cost in each order and that order's floor: so
        the search ends where no later one can be among the least."""
        looked: set[str] = set()
        orders = [order.among(workers, others) for order in kind.orders]
        while True:
            for order, floor in zip(orders, floors, strict=True):
                entry = next(order, None)
                if entry is None:
                    return
                cost, name, _ = entry
                if name not in looked:
                    looked.add(name)
                    self._offer(price, kind.open[name])
                if self._full() and (cost + floor, name) >= self._best[-1][:2]:
                    return

    def _offer(self, price: Callable[[WorkerView], int | None], view: WorkerView) -> None:
        cost = price(view)
        if cost is not None:
            insort(self._best, (cost, view.worker_id, view))
            del self._best[self._count :]

    def _full(self) -> bool:
        return len(self._best) == self._count
