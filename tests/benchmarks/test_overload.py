"""How the benchmark of overload counts what comes back by gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from baton.proto import client_pb2, client_pb2_grpc
from benchmarks.overload import TOKENS, GrpcClient, LoadResults

CODE = grpc.StatusCode
SAID = (("x-request-id", "req-1"),)
COME_AGAIN = (*SAID, ("retry-after", "1"))

Refusal = tuple[grpc.StatusCode, tuple[tuple[str, str], ...]]


class Scripted(client_pb2_grpc.InferenceServicer):
    """Answers after `wait_s`, or refuses with a code and trailers."""

    def __init__(self, wait_s: float = 0.0, refusal: Refusal | None = None) -> None:
        self.wait_s, self.refusal = wait_s, refusal
        self.prompts: list[str] = []

    async def Generate(
        self, request: client_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[client_pb2.GenerateResponse]:
        assert request.max_tokens == TOKENS and request.ignore_eos
        self.prompts.append(request.prompt)
        await asyncio.sleep(self.wait_s)  # This router answers late.
        if self.refusal is not None:
            code, trailers = self.refusal
            await context.abort(code, "as scripted", trailers)
        yield client_pb2.GenerateResponse(usage=client_pb2.Usage(completion_tokens=TOKENS))


@contextlib.asynccontextmanager
async def client_of(router: Scripted, deadline_s: float = 5.0) -> AsyncIterator[GrpcClient]:
    server = grpc.aio.server()
    client_pb2_grpc.add_InferenceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = GrpcClient(f"127.0.0.1:{port}", deadline_s)
    try:
        yield client
    finally:
        await client.close()
        await server.stop(0)


async def test_an_answer_in_time_is_good() -> None:
    seen, router = LoadResults(), Scripted(wait_s=0.05)
    async with client_of(router) as client:
        for _ in range(2):
            await client.complete(seen)
    assert (seen.statuses, seen.good, len(set(router.prompts))) == ({200: 2}, 2, 2)
    assert all(0.05 <= took_s < 5 for took_s in seen.answered_s) and not seen.refused_grpc_ms


@pytest.mark.parametrize(
    ("refusal", "status", "timed", "untold"),
    [
        ((CODE.UNAVAILABLE, COME_AGAIN), 503, 1, 0),
        ((CODE.UNAVAILABLE, SAID), 503, 1, 1),
        ((CODE.DEADLINE_EXCEEDED, SAID), 504, 0, 0),
        ((CODE.INTERNAL, SAID), 500, 0, 0),
        ((CODE.UNAVAILABLE, ()), 0, 0, 0),  # not the router's word
    ],
)
async def test_what_a_status_counts_as(
    refusal: Refusal, status: int, timed: int, untold: int
) -> None:
    seen = LoadResults()
    async with client_of(Scripted(wait_s=0.02, refusal=refusal)) as client:
        await client.complete(seen)
    assert (seen.statuses, seen.good, seen.asked) == ({status: 1}, 0, 1)
    assert (len(seen.refused_grpc_ms), seen.without_retry_after) == (timed, untold)
    assert all(20 <= took_ms < 5000 for took_ms in seen.refused_grpc_ms)  # its deadline


async def test_a_deadline_that_passes_is_not_a_refusal() -> None:
    seen = LoadResults()
    async with client_of(Scripted(wait_s=5.0), deadline_s=0.1) as client:
        await client.complete(seen)
    assert seen.statuses == {504: 1} and not seen.refused_grpc_ms
