"""Whether a shared registry can be used, as one metric and one log event per outage.

Reading and writing may fail apart: a full server refuses writes alone. An outage lasts from the
first failure until both work and nothing has failed for CALM_S: a connection that is lost again
while the server returns begins no second outage. The metric follows each failure and success.
Pure: time is given. Owned by the registry client.
"""

from __future__ import annotations

from typing import Literal

from baton.runtime import logs, metrics

CALM_S = 2.0  # longer than a connection attempt takes to fail

log = logs.get(__name__)

Side = Literal["read", "write"]


class OutageLog:
    """`server` is the registry's address without secrets."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._failing: set[Side] = set()
        self._failed_s: float | None = None  # when a side failed last, during an outage

    def failed(self, side: Side, reason: str, now_s: float) -> None:
        """Record that reading or writing has failed."""
        metrics.REGISTRY_UP.set(0)
        if self._failed_s is None:
            log.error(
                "registry unavailable",
                server=self._server,
                failed=side,
                reason=reason,
                effect="known workers keep serving, new ones are not found",
            )
        self._failing.add(side)
        self._failed_s = now_s

    def worked(self, side: Side, now_s: float) -> None:
        """Record that reading or writing has worked."""
        self._failing.discard(side)
        if self._failing:
            return
        metrics.REGISTRY_UP.set(1)
        if self._failed_s is not None and now_s - self._failed_s >= CALM_S:
            log.info("registry available again", server=self._server)
            self._failed_s = None
