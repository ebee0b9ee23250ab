"""An admin port in a process without a free file descriptor: clients wait, and the log stays
small."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from baton.deploy.processes import admin
from baton.deploy.processes.admin import AdminServer
from baton.runtime.serving import http_server

pytestmark = pytest.mark.timed

COMPLAINT = "socket.accept() out of system resource"
ALIVE = b"GET /healthz HTTP/1.1\r\n\r\n"
WITHOUT_S = 1.5  # complaints come at once, and again after a second


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # the standard ones stay open; what another thread closes in the midst of it makes no room
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_clients_wait_and_one_error_a_second_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, logger="asyncio")  # whatever other tests have set
    loop = asyncio.get_running_loop()
    server = AdminServer("127.0.0.1", 0, lambda _: {}, not_ready=lambda: None)
    host, port = (await server.start()).split(":")
    with ExitStack() as ends:
        waiting = [ends.enter_context(socket.socket()) for _ in range(3)]
        with no_free_descriptor():
            began_s = loop.time()
            for client in waiting:
                client.setblocking(False)
                await loop.sock_connect(client, (host, int(port)))
                await loop.sock_sendall(client, ALIVE)
            # The server has to lack descriptors for longer than the period of its error.
            await asyncio.sleep(WITHOUT_S)
            for client in waiting:
                with pytest.raises(BlockingIOError):
                    client.recv(1)
            tries = 1 + int(loop.time() - began_s)  # the first, and one after each second
        errors = [record for record in caplog.records if COMPLAINT in record.getMessage()]
        assert errors and len(errors) <= tries, len(errors)
        for client in waiting:
            async with asyncio.timeout(10):
                assert (await loop.sock_recv(client, 100)).startswith(b"HTTP/1.1 200")
    await server.stop()


async def test_the_listen_queue_has_its_length_after_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """asyncio makes a listener's queue as long as what it accepts in a turn."""
    listeners = list[socket.socket]()

    def listen(host: str, port: int, backlog: int) -> socket.socket:
        listeners.append(http_server.listen(host, port, backlog))
        return listeners[-1]

    monkeypatch.setattr(admin, "listen", listen)
    server = AdminServer("127.0.0.1", 0, lambda _: {}, not_ready=lambda: None)
    await server.start()
    info = listeners[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
    await server.stop()
    assert struct.unpack_from("=I", info, 28) == (admin.BACKLOG,)  # tcpi_sacked: of a listener
