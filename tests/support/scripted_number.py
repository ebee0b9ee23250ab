"""The number of workers of a fleet that is followed, without a server."""

from __future__ import annotations

from dataclasses import dataclass

from baton.deploy.control.fleet_number import FleetSize, ForeignNumber
from baton.runtime.errors import BatonError


@dataclass
class ScriptedNumber:
    """`fault` is raised by every call; `foreign` stands at the key in place of a number."""

    size: FleetSize | None = None
    fault: BatonError | None = None
    foreign: bytes = b""
    closed: bool = False

    async def read(self) -> tuple[FleetSize, bytes] | None:
        self._answer()
        if self.foreign:
            raise ForeignNumber.at("baton:default:fleet", "it is not signed", self.foreign)
        return None if self.size is None else (self.size, self.text_of(self.size))

    def text_of(self, size: FleetSize) -> bytes:
        return repr(size).encode()

    async def propose(self, size: FleetSize) -> None:
        self._answer()
        if not self.foreign:
            self.size = self.size or size

    async def replace(self, text: bytes, size: FleetSize) -> None:
        self._answer()
        there = self.foreign or (b"" if self.size is None else self.text_of(self.size))
        if text != there:
            raise BatonError("the fleet's number has changed since it was read")
        self.size, self.foreign = size, b""

    async def close(self) -> None:
        self.closed = True

    def _answer(self) -> None:
        if self.fault is not None:
            raise self.fault
