"""Whether each router's roster says of each worker what its link says: looked at whenever it is
asked for. A change that the fleet did not hear of would place requests by what was true before."""

from __future__ import annotations

from baton.router.fleet.linked_view import view_of
from baton.router.fleet.roster import Roster
from baton.simulation.fleet.world import RouterProcess


def over_router(process: RouterProcess, breaches: list[str]) -> None:
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
                breaches.append(f"{process.machine.name}: its roster is behind {name}'s link")
        return found

    fleet.roster = compared  # type: ignore[method-assign]  # wraps this instance alone
