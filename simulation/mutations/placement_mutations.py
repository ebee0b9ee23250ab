"""Deliberate breaks of what a router knows of the fleet it places on.

A part of mutations.py, which says what they are for.
"""

from __future__ import annotations

import json
from typing import Any

from baton.router.dispatch.placement_queue import PlacementQueue
from baton.router.fleet import other_routers
from baton.router.fleet.other_routers import OtherRouters
from baton.router.fleet.slow_start import SlowStart
from baton.runtime.shared_registry import router_report
from baton.runtime.shared_registry.router_report import ReportSigner, RouterReport
from baton.simulation.mutations.patches import Break, always


def _unsigned_too(_: Any) -> Any:
    def read(self: ReportSigner, content: bytes) -> RouterReport | str:
        found = json.loads(content)
        found.pop("signature")
        return router_report._checked(found) or "a field of it cannot be true"

    return read


def _wait_without_end(_: Any) -> Any:
    def report(self: PlacementQueue) -> None:
        self._unplaced.waiting = max(self._unplaced.waiting, len(self))

    return report


def _each_report_counts(_: Any) -> Any:
    def learn(self: OtherRouters, report: RouterReport, now_s: float, wall_ns: int) -> bool:
        self._heard[report.router] = other_routers._Heard(report, now_s)
        return report.router != self._own

    return learn


OF_PLACEMENT: dict[str, Break] = {
    "no-slow-start": Break(
        "a worker that has just joined gets all that comes, since it is empty",
        SlowStart,
        "deferred",
        always(frozenset()),
    ),
    "count-waits-for-ever": Break(
        "a request that a worker has taken still counts as waiting on its router",
        PlacementQueue,
        "_report_waiting",
        _wait_without_end,
    ),
    "take-unsigned-reports": Break(
        "a router's report counts without the cluster's signature",
        ReportSigner,
        "read",
        _unsigned_too,
    ),
    "count-replayed-reports": Break(
        "a copy of a router's report counts again", OtherRouters, "learn", _each_report_counts
    ),
}
