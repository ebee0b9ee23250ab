"""Whether a shared registry can be used, as one metric and one log event per outage.

Reading and writing may fail apart: a full server refuses writes alone. An outage lasts from the
first failure until both work. Owned by the registry client.
"""

from __future__ import annotations

from typing import Literal

from baton.runtime import logs, metrics

log = logs.get(__name__)

Side = Literal["read", "write"]


class OutageLog:
    """`server` is the registry's address without secrets."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._failing: set[Side] = set()

    def failed(self, side: Side, reason: str) -> None:
        """Record that reading or writing has failed."""
        if not self._failing:
            metrics.REGISTRY_UP.set(0)
            log.error(
                "registry unavailable",
                server=self._server,
                failed=side,
                reason=reason,
                effect="known workers keep serving, new ones are not found",
            )
        self._failing.add(side)

    def worked(self, side: Side) -> None:
        """Record that reading or writing has worked."""
        if self._failing == {side}:
            log.info("registry available again", server=self._server)
        self._failing.discard(side)
        if not self._failing:
            metrics.REGISTRY_UP.set(1)
