"""The admin port of a router: a second HTTP server, on the router's own loop.

It shows and changes nothing of the cluster, but for the requests of the playground. Where other
hosts can reach it, it speaks TLS as the clients' ports do. A failure here is logged, and never ends
the router. Owns the console's feed and the port.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

from baton.router.client_access.router import Router
from baton.router.console.console_app import console_app
from baton.router.console.console_feed import ConsoleFeed
from baton.router.console.console_state import ConsoleState
from baton.router.http_frontend.http_protocol import BoundedHttpProtocol
from baton.runtime import logs
from baton.runtime.config import is_loopback
from baton.runtime.errors import ConfigError
from baton.runtime.serving.client_tls import ClientTls
from baton.runtime.serving.http_server import HttpServer, listen

KEY_CHARACTERS = 16  # at least
BACKLOG = 64
MAX_CONNECTIONS = 64
DRAIN_S = 2  # for answers when the router stops
STOP_S = 5.0
KEEP_ALIVE_S = 30

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class AdminAccess:
    """Where the admin port listens, and the operator's key; port 0: the system chooses. Raises
    ConfigError for a key that is easily guessed."""

    key: str
    host: str = "127.0.0.1"
    port: int = 0

    def __post_init__(self) -> None:
        if len(self.key) < KEY_CHARACTERS or not self.key.isascii() or not self.key.isprintable():
            raise ConfigError(
                f"the operator's key needs {KEY_CHARACTERS} characters or more, printable ASCII: "
                "set BATON_ADMIN_KEY, for example to the output of `openssl rand -hex 16`"
            )

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the port."""
        return is_loopback(self.host)

    def url(self, port: int, router_tls: str) -> str:
        """Return the URL of the port, with the value of `router.tls`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if router_tls and not self.on_loopback else ''}://{host}:{port}"

    def address(self, port: int, router_tls: str) -> str:
        """Return host:port, behind https:// if the port speaks TLS."""
        return self.url(port, router_tls).removeprefix("http://")


class AdminPort:
    """Listens from its construction, serves from `start` until `stop`; on the loopback without
    `tls`. Raises ConfigError if the port cannot be used."""

    def __init__(self, router: Router, access: AdminAccess, tls: ClientTls | None = None) -> None:
        state = ConsoleState(router)
        self._feed = ConsoleFeed(state)
        self._started = asyncio.Event()
        parts = (self._feed, state.board)
        app = console_app(router, *parts, access.key, on_loopback=access.on_loopback)
        self._listener = _listen(access)
        self.port: int = self._listener.getsockname()[1]
        self._server = HttpServer(
            app,
            self._listener,
            protocol=BoundedHttpProtocol,
            backlog=BACKLOG,
            drain_s=DRAIN_S,
            keep_alive_s=KEEP_ALIVE_S,
            limit_concurrency=MAX_CONNECTIONS,
            on_started=self._started.set,
            tls=None if access.on_loopback else tls,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Return once the port answers."""
        for name, work in (("console", self._feed.run()), ("admin", self._serve())):
            task = asyncio.create_task(work, name=name)
            task.add_done_callback(_report)
            self._tasks.append(task)
        await self._started.wait()  # bounded: `_serve` sets it in any case

    async def stop(self) -> None:
        """End all streams and close the port. May be called twice."""
        self._feed.close()
        self._server.should_exit = True
        if self._tasks:
            await asyncio.wait(self._tasks[1:], timeout=STOP_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)  # `_report` has logged them
        self._listener.close()

    async def _serve(self) -> None:
        try:
            await self._server.run_until_exit()
        finally:
            self._started.set()


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("admin port failed", part=task.get_name(), error=repr(error))


def _listen(access: AdminAccess) -> socket.socket:
    try:
        return listen(access.host, access.port, BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:  # the last: no host name
        raise ConfigError(
            f"the admin port {access.host}:{access.port} cannot be used ({error}): give "
            "--admin-port a free port, or 0, and --admin-host an address of this machine"
        ) from error
