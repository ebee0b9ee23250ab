"""A uvicorn server on a socket of its own, inside a process that handles the signals itself.

asyncio accepts as many connections in one turn of its loop as the listen queue is long. In a
process without a free file descriptor each of these tries fails, is a line in the log, and is
repeated a second later: 100 lines a second with a usual queue. So the server starts with a queue
of ACCEPTS_PER_TURN, and gets its real queue when asyncio listens. (gRPC's listeners try once a
second.)
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton.runtime.serving.client_tls import ClientTls
from baton.runtime.serving.secure_connection import SecureConnection

ACCEPTS_PER_TURN = 1
TURNS_TO_CONNECT = 3  # asyncio needs two from accept to `connection_made`


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """Return a listening socket with a queue of `backlog` connections. Raises OSError, and
    UnicodeError for what can be no host name."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    # with the protocol's number asyncio disables Nagle's delay
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


class HttpServer(uvicorn.Server):
    """Serves `app` on `listener`; `on_started` is called once, when the port answers. Set
    `should_exit` to stop it; open requests have `drain_s` to end. With `tls` it answers https://
    alone."""

    def __init__(
        self,
        app: Callable[..., Any],
        listener: socket.socket,
        *,
        protocol: type[HttpToolsProtocol],
        backlog: int,
        drain_s: int,
        keep_alive_s: int,
        limit_concurrency: int | None = None,
        on_started: Callable[[], None],
        tls: ClientTls | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                # uvicorn calls it for each connection, so a function serves it as well
                http=protocol if tls is None else cast(Any, self._secure(protocol, tls)),
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                limit_concurrency=limit_concurrency,
                timeout_graceful_shutdown=drain_s,
                timeout_keep_alive=keep_alive_s,
                server_header=False,
                backlog=ACCEPTS_PER_TURN,
            )
        )
        self._listener = listener
        self._backlog = backlog
        self._on_started = on_started

    async def run_until_exit(self) -> None:
        """Serve until `should_exit` is set; then close the listener and all connections."""
        await self.serve(sockets=[self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listener.listen(self._backlog)
        self._on_started()

    def _secure(
        self, protocol: type[HttpToolsProtocol], tls: ClientTls
    ) -> Callable[..., SecureConnection]:
        """Return what makes a connection with TLS of the arguments that uvicorn gives a
        protocol."""

        def connect(**given: Any) -> SecureConnection:
            state, limit = given["server_state"], given["config"].limit_concurrency
            make = partial(protocol, **given)
            return SecureConnection(tls.context(), make, state.connections, limit)

        return connect

    def abort(self) -> None:
        """Close every open connection, unread bytes included."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # a connection that asyncio accepts while the server closes would never be closed
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        for _ in range(TURNS_TO_CONNECT):
            await asyncio.sleep(0)
        await super().shutdown(sockets)
