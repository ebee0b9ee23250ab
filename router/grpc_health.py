"""grpc.health.v1: whether a request could be served, as /readyz says it, asked once or watched.

Open to everyone. Owns the number of those who watch.
"""

from __future__ import annotations

import asyncio
import contextlib

from baton.proto import client_pb2
from baton.router.app import Router
from baton.router.grpc_call import Call, Method
from baton.router.grpc_inference import SERVICE
from baton.runtime.errors import NotFound, Overloaded, Unavailable

HEALTH = "grpc.health.v1.Health"
WATCHERS = 64
READ_S = 2.0  # for a question that everyone may ask
LOOK_S = 0.2  # between two looks at the fleet, for those who watch
HEALTH_TENANT = b"health"  # no digest of a key: of those that need none
_Status = client_pb2.HealthResponse.Status


class Health:
    """`leaving` is set when no call is taken any more: who watches is let go."""

    def __init__(self, router: Router, leaving: asyncio.Event) -> None:
        self._router = router
        self._leaving = leaving
        self._watchers = 0

    def methods(self) -> dict[str, Method]:
        return {"Check": self._check, "Watch": self._watch}

    async def _check(self, call: Call) -> None:
        service = await self._service(call)
        status = self._status(service)
        if status == client_pb2.HealthResponse.SERVICE_UNKNOWN:
            raise NotFound(f"there is no service {service[:200]!r}: leave it out", "service")
        await call.write(client_pb2.HealthResponse(status=status))

    async def _watch(self, call: Call) -> None:
        if self._watchers >= WATCHERS:
            raise Overloaded(f"{WATCHERS} clients watch already: ask by Check")
        self._watchers += 1
        try:
            service = await self._service(call)
            told: _Status | None = None
            while not self._leaving.is_set():
                status = self._status(service)
                if status != told:
                    await call.write(client_pb2.HealthResponse(status=status))
                    told = status
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._leaving.wait(), LOOK_S)
            raise Unavailable("the router stops")
        finally:
            self._watchers -= 1

    async def _service(self, call: Call) -> str:
        with self._router.bodies.account(HEALTH_TENANT) as body:
            return (await call.read(client_pb2.HealthRequest, body, READ_S)).service

    def _status(self, service: str) -> _Status:
        if service not in ("", SERVICE):
            return client_pb2.HealthResponse.SERVICE_UNKNOWN
        try:
            self._router.check_ready()
        except Unavailable:
            return client_pb2.HealthResponse.NOT_SERVING
        return client_pb2.HealthResponse.SERVING
