"""A server with a stream that echoes, for tests of what lies below the services."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import grpc
import pytest

from baton.runtime.grpc_links import MAX_CONNECTIONS, ServerLink, open_port, open_server
from baton.runtime.links import LinkClosed
from baton.runtime.tls import Tls
from tests.support.grpc_loopback import ServerContext


@asynccontextmanager
async def echoing(
    token: str, tls: Tls | None, host: str = "127.0.0.1", most: int = MAX_CONNECTIONS
) -> AsyncIterator[str]:
    async def echo(_: object, context: ServerContext) -> None:
        link: ServerLink[bytes, bytes] = ServerLink(context)
        try:
            while True:
                await link.send(await link.receive())
        except LinkClosed:
            await link.close()

    server = open_server(token, most)
    methods = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", methods),))
    port = open_port(server, f"{host}:0", tls)
    await server.start()
    try:
        yield f"{host}:{port}"
    finally:
        await server.stop(None)


@pytest.fixture
def served() -> Callable[..., AbstractAsyncContextManager[str]]:
    """`async with served(token, tls) as address`: a server with /t/Echo, a stream of bytes."""
    return echoing
