"""The actors of a fleet on a Ray cluster, scripted."""

from __future__ import annotations

from dataclasses import replace

from baton.deploy.nodes.node_worker import WorkerReport
from baton.deploy.nodes.worker_order import WorkerOrder
from baton.runtime.errors import Unavailable


class ScriptedActors:
    """Actors that become ready at once, unless they are `silent` or have a `state`."""

    def __init__(self) -> None:
        self.reports: dict[str, WorkerReport] = {}
        self.made: list[tuple[str, str]] = []
        self.ended: list[str] = []
        self.removed: list[str] = []
        self.silent: set[str] = set()
        self.ends = True  # a worker ends when it is asked to
        self.lost = False  # Ray does not answer

    def names(self) -> set[str]:
        return set(self.reports)

    def nodes(self) -> int:
        if self.lost:
            raise Unavailable("Ray does not answer")
        return 3

    def make(self, order: WorkerOrder, host: str) -> None:
        self.made.append((order.worker_id, host))
        boot_id = f"boot-{len(self.made)}"
        self.reports[order.worker_id] = WorkerReport(order, "10.0.0.1", "running", 1, boot_id)

    def ask(self) -> dict[str, WorkerReport]:
        return {name: e for name, e in self.reports.items() if name not in self.silent}

    def end(self, name: str) -> None:
        self.ended.append(name)
        if self.ends:
            self.reports[name] = replace(self.reports[name], state="ended", boot_id="")

    def remove(self, name: str) -> None:
        self.removed.append(name)
        del self.reports[name]
