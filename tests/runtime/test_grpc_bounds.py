"""Connections to a worker: how many there are, and for how long one may say nothing: at first,
in the middle of a handshake, after it, and when it was long used."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from baton.deploy.host.authority import Authority
from baton.runtime import grpc_links
from baton.runtime.cluster_config import SecurityConfig
from baton.runtime.grpc_links import (
    ClientLink,
    credentials,
    open_channel,
)
from baton.runtime.links import LinkClosed
from baton.runtime.tls import Tls
from tests.support.machine_speed import slowness
from tests.support.waiting import eventually

pytestmark = pytest.mark.timed

TOKEN = "a token"
LIMIT_S = 20.0 * slowness()
HANDSHAKE_S = math.ceil(slowness())  # gRPC takes whole seconds
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and SETTINGS


Ends = tuple[SecurityConfig | None, SecurityConfig | None]


@pytest.fixture(
    params=[
        pytest.param(True, id="TLS"),
        pytest.param(False, id="plain", marks=pytest.mark.nightly),
    ]
)
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Ends:
    """A worker's and a router's."""
    if not request.param:
        return None, None
    authority = Authority(tmp_path / "tls")
    worker, router = (
        SecurityConfig("on", str(files.authority), str(files.certificate), str(files.key))
        for files in (authority.issue("decode-0", "127.0.0.1"), authority.issue("router", None))
    )
    return worker, router


class Caller:
    """A link on a connection of its own."""

    def __init__(self, address: str, security: SecurityConfig | None) -> None:
        self._channel = open_channel(address, security and Tls(security))
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


async def test_a_silent_peer_is_disconnected_and_frees_its_slot(
    served: Callable[..., AbstractAsyncContextManager[str]],
    ends: Ends,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_links, "HANDSHAKE_S", HANDSHAKE_S)
    worker, router = ends
    opened = served(TOKEN, worker and Tls(worker), most=8)
    async with opened as address, AsyncExitStack() as closing:
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


Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connected(address: str, security: SecurityConfig | None) -> Pipe:
    """A bare connection, behind its TLS handshake."""
    secure = None
    if security is not None:
        secure = ssl.create_default_context(cafile=security.authority)
        secure.load_cert_chain(security.certificate, security.key)
        secure.set_alpn_protocols(["h2"])
    host, port = address.rsplit(":", 1)
    return await asyncio.open_connection(host, int(port), ssl=secure)


async def sent_away(pipe: Pipe) -> None:
    """Read, and answer nothing, until the server ends it. Raises TimeoutError."""
    reader, writer = pipe
    try:
        async with asyncio.timeout(LIMIT_S):
            with suppress(ConnectionError, ssl.SSLError):  # either way it is over
                while await reader.read(1 << 16):
                    pass
    finally:
        writer.transport.abort()  # a TLS close waits for its peer


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01\x00\x01", PREFACE[:30]])
async def test_a_peer_that_stops_in_its_handshake_is_disconnected(
    served: Callable[..., AbstractAsyncContextManager[str]],
    ends: Ends,
    monkeypatch: pytest.MonkeyPatch,
    said: bytes,
) -> None:
    """Nothing, the head of a TLS hello, or half an HTTP/2 preface: before the TLS handshake, and
    after it where the server has TLS."""
    monkeypatch.setattr(grpc_links, "HANDSHAKE_S", HANDSHAKE_S)
    worker, router = ends
    async with served(TOKEN, worker and Tls(worker)) as address:
        pipes = [await connected(address, None)]
        if router is not None:
            pipes.append(await connected(address, router))
        for _, writer in pipes:
            writer.write(said)
        await asyncio.gather(*(sent_away(pipe) for pipe in pipes))
        late = Caller(address, router)
        assert await late.hears()
        await late.close()


async def test_a_peer_that_is_gone_without_a_word_gives_its_place_back(
    served: Callable[..., AbstractAsyncContextManager[str]],
    ends: Ends,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has greeted, and answers no ping; one that answers stays, however long it says nothing."""
    monkeypatch.setattr(grpc_links, "PING_S", 1)
    monkeypatch.setattr(grpc_links, "PONG_S", 1)
    worker, router = ends
    async with served(TOKEN, worker and Tls(worker)) as address:
        standing = Caller(address, router)
        assert await standing.hears()
        gone = await connected(address, router)
        gone[1].write(PREFACE)
        assert await asyncio.wait_for(gone[0].read(9), LIMIT_S)  # it was let in
        await sent_away(gone)
        await asyncio.sleep(2.5)  # no event tells of several pings
        assert await standing.hears()
        await standing.close()


@asynccontextmanager
async def greeted(address: str, security: SecurityConfig | None) -> AsyncIterator[bool]:
    """Whether a server lets in a bare HTTP/2 connection, which ends with this block."""
    with suppress(ConnectionError, ssl.SSLError):  # of one that is refused
        reader, writer = await connected(address, security)
        try:
            writer.write(PREFACE)
            let_in = len(await asyncio.wait_for(reader.read(9), LIMIT_S)) > 0
            yield let_in
            return
        finally:
            writer.transport.abort()  # a TLS close waits for its peer
    yield False


async def test_connections_are_bounded_and_a_slot_is_released(
    served: Callable[..., AbstractAsyncContextManager[str]], ends: Ends
) -> None:
    worker, router = ends
    opened = served(TOKEN, worker and Tls(worker), most=3)
    async with opened as address, AsyncExitStack() as closing:
        standing = Caller(address, router)
        closing.push_async_callback(standing.close)
        assert await standing.hears()
        for _ in range(5):  # more than there are places, one round after the other
            await eventually(lambda: full_with_two(address, router), LIMIT_S)
            assert await standing.hears()


async def full_with_two(address: str, security: SecurityConfig | None) -> bool:
    """Whether two more are let in, and then none."""
    async with (
        greeted(address, security) as first,
        greeted(address, security) as second,
        greeted(address, security) as third,
    ):
        assert not (first and second and third)
        return first and second
