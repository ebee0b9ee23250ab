"""The seam between routers: each sends reports, and receives those of the others.

`RedisReports` (router_reports.py) is the implementation; this module does not import redis-py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from baton.runtime.shared_registry.router_report import RouterReport


class ReportExchange(Protocol):
    """How routers reach each other."""

    def wall_ns(self) -> int:
        """The host's clock, which orders the reports of a router."""
        ...

    async def publish(self, report: RouterReport) -> None:
        """Send to all other routers. Raises RegistryUnavailable if that fails."""
        ...

    async def follow(self, received: Callable[[RouterReport], None]) -> None:
        """Call `received` with each report of valid signature, until cancelled."""
        ...

    async def close(self) -> None: ...
