"""grpc.health.v1: whether requests can be served, as /readyz reports it; by Check, List and Watch.

Needs no API key. Owns the number of watching clients.
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
from baton.router.grpc_frontend.call import ClientCall, Method
from baton.router.grpc_frontend.inference import SERVICE
from baton.runtime.errors import NotFound, Overloaded, Unavailable

HEALTH = "grpc.health.v1.Health"
SERVICES = ("", SERVICE)
MAX_WATCHERS = 64
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3  # of HealthCheckResponse.ServingStatus
HEALTH_READ_TIMEOUT_S = 2.0  # short: these calls need no key
FLEET_POLL_S = 0.2  # between two checks for watching clients
HEALTH_TENANT = b"health"  # of calls without a key; it is no digest
_Message = TypeVar("_Message", bound=Message)


class HealthService:
    """`stopping` ends the calls of watching clients."""

    def __init__(self, router: Router, stopping: asyncio.Event) -> None:
        self._router = router
        self._stopping = stopping
        self._watchers = 0

    def methods(self) -> dict[str, Method]:
        return {"Check": self._check, "List": self._list, "Watch": self._watch}

    async def _check(self, call: ClientCall) -> None:
        service = (await self._read(call, HealthCheckRequest)).service
        status = self._status(service)
        if status == SERVICE_UNKNOWN:
            raise NotFound(f"there is no service {service[:200]!r}: leave it out", "service")
        await call.write(HealthCheckResponse(status=status))

    async def _list(self, call: ClientCall) -> None:
        await self._read(call, HealthListRequest)
        statuses = {
            service: HealthCheckResponse(status=self._status(service)) for service in SERVICES
        }
        await call.write(HealthListResponse(statuses=statuses))

    async def _watch(self, call: ClientCall) -> None:
        if self._watchers >= MAX_WATCHERS:
            raise Overloaded(f"{MAX_WATCHERS} clients watch already: use Check instead")
        self._watchers += 1
        try:
            service = (await self._read(call, HealthCheckRequest)).service
            sent: int | None = None
            while not self._stopping.is_set():
                status = self._status(service)
                if status != sent:
                    await call.write(HealthCheckResponse(status=status))
                    sent = status
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FLEET_POLL_S):
                        await self._stopping.wait()
            raise Unavailable("the router stops")
        finally:
            self._watchers -= 1

    async def _read(self, call: ClientCall, message_type: type[_Message]) -> _Message:
        with self._router.bodies.account(HEALTH_TENANT) as body:
            return await call.read(message_type, body, HEALTH_READ_TIMEOUT_S)

    def _status(self, service: str) -> int:
        if service not in SERVICES:
            return SERVICE_UNKNOWN
        try:
            self._router.check_ready()
        except Unavailable:
            return NOT_SERVING
        return SERVING
