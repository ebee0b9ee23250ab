"""Shares circuits and load hints with the other routers, through a `ReportExchange`.

    circuits, links ─▶ report ─▶ others        others' reports ─▶ OtherRouters ─▶ circuits, links

Owned by the fleet, whose loop it runs on. Each router keeps its own circuits and its own block
index; without an exchange, or while its server is lost, it has its own observations alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from baton.router.fleet.circuits import Circuits
from baton.router.fleet.other_routers import OtherRouters
from baton.router.fleet.worker_link import WorkerLink
from baton.runtime import logs, metrics, waits
from baton.runtime.registry_client import RegistryUnavailable
from baton.runtime.shared_registry.report_exchange import ReportExchange
from baton.runtime.shared_registry.router_report import RouterReport

log = logs.get(__name__)

SHARE_S = 0.2  # between two reports, if something has changed, and two looks at others' ones
REPEAT_S = 1.0  # if nothing has
PUBLISH_TIMEOUT_S = 2.0
CANCEL_AGAIN_S = 0.1  # redis-py may lose a cancellation while it connects
NO_HINT = (0, 0)

_Content = tuple[tuple[str, ...], tuple[tuple[str, int, int], ...]]


class StateSharing:
    """`links` returns the router's links; their `hinted` is set here, and the circuits'
    `suspected`."""

    def __init__(
        self,
        exchange: ReportExchange,
        boot_id: bytes,
        circuits: Circuits,
        links: Callable[[], Collection[WorkerLink]],
    ) -> None:
        self._exchange = exchange
        self._router = boot_id.hex()
        self._circuits = circuits
        self._links = links
        self.others = OtherRouters(self._router)
        self._counter = 0
        self._last: tuple[_Content, float] | None = None  # what was sent last, and when

    async def run(self) -> None:
        """Share until cancelled, then close the exchange."""
        try:
            await waits.run_until_first_ends(
                self._exchange.follow(self._receive), self._repeat(), cancel_again_s=CANCEL_AGAIN_S
            )
        except Exception:  # logged at once: this task is awaited only when the router stops
            log.exception("router reports ended")
            self._set_hints(frozenset(), {})  # else the last ones would hold for ever
            raise
        finally:
            await self._exchange.close()

    def _receive(self, report: RouterReport) -> None:
        """Learn it alone: `_repeat` applies what all routers have said since, at one go."""
        self.others.learn(report, _now(), self._exchange.wall_ns())

    async def _repeat(self) -> None:
        while True:
            self._apply()
            await self._share()
            # Other routers forget a report that is not repeated in time.
            await asyncio.sleep(SHARE_S)

    async def _share(self) -> None:
        content = self._content()
        if self._last is not None:
            before, at_s = self._last
            if content == before and _now() - at_s < REPEAT_S:
                return
        self._counter = max(self._counter + 1, self._exchange.wall_ns())
        self._last = content, _now()
        try:
            async with asyncio.timeout(PUBLISH_TIMEOUT_S):
                await self._exchange.publish(RouterReport(self._router, self._counter, *content))
        except (RegistryUnavailable, TimeoutError):  # logged by the registry's own client
            metrics.ROUTER_REPORTS.labels("lost").inc()

    def _content(self) -> _Content:
        opened = sorted(boot_id.hex() for boot_id in self._circuits.failing())
        placed = sorted(
            (link.boot_id.hex(), link.placed_requests, link.placed_tokens)
            for link in self._links()
            if link.up and link.placed_requests
        )
        return tuple(opened), tuple(placed)

    def _apply(self) -> None:
        now_s = _now()
        self.others.expire(now_s)
        metrics.OTHER_ROUTERS.set(len(self.others))
        self._set_hints(self.others.suspected(), self.others.placed(now_s))

    def _set_hints(
        self, suspected: frozenset[bytes], hints: Mapping[bytes, tuple[int, int]]
    ) -> None:
        self._circuits.suspected = suspected
        for link in self._links():
            link.hinted = _same_or(link.hinted, hints.get(link.boot_id, NO_HINT))


def _same_or(before: tuple[int, int], hint: tuple[int, int]) -> tuple[int, int]:
    """Return the object that is there already if it is equal: another one is a change."""
    return before if before == hint else hint


def _now() -> float:
    return asyncio.get_running_loop().time()
