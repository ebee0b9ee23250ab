"""HTTP/1.1 for a load generator: kept connections, and the time at which each byte was read.

    HttpClient.post ─▶ a free connection, else a new one ─▶ Connection ─▶ ResponseSink

httptools parses; the clock is read once for each read of a socket, before anything is parsed. There
are as many connections as requests under way. Knows nothing of OpenAI.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import httptools

from baton.deploy.host.router_trust import fault_of, https_context
from baton.runtime.errors import BatonError, ConfigError

CONNECT_TIMEOUT_S = 10.0


class ExchangeFailed(BatonError):
    """A request got no complete answer; `reason`: `connect`, `broken` or `malformed`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ResponseSink(Protocol):
    """Takes an answer as it arrives. Header names are lower case. Raises nothing."""

    def head(self, status: int, headers: dict[bytes, bytes]) -> None: ...

    def body(self, data: bytes, now_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The root of a server. `headers` are complete lines that each request carries."""

    host: str
    port: int
    tls: bool
    headers: bytes

    @classmethod
    def parse(cls, url: str, api_key: str | None) -> ServerAddress:
        """Read http://HOST:PORT or https://HOST:PORT, with or without /v1. Raises ConfigError."""
        wrong = ConfigError(f"{url} is no URL of a server: write it as http://127.0.0.1:8000")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise wrong from error
        if parts.scheme not in ("http", "https") or not host or port == 0 or parts.query:
            raise wrong
        if parts.path.rstrip("/") not in ("", "/v1"):
            raise ConfigError(f"{url} has the path {parts.path}: give the server's root")
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the API key holds a character that no HTTP header can carry")
        tls = parts.scheme == "https"
        lines = [f"Host: {parts.netloc.rpartition('@')[2]}", "Content-Type: application/json"]
        if api_key:
            lines.append(f"Authorization: Bearer {api_key}")
        headers = "".join(f"{line}\r\n" for line in lines).encode()
        return cls(host, port or (443 if tls else 80), tls, headers)


class Connection(asyncio.Protocol):
    """One connection: one exchange after the other."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.reusable = False  # the last answer is complete, and the server keeps the connection
        self.answering = False  # a byte of the answer has come
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._sink: ResponseSink | None = None
        self._now_s = 0.0
        self._headers: dict[bytes, bytes] = {}
        self._headers_read = self._delimited = False

    async def exchange(self, request: bytes, sink: ResponseSink) -> None:
        """Send a request and feed its answer to `sink`. Raises ExchangeFailed. If the caller is
        cancelled, the connection is closed."""
        assert self._transport is not None
        self.reusable = self.answering = self._headers_read = self._delimited = False
        self._sink = sink
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._ended
        finally:
            self._sink = None
            if not self.reusable:
                self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now_s = self._clock()
        if self._sink is None:  # bytes that belong to no answer
            self.reusable = False
            self.close()
            return
        self.answering = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail("malformed", f"the answer is not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        if self._sink is None or self._ended.done():
            return
        if self._headers_read and not self._delimited and error is None:
            self._ended.set_result(None)  # the end of the connection is that of the body
        else:
            why = "the server closed the connection before the end of its answer"
            self._fail("broken", f"{why} ({error})" if error else why)

    # -- httptools ----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._headers_read = False
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._sink is None:  # 1xx: the answer is still to come
            return
        self._headers_read = True
        coding = self._headers.get(b"transfer-encoding", b"").lower()
        self._delimited = b"content-length" in self._headers or b"chunked" in coding
        self._sink.head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink.body(data, self._now_s)

    def on_message_complete(self) -> None:
        if self._headers_read and not self._ended.done():
            self.reusable = self._delimited and self._parser.should_keep_alive()
            self._ended.set_result(None)

    def _fail(self, reason: str, message: str) -> None:
        if not self._ended.done():
            self._ended.set_exception(ExchangeFailed(reason, message))
        self.close()


class HttpClient:
    """Connections to one server."""

    def __init__(self, address: ServerAddress, clock: Callable[[], float]) -> None:
        self._address = address
        self._clock = clock
        self._free: list[Connection] = []
        self._tls = https_context(address.host, address.port) if address.tls else None

    async def post(self, path: str, body: bytes, sink: ResponseSink) -> None:
        """Send a body and feed the answer to `sink`. Raises ExchangeFailed.

        A kept connection that the server closes before the first byte of an answer is replaced
        once: the server closed it while it was idle."""
        head = f"POST {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n".encode()
        request = b"".join((head, self._address.headers, b"\r\n", body))
        while self._free:
            connection = self._free.pop()
            if connection.reusable:
                try:
                    await self._exchange(connection, request, sink)
                    return
                except ExchangeFailed as error:
                    if connection.answering or error.reason != "broken":
                        raise
                    break
        await self._exchange(await self._connect(), request, sink)

    def close(self) -> None:
        for connection in self._free:
            connection.close()

    async def _exchange(self, connection: Connection, request: bytes, sink: ResponseSink) -> None:
        await connection.exchange(request, sink)
        if connection.reusable:
            self._free.append(connection)

    async def _connect(self) -> Connection:
        loop, address = asyncio.get_running_loop(), self._address
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._clock), address.host, address.port, ssl=self._tls
                )
        except TimeoutError as error:
            raise ExchangeFailed("connect", f"no connection in {CONNECT_TIMEOUT_S:g} s") from error
        except OSError as error:
            url = f"https://{address.host}:{address.port}"
            raise ExchangeFailed("connect", fault_of(url, error) or str(error)) from error
        return connection
