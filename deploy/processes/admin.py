"""The admin port of a worker: audit, metrics and health over plain HTTP.

    GET /audit    JSON from the worker's own books (blocks, leases, pins, quarantine), which are
                  added up once a second at most
    GET /metrics  Prometheus text
    GET /healthz  200 while the process lives, however busy its loop is
    GET /readyz   200 while a generation could end here; else 503 and why not

Meant for loopback or a private network: what it shows needs no login, so nobody who asks may
cost the worker much, or keep out who asks whether it lives. It reads no body and closes every
connection after one answer. It has a thread and an event loop of its own, so that it can tell of
a worker's loop that does not turn; the callables it is given run on that loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from baton.deploy.host.ports import address_of
from baton.runtime import logs, metrics
from baton.runtime.accepts import ACCEPTS, lengthen
from baton.runtime.errors import ConfigError

log = logs.get(__name__)

T = TypeVar("T")

HEAD_BYTES = 8 << 10  # request line and headers
HEAD_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 64
BACKLOG = 100  # that the system keeps until they are taken
READY_S = 1.0  # in which a ready worker's loop turns
ANSWER_S = 5.0  # in which one does that is asked for its books
TAKE_S = 5.0  # for the client to take the answer
STOP_S = 5.0
CHECK_S = 1.0  # between two times that the books are added up
CHECK_SHARE = 0.05  # of the worker's time, where they are long

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class _Answer:
    status: str
    content_type: str
    body: bytes


class AdminServer:
    """Serves its routes from `start` until `stop`, in a thread of its own.

    `audit` returns a dict that JSON can hold, and is told whether to add up the books first; an
    exception from it is logged and answered 500, and never ends the worker. `trouble` says why
    the worker is not ready, empty if it is.
    """

    def __init__(
        self,
        host: str,
        port: int,
        audit: Callable[[bool], dict[str, Any]],
        *,
        trouble: Callable[[], str] = str,
    ) -> None:
        self._host = host
        self._port = port
        self._audit = audit
        self._trouble = trouble
        self._thread: threading.Thread | None = None
        self._connections: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._asked: dict[Callable[[], Any], asyncio.Future[Any]] = {}
        self._next_check_s = 0.0  # and what follows: the worker's loop alone uses them
        self._unbalanced: Exception | None = None

    async def start(self) -> str:
        """Listen, and return the address as host:port (the port is the real one, also for 0).

        Raises ConfigError when the port cannot be had.
        """
        self._worker = asyncio.get_running_loop()
        started: Future[str] = Future()
        thread = threading.Thread(
            target=lambda: asyncio.run(self._run(started)), name="admin", daemon=True
        )
        thread.start()
        address = await asyncio.wrap_future(started)
        self._thread = thread
        return address

    async def stop(self) -> None:
        """Close the port and every open connection. May be called twice."""
        if self._thread is None:
            return
        self._own.call_soon_threadsafe(self._stopped.set)
        await asyncio.to_thread(self._thread.join, STOP_S)
        self._thread = None

    # What follows runs in the server's own thread.

    async def _run(self, started: Future[str]) -> None:
        self._own, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        try:
            server = await asyncio.start_server(
                self._accept, self._host, self._port, limit=HEAD_BYTES, backlog=ACCEPTS
            )
            lengthen(server.sockets, BACKLOG)
        except (OSError, OverflowError, UnicodeError) as error:  # the last: no host name
            failure = ConfigError(
                f"the admin port {self._host}:{self._port} cannot be used ({error}): "
                "set worker.admin_port to a free one, or to 0, and worker.host to an address of "
                "this machine"
            )
            failure.__cause__ = error
            started.set_exception(failure)
            return
        port = server.sockets[0].getsockname()[1]
        started.set_result(address_of(self._host, port))
        await self._stopped.wait()  # the server's whole life
        # asyncio loses the socket of whoever it lets in while the server closes
        self._own.remove_reader(server.sockets[0].fileno())
        await asyncio.sleep(0)
        server.close()
        connections = list(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._stopped.is_set():
            writer.transport.abort()
            return
        if len(self._connections) >= MAX_CONNECTIONS:  # whoever says nothing must not keep out
            oldest = next(iter(self._connections))  # whoever asks whether the worker lives
            del self._connections[oldest]
            oldest.cancel()
        writer.transport.set_write_buffer_limits(0)  # what was drained is the kernel's
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections[task] = None
        task.add_done_callback(lambda _: self._connections.pop(task, None))
        task.add_done_callback(lambda _: writer.transport.abort())  # it may end before it began

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            method, answer = await self._answer(head)  # in ANSWER_S at most
            async with asyncio.timeout(TAKE_S):
                writer.write(_encode(answer, with_body=method != "HEAD"))
                await writer.drain()
        except asyncio.LimitOverrunError:
            answer = _Answer("431 Request Header Fields Too Large", TEXT, b"headers too large\n")
            writer.write(_encode(answer, with_body=True))
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            log.debug("admin client left")

    async def _answer(self, head: bytes) -> tuple[str, _Answer]:
        parts = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            return "GET", _Answer("400 Bad Request", TEXT, b"not an HTTP/1.x request\n")
        method, path = parts[0], parts[1].split("?", 1)[0]
        try:
            return method, await self._shown(method, path)
        except TimeoutError:
            return method, _Answer("503 Service Unavailable", TEXT, b"the loop does not turn\n")

    async def _shown(self, method: str, path: str) -> _Answer:
        if method not in ("GET", "HEAD"):
            return _Answer("405 Method Not Allowed", TEXT, b"use GET\n")
        if path == "/audit":
            return await self._audited()
        if path == "/metrics":
            return _Answer("200 OK", PROMETHEUS, metrics.render())
        if path == "/healthz":
            return _Answer("200 OK", TEXT, b"ok\n")
        if path == "/readyz":
            if trouble := await self._on_worker(self._trouble, READY_S):
                return _Answer("503 Service Unavailable", TEXT, f"{trouble}\n".encode())
            return _Answer("200 OK", TEXT, b"ready\n")
        return _Answer("404 Not Found", TEXT, b"routes: /audit /metrics /healthz /readyz\n")

    async def _audited(self) -> _Answer:
        try:
            found = await self._on_worker(self._books, ANSWER_S)
            return _Answer("200 OK", JSON, orjson.dumps(found))
        except TimeoutError:
            raise
        except Exception as error:  # the answer says so: no audit ends a worker
            log.exception("audit failed")
            body = orjson.dumps({"error": f"{type(error).__name__}: {error}"})
            return _Answer("500 Internal Server Error", JSON, body)

    async def _on_worker(self, ask: Callable[[], T], within_s: float) -> T:
        """The answer of a callable on the worker's loop; who asks the same while it is under way
        shares it. Raises TimeoutError if the loop stalls."""
        heard: asyncio.Future[T] | None = self._asked.get(ask)
        if heard is None:
            answer: Future[T] = Future()

            def call() -> None:
                try:
                    answer.set_result(ask())
                except Exception as error:  # raised where it is awaited
                    answer.set_exception(error)

            self._worker.call_soon_threadsafe(call)
            heard = self._asked[ask] = asyncio.wrap_future(answer)
            heard.add_done_callback(lambda done: done.cancelled() or done.exception())
            heard.add_done_callback(lambda _: self._asked.pop(ask))
        await asyncio.wait({heard}, timeout=within_s)
        if not heard.done():
            raise TimeoutError
        return heard.result()

    def _books(self) -> dict[str, Any]:
        """On the worker's loop. Books that did not balance stay so until they are added up
        again."""
        began_s = time.monotonic()
        if began_s < self._next_check_s:
            if self._unbalanced is not None:
                raise self._unbalanced.with_traceback(None)
            return self._audit(False)
        self._unbalanced = None
        try:
            return self._audit(True)
        except Exception as error:  # kept for those who ask before the next check, and raised
            self._unbalanced = error
            raise
        finally:
            took_s = time.monotonic() - began_s
            self._next_check_s = began_s + max(CHECK_S, took_s / CHECK_SHARE)


def _encode(answer: _Answer, *, with_body: bool) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (answer.body if with_body else b"")
