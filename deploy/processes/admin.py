"""The admin port of a worker: audit, metrics and health over plain HTTP.

    GET /audit    JSON: the counts of blocks, leases, pins and quarantine, checked against each
                  other once a second at most
    GET /metrics  Prometheus text
    GET /healthz  200 while the process lives, however busy its loop is
    GET /readyz   200 while the worker can finish a request; else 503 and the reason

Meant for loopback or a private network: it asks for no login. So no client may cost the worker
much, or keep a health probe out (see `AdminHttpProtocol`). The server has a thread and an event
loop of its own, so that it can report that the worker's loop is blocked; the callables that it is
given run on the worker's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from baton.deploy.host.ports import address_of
from baton.deploy.processes.admin_protocol import AdminHttpProtocol
from baton.runtime import logs, metrics
from baton.runtime.errors import ConfigError
from baton.runtime.serving.http_server import HttpServer, listen

log = logs.get(__name__)

T = TypeVar("T")
Audit = Callable[[bool], dict[str, Any]]

CHECK_INTERVAL_S = 1.0  # between two checks of the pool
CHECK_SHARE = 0.05  # of the worker's time, where a check takes long
BACKLOG = 100  # connections that the kernel keeps until they are accepted
READY_TIMEOUT_S = 1.0  # for the loop of a ready worker
AUDIT_TIMEOUT_S = 5.0
GAUGES_TIMEOUT_S = 1.0
STOP_TIMEOUT_S = 5.0
DRAIN_S = 2  # for requests that are being answered when the server stops

JSON = "application/json"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
LOOP_BLOCKED = PlainTextResponse("the worker's event loop is blocked\n", 503)


class AuditLimiter:
    """Limits how much of a worker's time the checks behind `/audit` take: calls `audit(check)`,
    with `check` true only when a check is due. Owned by the worker's loop."""

    def __init__(self, audit: Audit, clock: Callable[[], float] = time.monotonic) -> None:
        self._audit = audit
        self._clock = clock
        self._next_check_s = clock()
        self._failure: Exception | None = None

    def report(self) -> dict[str, Any]:
        """Return the worker's audit. After a check has failed, raise the same error until the
        next check."""
        started_s = self._clock()
        if started_s < self._next_check_s:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            return self._audit(False)
        self._failure = None
        try:
            return self._audit(True)
        except Exception as error:  # kept for calls before the next check, and raised
            self._failure = error
            raise
        finally:
            check_s = self._clock() - started_s
            self._next_check_s = started_s + max(CHECK_INTERVAL_S, check_s / CHECK_SHARE)


class AdminServer:
    """Serves its routes from `start` until `stop`, in a thread of its own.

    `audit` returns a dict that JSON can hold; its argument is whether to check the counts first.
    An exception from it is logged and answered 500, and never ends the worker. `not_ready`
    returns why the worker is not ready, or None if it is.
    `publish_gauges` sets the gauges that come from the worker's state, before they are rendered.
    `port_option` is what sets `port`, for an error.
    """

    def __init__(
        self,
        host: str,
        port: int,
        audit: Audit,
        *,
        not_ready: Callable[[], str | None],
        publish_gauges: Callable[[], None] = lambda: None,
        port_option: str = "worker.admin_port",
    ) -> None:
        self._host = host
        self._port = port
        self._audit = AuditLimiter(audit)
        self._not_ready = not_ready
        self._publish_gauges = publish_gauges
        self._port_option = port_option
        self._thread: threading.Thread | None = None
        self._calls: dict[Callable[[], object], asyncio.Future[object]] = {}

    async def start(self) -> str:
        """Listen, and return the address as host:port (the real port, also for port 0). Raises
        ConfigError if the port cannot be used."""
        self._worker_loop = asyncio.get_running_loop()
        listener = self._listen()
        address = address_of(self._host, listener.getsockname()[1])
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(listener, started), name="admin", daemon=True
        )
        self._thread.start()
        await asyncio.wrap_future(started)
        return address

    async def stop(self) -> None:
        """Close the port and every open connection. May be called twice."""
        if self._thread is None:
            return
        self._server.should_exit = True
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)
        self._thread = None

    def _listen(self) -> socket.socket:
        try:
            return listen(self._host, self._port, BACKLOG)
        except (OSError, OverflowError, UnicodeError) as error:  # the last: no host name
            raise ConfigError(
                f"the admin port {self._host}:{self._port} cannot be used ({error}): "
                f"set {self._port_option} to a free one, or to 0, and worker.host to an address of "
                "this machine"
            ) from error

    # What follows runs in the server's own thread.

    def _run(self, listener: socket.socket, started: Future[None]) -> None:
        try:
            asyncio.run(self._serve(listener, started))
        except Exception as error:  # raised in `start`, which waits for it, or here once it runs
            if started.done():
                raise
            started.set_exception(error)
        finally:
            listener.close()

    async def _serve(self, listener: socket.socket, started: Future[None]) -> None:
        routes = {
            "/audit": self._answer_audit,
            "/metrics": self._answer_metrics,
            "/healthz": self._answer_health,
            "/readyz": self._answer_ready,
        }
        app = Starlette(
            routes=[Route(path, answer, methods=["GET"]) for path, answer in routes.items()],
            exception_handlers={404: self._answer_unknown},
        )
        self._server = HttpServer(
            app,
            listener,
            protocol=AdminHttpProtocol,
            backlog=BACKLOG,
            drain_s=DRAIN_S,
            keep_alive_s=0,  # one answer a connection
            on_started=lambda: started.set_result(None),
        )
        await self._server.run_until_exit()

    async def _answer_audit(self, request: Request) -> Response:
        try:
            report = await self._on_worker_loop(self._audit.report, AUDIT_TIMEOUT_S)
            return Response(orjson.dumps(report), media_type=JSON)
        except TimeoutError:
            return LOOP_BLOCKED
        except Exception as error:  # the answer reports it: no audit ends a worker
            log.exception("audit failed")
            body = orjson.dumps({"error": f"{type(error).__name__}: {error}"})
            return Response(body, 500, media_type=JSON)

    async def _answer_metrics(self, request: Request) -> Response:
        with contextlib.suppress(TimeoutError):  # a blocked loop: the gauges are those of before
            await self._on_worker_loop(self._publish_gauges, GAUGES_TIMEOUT_S)
        return Response(metrics.render(), headers={"content-type": PROMETHEUS})

    async def _answer_health(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _answer_ready(self, request: Request) -> Response:
        try:
            reason = await self._on_worker_loop(self._not_ready, READY_TIMEOUT_S)
        except TimeoutError:
            return LOOP_BLOCKED
        return PlainTextResponse(f"{reason}\n", 503) if reason else PlainTextResponse("ready\n")

    async def _answer_unknown(self, request: Request, error: Exception) -> Response:
        return PlainTextResponse("routes: /audit /metrics /healthz /readyz\n", 404)

    async def _on_worker_loop(self, call: Callable[[], T], timeout_s: float) -> T:
        """Return the result of `call` on the worker's loop. Requests that need the same call
        while it is pending share it. Raises TimeoutError if the loop is blocked."""
        pending = self._calls.get(call)
        if pending is None:
            pending = self._calls[call] = asyncio.wrap_future(self._submit(call))
            pending.add_done_callback(lambda done: done.cancelled() or done.exception())
            pending.add_done_callback(lambda _: self._calls.pop(call))
        await asyncio.wait({pending}, timeout=timeout_s)
        if not pending.done():
            raise TimeoutError
        return pending.result()  # type: ignore[return-value]  # `call`'s own result

    def _submit(self, call: Callable[[], object]) -> Future[object]:
        result: Future[object] = Future()

        def run() -> None:
            try:
                result.set_result(call())
            except Exception as error:  # raised where the result is awaited
                result.set_exception(error)

        self._worker_loop.call_soon_threadsafe(run)
        return result
