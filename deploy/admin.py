"""The admin port of a worker: audit, metrics, health and orders over plain HTTP.

    GET /audit    JSON from the worker's own books (blocks, leases, pins, quarantine)
    GET /metrics  Prometheus text
    GET /healthz  200 while the event loop turns
    POST /drain   an order: given with the cluster's token as Bearer, answered 202 at once

Meant for loopback or a private network: what it shows needs no login. It reads no body and
closes every connection after one answer. It knows no scheduler: what audit and orders do is
the business of the callables that it is given, which run on the event loop.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from baton.runtime import logs, metrics
from baton.runtime.errors import ConfigError

log = logs.get(__name__)

HEAD_BYTES = 8 << 10  # request line and headers
HEAD_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class _Answer:
    status: str
    content_type: str
    body: bytes


class AdminServer:
    """Serves its routes from `start` until `stop`, on the running event loop.

    `audit` returns a dict that JSON can hold; an exception from it is logged and answered 500,
    and never ends the worker. `orders` by path: callables that return at once. Without a `token`
    no order is taken.
    """

    def __init__(
        self,
        host: str,
        port: int,
        audit: Callable[[], dict[str, Any]],
        *,
        orders: Mapping[str, Callable[[], None]] | None = None,
        token: str = "",
    ) -> None:
        self._host = host
        self._port = port
        self._audit = audit
        self._orders = orders or {}
        self._token = token
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listen, and return the address as host:port (the port is the real one, also for 0).

        Raises ConfigError when the port cannot be had.
        """
        try:
            self._server = await asyncio.start_server(
                self._accept, self._host, self._port, limit=HEAD_BYTES
            )
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"the admin port {self._host}:{self._port} cannot be used ({error}): "
                "set worker.admin_port to a free one, or to 0"
            ) from error
        port = self._server.sockets[0].getsockname()[1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{port}"

    async def stop(self) -> None:
        """Close the port and every open connection. May be called twice."""
        if self._server is None:
            return
        self._server.close()
        connections = list(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        self._server = None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                method, answer = self._answer(head)
                writer.write(_encode(answer, with_body=method != "HEAD"))
                await writer.drain()
        except asyncio.LimitOverrunError:
            answer = _Answer("431 Request Header Fields Too Large", TEXT, b"headers too large\n")
            writer.write(_encode(answer, with_body=True))
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            log.debug("admin client left")
        finally:
            writer.close()

    def _answer(self, head: bytes) -> tuple[str, _Answer]:
        parts = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            return "GET", _Answer("400 Bad Request", TEXT, b"not an HTTP/1.x request\n")
        method, path = parts[0], parts[1].split("?", 1)[0]
        if path in self._orders:
            return method, self._ordered(method, path, head)
        if method not in ("GET", "HEAD"):
            return method, _Answer("405 Method Not Allowed", TEXT, b"use GET\n")
        if path == "/audit":
            return method, self._audited()
        if path == "/metrics":
            return method, _Answer("200 OK", PROMETHEUS, metrics.render())
        if path == "/healthz":
            return method, _Answer("200 OK", TEXT, b"ok\n")
        return method, _Answer("404 Not Found", TEXT, b"routes: /audit /metrics /healthz\n")

    def _ordered(self, method: str, path: str, head: bytes) -> _Answer:
        if method != "POST":
            return _Answer("405 Method Not Allowed", TEXT, b"use POST\n")
        if not self._token or not hmac.compare_digest(_bearer(head), self._token.encode()):
            return _Answer("401 Unauthorized", TEXT, b"give the cluster's token as Bearer\n")
        log.info("an order came through the admin port", order=path)
        self._orders[path]()
        return _Answer("202 Accepted", TEXT, b"accepted\n")

    def _audited(self) -> _Answer:
        try:
            return _Answer("200 OK", JSON, orjson.dumps(self._audit()))
        except Exception as error:  # the answer says so: no audit ends a worker
            log.exception("audit failed")
            body = orjson.dumps({"error": f"{type(error).__name__}: {error}"})
            return _Answer("500 Internal Server Error", JSON, body)


def _bearer(head: bytes) -> bytes:
    """The token of the Authorization header; empty where there is none."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        scheme, _, token = value.strip().partition(b" ")
        if name.strip().lower() == b"authorization" and scheme.lower() == b"bearer":
            return token.strip()
    return b""


def _encode(answer: _Answer, *, with_body: bool) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (answer.body if with_body else b"")
