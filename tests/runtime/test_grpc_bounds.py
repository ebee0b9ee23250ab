"""Connections to a worker: for how long one may say nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.deploy.authority import Authority
from baton.runtime import grpc_links
from baton.runtime.config import SecurityConfig
from baton.runtime.grpc_links import (
    ClientLink,
    ServerLink,
    credentials,
    open_channel,
    open_port,
    open_server,
)
from baton.runtime.links import LinkClosed
from baton.runtime.tls import Tls

TOKEN = "a token"
LIMIT_S = 20.0


@pytest.fixture(params=[True, False], ids=["TLS", "plain"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Tls | None, Tls | None]:
    """A worker's and a router's."""
    if not request.param:
        return None, None
    authority = Authority(tmp_path / "tls")
    worker, router = (
        Tls(SecurityConfig("on", str(files.authority), str(files.certificate), str(files.key)))
        for files in (authority.issue("decode-0", "127.0.0.1"), authority.issue("router", None))
    )
    return worker, router


@asynccontextmanager
async def served(tls: Tls | None) -> AsyncIterator[str]:
    async def echo(_: Any, context: Any) -> None:
        link: ServerLink[bytes, bytes] = ServerLink(context)
        try:
            while True:
                await link.send(await link.receive())
        except LinkClosed:
            await link.close()

    server = open_server(TOKEN)
    methods = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", methods),))
    port = open_port(server, "127.0.0.1:0", tls)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class Caller:
    """A link on a connection of its own."""

    def __init__(self, address: str, tls: Tls | None) -> None:
        self._channel = open_channel(address, tls)
        call = self._channel.stream_stream("/t/Echo")(metadata=credentials(TOKEN))
        self._link: ClientLink[bytes, bytes] = ClientLink(call)

    async def hears(self) -> bool:
        try:
            async with asyncio.timeout(LIMIT_S):
                await self._link.send(b"word")
                return await self._link.receive() == b"word"
        except LinkClosed:
            return False

    async def close(self) -> None:
        await self._link.close()
        await self._channel.close()


async def test_who_says_nothing_is_sent_away_and_others_do_not_notice(
    ends: tuple[Tls | None, Tls | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_links, "HANDSHAKE_S", 1)
    worker, router = ends
    async with served(worker) as address, AsyncExitStack() as closing:
        standing = Caller(address, router)
        closing.push_async_callback(standing.close)
        assert await standing.hears()
        host, port = address.rsplit(":", 1)
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
        assert await standing.hears()
        async with asyncio.timeout(LIMIT_S):
            for reader, writer in idle:
                with suppress(ConnectionError):  # either way it is over
                    await reader.read()
                writer.close()
        late = Caller(address, router)
        closing.push_async_callback(late.close)
        assert await late.hears() and await standing.hears()
