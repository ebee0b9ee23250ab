"""An ask by gRPC, with the product's own client messages: its messages, as they come, and its end.

A connection of its own for each, as of a client of its own. Knows no right answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from baton.proto import client_pb2, client_pb2_grpc
from chaos.answers import AnswerPart, of_grpc
from chaos.asks import Ask


class NoConnection(Exception):
    """The router took none in time."""


@dataclass(frozen=True, slots=True)
class End:
    """How a call failed. `by_router`: it said so itself; `busy`: and when to come again."""

    code: grpc.StatusCode
    detail: str
    by_router: bool
    busy: bool


@asynccontextmanager
async def asked(
    address: str, ask: Ask, within_s: float, api_key: str, connect_s: float
) -> AsyncIterator[AsyncIterator[AnswerPart]]:
    """Each message. Raises NoConnection, grpc.aio.AioRpcError."""
    fields = ask.body()
    for http_only in ("stream", "stream_options"):  # a call always streams, and tells its usage
        fields.pop(http_only, None)
    metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            async with asyncio.timeout(connect_s):
                await channel.channel_ready()
        except TimeoutError as error:
            raise NoConnection(f"no connection within {connect_s:g} s") from error
        stub = client_pb2_grpc.InferenceStub(channel)
        request = client_pb2.GenerateRequest(**fields)
        call = stub.Generate(request, timeout=within_s, metadata=metadata)
        async with aclosing(_messages(call)) as messages:
            yield messages


async def _messages(
    call: grpc.aio.UnaryStreamCall[client_pb2.GenerateRequest, client_pb2.GenerateResponse],
) -> AsyncGenerator[AnswerPart, None]:
    async for message in call:
        yield of_grpc(message)


def end_of(error: grpc.aio.AioRpcError) -> End:
    trailers = dict(error.trailing_metadata() or ())
    return End(
        error.code(),
        f"gRPC {error.code().name}: {error.details()}",
        by_router="x-request-id" in trailers,
        busy="retry-after" in trailers,
    )
