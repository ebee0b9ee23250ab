"""Checks what a router takes for true of others: its roster, and the reports of other routers.

    roster     says of each worker what its link says, whenever it is asked for: a change that the
               fleet did not hear of would place requests by what was true before
    reports    count once, and as their router sent them

Sits on each router of one world, and changes nothing of what happens.
"""

from __future__ import annotations

from baton.router.fleet.linked_view import view_of
from baton.router.fleet.roster import Roster
from baton.runtime.shared_registry.router_report import RouterReport
from baton.simulation.fleet.world import RouterProcess


class RouterFacts:
    """`breaches` gets a line for each roster that is behind, and for each report that should not
    have counted."""

    def __init__(self, breaches: list[str]) -> None:
        self._breaches = breaches
        self._sent: dict[tuple[str, int], RouterReport] = {}

    def over_router(self, process: RouterProcess) -> None:
        """Watch a router that has just been started."""
        self._watch_roster(process)
        self._watch_reports(process)

    def _watch_roster(self, process: RouterProcess) -> None:
        fleet = process.fleet
        roster = fleet.roster

        def compared() -> Roster:
            found = roster()
            links = {name: link for name, link in fleet._links.items() if link.up}
            for name in sorted(links.keys() | {view.worker_id for view in found.views()}):
                view, link = found.get(name), links.get(name)
                # costs are learned: those of the view are as old as its worker's last report
                seen = view and link and view_of(link, fleet.index.bit(name), view.costs)
                if view is None or view != seen:
                    machine = process.machine.name
                    self._breaches.append(f"{machine}: its roster is behind {name}'s link")
            return found

        fleet.roster = compared  # type: ignore[method-assign]  # wraps this instance alone

    def _watch_reports(self, process: RouterProcess) -> None:
        """Do nothing in a world without a Redis server."""
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
