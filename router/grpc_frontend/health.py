"""grpc.health.v1: whether a request could be served, as /readyz says it: asked, listed, watched.

Open to everyone. Owns the number of those who watch.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TypeVar

from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import (
    HealthCheckRequest,
    HealthCheckResponse,
    HealthListRequest,
    HealthListResponse,
)

from baton.router.client_access.router import Router
from baton.router.grpc_frontend.call import Call, Method
from baton.router.grpc_frontend.inference import SERVICE
from baton.runtime.errors import NotFound, Overloaded, Unavailable

HEALTH = "grpc.health.v1.Health"
SERVICES = ("", SERVICE)
WATCHERS = 64
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3  # of HealthCheckResponse.ServingStatus
READ_S = 2.0  # for a question that everyone may ask
LOOK_S = 0.2  # between two looks at the fleet, for those who watch
HEALTH_TENANT = b"health"  # no digest of a key: of those that need none
_Shape = TypeVar("_Shape", bound=Message)


class Health:
    """`leaving` is set when no call is taken any more: who watches is let go."""

    def __init__(self, router: Router, leaving: asyncio.Event) -> None:
        self._router = router
        self._leaving = leaving
        self._watchers = 0

    def methods(self) -> dict[str, Method]:
        return {"Check": self._check, "List": self._list, "Watch": self._watch}

    async def _check(self, call: Call) -> None:
        service = (await self._read(call, HealthCheckRequest)).service
        status = self._status(service)
        if status == SERVICE_UNKNOWN:
            raise NotFound(f"there is no service {service[:200]!r}: leave it out", "service")
        await call.write(HealthCheckResponse(status=status))

    async def _list(self, call: Call) -> None:
        await self._read(call, HealthListRequest)
        statuses = {
            service: HealthCheckResponse(status=self._status(service)) for service in SERVICES
        }
        await call.write(HealthListResponse(statuses=statuses))

    async def _watch(self, call: Call) -> None:
        if self._watchers >= WATCHERS:
            raise Overloaded(f"{WATCHERS} clients watch already: ask by Check")
        self._watchers += 1
        try:
            service = (await self._read(call, HealthCheckRequest)).service
            told: int | None = None
            while not self._leaving.is_set():
                status = self._status(service)
                if status != told:
                    await call.write(HealthCheckResponse(status=status))
                    told = status
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._leaving.wait()
            raise Unavailable("the router stops")
        finally:
            self._watchers -= 1

    async def _read(self, call: Call, shape: type[_Shape]) -> _Shape:
        with self._router.bodies.account(HEALTH_TENANT) as body:
            return await call.read(shape, body, READ_S)

    def _status(self, service: str) -> int:
        if service not in SERVICES:
            return SERVICE_UNKNOWN
        try:
            self._router.check_ready()
        except Unavailable:
            return NOT_SERVING
        return SERVING
