"""The orders of a fleet whose number of decode workers a controller may change.

    number on Redis ─ read each turn ─▶ FleetFollower ─▶ orders ─▶ FleetDriver

Before the number was read once there are no orders: those of the command line could end workers
that were asked for since. Later, while it cannot be read, the last one holds, and a server that has
lost it gets it again. Owns the last number.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from baton.deploy.control.fleet_number import FleetSize
from baton.deploy.nodes.fleet_plan import FleetOptions
from baton.deploy.nodes.worker_order import WorkerOrder
from baton.runtime import logs
from baton.runtime.errors import BatonError

log = logs.get(__name__)


class SharedNumber(Protocol):
    """The number as others see it (fleet_number.py)."""

    async def read(self) -> tuple[FleetSize, bytes] | None: ...

    def text_of(self, size: FleetSize) -> bytes: ...

    async def propose(self, size: FleetSize) -> None: ...

    async def replace(self, text: bytes, size: FleetSize) -> None: ...


class FleetFollower:
    """`options` has the first number of each role. That of prefill workers stays: the controller
    changes roles."""

    def __init__(self, number: SharedNumber, options: FleetOptions) -> None:
        self._number = number
        self._options = options
        self._size: FleetSize | None = None
        self._failure: str | None = None

    async def orders(self) -> list[WorkerOrder] | None:
        """Return the orders by the newest number; None while none is known."""
        try:
            found = await self._read()
        except BatonError as error:
            if str(error) != self._failure:
                log.warning("fleet number not read", reason=str(error))
            self._failure = str(error)
        else:
            self._failure = None
            if found != self._size:
                log.info("fleet number followed", prefill=found.prefill, decode=found.decode)
            self._size = found
        if self._size is None:
            return None
        return replace(self._options, decode=self._size.decode).orders()

    async def _read(self) -> FleetSize:
        own = self._size or FleetSize(self._options.prefill, self._options.decode)
        found = await self._number.read()
        if found is None:
            await self._number.propose(own)
            return own
        before, text = found
        size = FleetSize(own.prefill, before.decode)
        # the command line has another number than the last run's, or the token is replaced: the
        # text would not count once the earlier token is not accepted
        if text != self._number.text_of(size):
            await self._number.replace(text, size)
        return size
