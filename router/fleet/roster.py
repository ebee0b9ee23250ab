"""The linked workers in groups of equal workers, each group in the orders of placement; and the
decode workers that are not linked now.

    put(view) ─▶ group ─▶ members, accepting, open ─▶ orders (worker_order.py)

A view is put again whenever its worker has changed. `Ranking` finds the cheapest workers for a
request among the first few of each order. Pure: time is given. Owned by the fleet.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from baton.router.fleet.worker_costs import WorkerCosts
from baton.router.fleet.worker_order import Entry, WorkerOrder
from baton.router.fleet.worker_view import KvFormat, NumericsId, WorkerCapacity, WorkerView

_Times = list[tuple[float, str]]


class WorkerGroup:
    """Workers of one role that differ only in their load. `members` are all, `accepting` those
    that take work, `open` those of them whose queue has room. The open ones are in the `orders`:
    decode workers by `busy_us` and `full_us`, prefill workers by `queue_us`."""

    def __init__(
        self, role: str, kv_format: KvFormat, capacity: WorkerCapacity, costs: WorkerCosts
    ) -> None:
        self.role = role
        self.kv_format = kv_format
        self.capacity = capacity
        self.costs = costs
        self.members: dict[str, WorkerView] = {}
        self.accepting: dict[str, WorkerView] = {}
        self.open: dict[str, WorkerView] = {}
        self.orders = [WorkerOrder() for _ in range(2 if role == "decode" else 1)]
        self._running: Counter[int] = Counter()  # open workers by what runs there

    @property
    def least_us(self) -> int:
        """Return the least cost of an open worker in the first order; there is one."""
        return self.orders[0].least

    @property
    def least_running(self) -> int:
        """Return the sequences, or prompts, that run on each open worker at least."""
        return min(self._running, default=0)

    @property
    def numerics(self) -> NumericsId:
        return self.kv_format[:2]

    def put(self, view: WorkerView, max_waiting: int) -> None:
        name = view.worker_id
        self.members[name] = view
        if view.draining:
            return
        self.accepting[name] = view
        if view.role == "prefill" or view.queued_requests < max_waiting:
            self.open[name] = view
            self._running[view.running] += 1
            for order, cost in zip(self.orders, _costs(view), strict=True):
                order.insert((cost, name, view.bit))

    def remove(self, view: WorkerView) -> None:
        name = view.worker_id
        del self.members[name]
        self.accepting.pop(name, None)
        if self.open.pop(name, None) is not None:
            self._running[view.running] -= 1
            if not self._running[view.running]:
                del self._running[view.running]
            for order, cost in zip(self.orders, _costs(view), strict=True):
                order.remove((cost, name, view.bit))


def _costs(view: WorkerView) -> tuple[int, ...]:
    if view.role == "decode":
        return view.busy_us, view.full_us
    return (view.queue_us,)


_GroupKey = tuple[str, KvFormat, WorkerCapacity, WorkerCosts]


class Roster:
    """A decode worker is open while fewer than `max_waiting` requests wait there."""

    def __init__(self, max_waiting: int = 512) -> None:
        self._max_waiting = max_waiting
        self._groups: dict[_GroupKey, WorkerGroup] = {}
        self._views: dict[str, WorkerView] = {}
        self._group_of: dict[str, WorkerGroup] = {}
        self._by_bit: dict[int, WorkerView] = {}
        self._expected_ends: _Times = []  # of a new request, on decode workers with a queue
        self._valid_until: _Times = []  # of these estimates
        self._idle = 0  # accepting decode workers without a queue
        self.room = 0  # for more requests in the queues of decode workers

    def views(self) -> list[WorkerView]:
        return [*self._views.values()]

    def get(self, worker_id: str) -> WorkerView | None:
        return self._views.get(worker_id)

    def put(self, view: WorkerView) -> None:
        """Add a worker, or replace what was known of it."""
        self.remove(view.worker_id)
        self._views[view.worker_id] = view
        if view.bit:
            self._by_bit[view.bit] = view
        key = (view.role, view.kv_format, view.capacity, view.costs)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = WorkerGroup(*key)
        self._group_of[view.worker_id] = group
        group.put(view, self._max_waiting)
        self._count(view, 1)
        if _has_queue(view):
            for times, at_s in zip(
                (self._expected_ends, self._valid_until), view.expected_end or (), strict=True
            ):
                insort(times, (at_s, view.worker_id))

    def remove(self, worker_id: str) -> None:
        view = self._views.pop(worker_id, None)
        if view is None:
            return
        if self._by_bit.get(view.bit) is view:
            del self._by_bit[view.bit]
        group = self._group_of.pop(worker_id)
        group.remove(view)
        if not group.members:
            del self._groups[group.role, group.kv_format, group.capacity, group.costs]
        self._count(view, -1)
        if _has_queue(view):
            for times, at_s in zip(
                (self._expected_ends, self._valid_until), view.expected_end or (), strict=True
            ):
                del times[bisect_left(times, (at_s, worker_id))]

    def of_bits(self, bits: int) -> Iterator[WorkerView]:
        """Yield the workers of a set of bits of the radix index, the lowest bit first."""
        while bits:
            lowest = bits & -bits
            bits ^= lowest
            if (view := self._by_bit.get(lowest)) is not None:
                yield view

    def groups(self, role: str) -> list[WorkerGroup]:
        return [group for group in self._groups.values() if group.role == role]

    def expected_s(self, now_s: float) -> float:
        """Return the time to the end of a request that is placed now, on the worker where it ends
        first; 0 if a decode worker has no queue, or a queue's rate is not known, or there is no
        decode worker."""
        if self._idle or not self._expected_ends or now_s > self._valid_until[0][0]:
            return 0.0
        return max(0.0, self._expected_ends[0][0] - now_s)

    def _count(self, view: WorkerView, sign: int) -> None:
        if view.role == "decode" and not view.draining:
            self.room += sign * max(0, self._max_waiting - view.queued_requests)
            self._idle += sign * (view.expected_end is None)


def _has_queue(view: WorkerView) -> bool:
    return view.role == "decode" and not view.draining and view.expected_end is not None


Ranked = tuple[int, str, WorkerView]  # price, worker id


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of one request on the workers of a group that lack the same of its prompt. A
    worker without a price is left out. None costs less than its cost in an order plus that order's
    floor; where workers lack more, no floor is less."""

    price: Callable[[WorkerView], int | None]
    floors: tuple[int, ...]


class Ranking:
    """The `count` cheapest workers so far; of equal prices the lower worker id comes first."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._best: list[Ranked] = []

    def best(self) -> list[Ranked]:
        return self._best

    def search(
        self, group: WorkerGroup, workers: int, others: bool, priced: Callable[[], Prices]
    ) -> bool:
        """Rank the open workers of a group that are in the set `workers`, or all `others`, by what
        `priced` returns. Return whether a worker of the group that lacks more of the prompt could
        still be among the cheapest."""
        if not group.orders[0].has(workers, others):
            return True
        prices = priced()
        entries = (order.among(workers, others) for order in group.orders)
        self._rank(group, prices.price, [*zip(entries, prices.floors, strict=True)])
        return not self._full() or group.least_us + prices.floors[0] <= self._best[-1][0]

    def _rank(
        self,
        group: WorkerGroup,
        price: Callable[[WorkerView], int | None],
        orders: Sequence[tuple[Iterator[Entry], int]],
    ) -> None:
        """Rank the workers of each order, with its floor, in turns, until no later worker of one of
        them can be among the cheapest."""
        seen: set[str] = set()
        while True:
            for entries, floor in orders:
                entry = next(entries, None)
                if entry is None or self._excludes(entry, floor):
                    return
                name = entry[1]
                if name not in seen:
                    seen.add(name)
                    self._offer(price, group.open[name])
                    if self._excludes(entry, floor):
                        return

    def _excludes(self, entry: Entry, floor: int) -> bool:
        """Return whether neither this worker nor a later one of its order can be among the
        cheapest, unless it is already."""
        if len(self._best) < self._count:
            return False
        bound, (price, name, _) = entry[0] + floor, self._best[-1]
        return bound > price or (bound == price and entry[1] >= name)

    def _offer(self, price: Callable[[WorkerView], int | None], view: WorkerView) -> None:
        cost = price(view)
        if cost is not None:
            insort(self._best, (cost, view.worker_id, view))
            del self._best[self._count :]

    def _full(self) -> bool:
        return len(self._best) == self._count


class DisconnectedWorkers:
    """The capacities of decode workers that are not linked, each kept for `keep_s` after its worker
    was last registered or linked. A request that only one of them could hold is not too large for
    this fleet: it waits, or its client is asked to retry."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._kept: dict[str, tuple[WorkerCapacity, float]] = {}  # with their expiry

    def add_registered(self, worker_id: str, role: str, now_s: float) -> None:
        """Record a worker that the registry names and that is not linked yet. One that is not
        known may have any capacity."""
        known = self._kept.pop(worker_id, (WorkerCapacity(), 0.0))[0]
        if role == "decode":
            self.add_lost(worker_id, known, now_s)

    def add_lost(self, worker_id: str, capacity: WorkerCapacity, now_s: float) -> None:
        """Record a worker that the fleet has dropped."""
        self._kept[worker_id] = capacity, now_s + self._keep_s

    def next_expiry_s(self) -> float:
        """Return when the next worker is forgotten."""
        return min((until_s for _, until_s in self._kept.values()), default=float("inf"))

    def capacities(self, now_s: float) -> dict[str, WorkerCapacity]:
        """Return the remembered workers, also those that are linked again."""
        self._kept = {name: kept for name, kept in self._kept.items() if now_s < kept[1]}
        return {name: capacity for name, (capacity, _) in self._kept.items()}
