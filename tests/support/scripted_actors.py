"""The actors of a fleet on a Ray cluster, scripted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from baton.deploy.nodes.node_worker import WorkerReport
from baton.deploy.nodes.worker_order import WorkerOrder
from baton.runtime.errors import Unavailable


class ScriptedActors:
    """Actors that become ready at once, unless they are `silent` or have a `state`."""

    def __init__(self) -> None:
        self.reports: dict[str, WorkerReport] = {}
        self.made: list[tuple[str, str | None]] = []
        self.room: dict[str, dict[str, float]] = {}
        self.ended: list[str] = []
        self.removed: list[str] = []
        self.kept: list[set[str]] = []  # of which workers groups without an actor stay
        self.silent: set[str] = set()
        self.ends = True  # a worker ends when it is asked to
        self.lost = False  # Ray does not answer
        self.failing: set[str] = set()  # of whose actors Ray refuses everything

    def names(self) -> set[str]:
        self._answer()
        return set(self.reports)

    def nodes(self) -> int:
        self._answer()
        return 3

    def _answer(self, name: str = "") -> None:
        if self.lost or name in self.failing:
            raise Unavailable("Ray does not answer")

    def rooms(self) -> dict[str, dict[str, float]]:
        return self.room

    def make(self, order: WorkerOrder, host: str | None) -> None:
        self.made.append((order.worker_id, host))
        boot_id, node = f"boot-{len(self.made)}", host or "10.0.0.1"
        self.reports[order.worker_id] = WorkerReport(order, node, "running", 1, boot_id)

    def ask(self) -> dict[str, WorkerReport]:
        return {name: e for name, e in self.reports.items() if name not in self.silent}

    def end(self, name: str) -> None:
        self._answer(name)
        self.ended.append(name)
        if self.ends:
            self.reports[name] = replace(self.reports[name], state="ended", boot_id="")

    def remove(self, name: str) -> None:
        self._answer(name)
        self.removed.append(name)
        del self.reports[name]

    def sweep(self, kept: Collection[str]) -> None:
        self.kept.append(set(kept))
