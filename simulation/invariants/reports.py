"""Checks what a router takes from other routers: each report once, and as its router sent it.

Sits on the exchange of each router of one world, and changes nothing of what happens.
"""

from __future__ import annotations

from baton.runtime.shared_registry.router_report import RouterReport
from baton.simulation.fleet.world import RouterProcess


class Reports:
    """`breaches` gets a line for each report that should not have counted. Does nothing in a world
    without a Redis server."""

    def __init__(self, breaches: list[str]) -> None:
        self._breaches = breaches
        self._sent: dict[tuple[str, int], RouterReport] = {}

    def over_router(self, process: RouterProcess) -> None:
        """Watch a router that has just been started."""
        sharing = process.fleet.sharing
        if sharing is None:
            return
        publish, learn = sharing._exchange.publish, sharing.others.learn
        taken: set[tuple[str, int]] = set()

        async def published(report: RouterReport) -> None:
            self._sent[report.router, report.counter] = report
            await publish(report)

        def learned(report: RouterReport, now_s: float, wall_ns: int) -> bool:
            counts = learn(report, now_s, wall_ns)
            key = (report.router, report.counter)
            if counts and self._sent.get(key) != report:
                self._breaches.append(f"{process.machine.name} takes a report that none sent")
            elif counts and key in taken:
                self._breaches.append(f"{process.machine.name} takes a copy of a report")
            if counts:
                taken.add(key)
            return counts

        sharing._exchange.publish = published  # type: ignore[method-assign]  # wraps this instance alone
        sharing.others.learn = learned  # type: ignore[method-assign]  # wraps this instance alone
