"""A gRPC server of plain bytes on loopback, and a link to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio

from baton.runtime.grpc_links import (
    ClientLink,
    ServerLink,
    credentials,
    open_channel,
    open_server,
)
from baton.runtime.links import LinkClosed

T = TypeVar("T")
TOKEN = "a token"


LIMIT_S = 30.0


ServerContext = grpc.aio.ServicerContext[bytes, bytes]


Handler = Callable[[Any, ServerContext], Awaitable[bytes | None]]


Bytes = ClientLink[bytes, bytes]


ServerBytes = ServerLink[bytes, bytes]


@asynccontextmanager
async def served(stream: Handler | None = None, unary: Handler | None = None) -> AsyncIterator[str]:
    """The address of a server with /t/Stream and /t/Unary of plain bytes."""
    server = open_server(TOKEN)
    methods: dict[str, Any] = {}
    if stream is not None:
        methods["Stream"] = grpc.stream_stream_rpc_method_handler(stream)
    if unary is not None:
        methods["Unary"] = grpc.unary_unary_rpc_method_handler(unary)
        methods["Out"] = grpc.unary_stream_rpc_method_handler(unary)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def linked(stream: Handler, token: str = TOKEN) -> AsyncIterator[Bytes]:
    async with served(stream) as address, open_channel(address) as channel:
        link: Bytes = ClientLink(channel.stream_stream("/t/Stream")(metadata=credentials(token)))
        try:
            yield link
        finally:
            await link.close()


async def within(work: Awaitable[T]) -> T:
    return await asyncio.wait_for(work, LIMIT_S)


async def echo(_: object, context: ServerContext) -> None:
    link: ServerBytes = ServerLink(context)
    try:
        while True:
            await link.send(await link.receive())
    except LinkClosed:
        await link.close()
