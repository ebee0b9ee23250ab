"""The reports of other routers: workers that fail them, and their recent placements.

A report is a hint. A worker whose circuit another router holds open is suspected: this router then
opens its own after fewer failures of its own, and after none without any. What others have placed
adds to a worker's cost, up to a bound, until it is a second old. So one router that lies cannot
take a worker away, nor make a fleet look full. Pure: time is given.
"""

from __future__ import annotations

from baton.runtime import metrics
from baton.runtime.shared_registry.router_report import RouterReport

LIFETIME_S = 4.0  # a report is repeated every second
HINT_S = 1.0  # by then the workers' own load reports say it
MAX_AGE_S = 30.0  # by both hosts' clocks: an older report is a copy, or a clock is wrong
MAX_ROUTERS = 64
MAX_FORGOTTEN = 1024  # routers whose last counter is kept
MAX_HINTED_REQUESTS, MAX_HINTED_TOKENS = 64, 1 << 16  # of one worker, by all routers


class _Heard:
    """The last report of a router, with boot ids as bytes. `at_s` is on the own clock."""

    __slots__ = ("at_s", "counter", "host", "open", "placed")

    def __init__(self, report: RouterReport, at_s: float) -> None:
        self.at_s = at_s
        self.counter = report.counter
        self.host = report.host
        self.open = [bytes.fromhex(boot) for boot in report.open]
        self.placed = [
            (bytes.fromhex(boot), requests, tokens) for boot, requests, tokens in report.placed
        ]


class OtherRouters:
    """`own` is this router's boot id in hex: its own reports do not count."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._heard: dict[str, _Heard] = {}  # the last report of each router
        self._counters: dict[str, int] = {}  # of forgotten ones, the oldest first

    def learn(self, report: RouterReport, now_s: float, wall_ns: int) -> bool:
        """Take a report of valid signature. Return whether it counts: not if it is a copy, or too
        old, or of one router too many."""
        if report.router == self._own:
            return False
        taken = self._is_new(report, wall_ns)
        metrics.ROUTER_REPORTS.labels("taken" if taken else "refused").inc()
        if taken:
            self._counters.pop(report.router, None)
            self._heard[report.router] = _Heard(report, now_s)
        return taken

    def _is_new(self, report: RouterReport, wall_ns: int) -> bool:
        if abs(report.counter - wall_ns) > MAX_AGE_S * 1e9:
            return False
        known = self._heard.get(report.router)
        if known is None:
            last = self._counters.get(report.router, -1)
            return report.counter > last and len(self._heard) < MAX_ROUTERS
        return report.counter > known.counter

    def expire(self, now_s: float) -> None:
        """Forget routers that have said nothing for LIFETIME_S."""
        for router, heard in list(self._heard.items()):
            if now_s - heard.at_s > LIFETIME_S:
                del self._heard[router]
                self._counters[router] = heard.counter
        while len(self._counters) > MAX_FORGOTTEN:
            del self._counters[next(iter(self._counters))]

    def hosts(self) -> dict[str, str]:
        """Return the name of each router's host, by the router's boot id in hex."""
        return {router: heard.host for router, heard in self._heard.items()}

    def __len__(self) -> int:
        return len(self._heard)

    def suspected(self) -> frozenset[bytes]:
        """Return the boot ids of workers whose circuit another router holds open."""
        return frozenset(boot for heard in self._heard.values() for boot in heard.open)

    def placed(self, now_s: float) -> dict[bytes, tuple[int, int]]:
        """Return the requests and tokens that others have just placed, by the worker's boot id."""
        found: dict[bytes, tuple[int, int]] = {}
        for heard in self._heard.values():
            if now_s - heard.at_s > HINT_S:
                continue
            for boot, requests, tokens in heard.placed:
                before = found.get(boot, (0, 0))
                found[boot] = (
                    min(before[0] + requests, MAX_HINTED_REQUESTS),
                    min(before[1] + tokens, MAX_HINTED_TOKENS),
                )
        return found
