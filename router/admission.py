"""Admission: a fixed number of tickets; one request more is refused at once.

Pure: no clock, no waiting. Whoever takes a ticket gives it back exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from baton.runtime import metrics
from baton.runtime.errors import Overloaded

RETRY_AFTER_S = 1.0


class Admission:
    def __init__(self, tickets: int) -> None:
        self._tickets = tickets
        self.taken = 0

    @contextmanager
    def ticket(self) -> Iterator[None]:
        """Hold a ticket within the block. Raises Overloaded if none is left."""
        if self.taken >= self._tickets:
            raise Overloaded(
                f"{self._tickets} requests are being served: try again later", RETRY_AFTER_S
            )
        self.taken += 1
        metrics.ACTIVE_REQUESTS.set(self.taken)
        try:
            yield
        finally:
            self.taken -= 1
            metrics.ACTIVE_REQUESTS.set(self.taken)
