"""The decode workers that are not linked now, with the capacities that they last had.

A request that only one of them could hold is not too large for this fleet: it waits, or its
client is asked to retry. A worker that has left is remembered for as long as it may take to come
back. Knows capacities and no links. Pure: time is given. Owned by the fleet.
"""

from __future__ import annotations

from baton.router.fleet.worker_view import WorkerCapacity


class DisconnectedWorkers:
    """The capacities by worker id, each kept for `keep_s` after its worker was last registered or
    linked."""

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
