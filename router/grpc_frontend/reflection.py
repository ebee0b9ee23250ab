"""gRPC reflection: the descriptions of services and messages, for tools such as grpcurl.

The answers are grpcio-reflection's; versions v1 and v1alpha differ only in the service's name.
Requires an API key if the router does. Stateless.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from baton.router.client_access.router import Router
from baton.router.grpc_frontend.call import ClientCall, Method
from baton.router.grpc_frontend.health import HEALTH
from baton.router.grpc_frontend.inference import SERVICE
from baton.router.requests.body_budget import HeldBody
from baton.runtime.errors import InvalidRequest

REFLECTION = reflection.SERVICE_NAME
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
MAX_QUESTIONS = 1024  # in one call


class ReflectionService:
    """Answers a client's questions about the services, one after the other."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._servicer = reflection.aio.ReflectionServicer((SERVICE, HEALTH, REFLECTION))

    def methods(self) -> dict[str, Method]:
        return {"ServerReflectionInfo": self._answer}

    async def _answer(self, call: ClientCall) -> None:
        with self._router.bodies.account(call.tenant) as body:
            async for answer in self._servicer.ServerReflectionInfo(_questions(call, body), None):
                await call.write(answer)


async def _questions(call: ClientCall, body: HeldBody) -> AsyncIterator[ServerReflectionRequest]:
    """Yield the call's messages. Raises InvalidRequest for one over MAX_QUESTIONS."""
    for _ in range(MAX_QUESTIONS):
        question = await call.read_next(ServerReflectionRequest, body)
        if question is None:
            return
        yield question
    raise InvalidRequest(f"a call may ask {MAX_QUESTIONS} questions: open another call")
