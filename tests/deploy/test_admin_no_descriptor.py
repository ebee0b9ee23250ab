"""An admin port in a process without a file descriptor left: who asks waits, and the log stays
small."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from baton.deploy.processes import admin
from baton.deploy.processes.admin import AdminServer

pytestmark = pytest.mark.timed

COMPLAINT = "socket.accept() out of system resource"
ALIVE = b"GET /healthz HTTP/1.1\r\n\r\n"
WITHOUT_S = 1.5  # complaints come at once, and again after a second


@contextmanager
def none_left() -> Iterator[None]:
    least = os.dup(0)  # the lowest that is free
    os.close(least)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_who_comes_waits_and_it_complains_once_a_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.get_running_loop()
    server = AdminServer("127.0.0.1", 0, lambda _: {})
    host, port = (await server.start()).split(":")
    with ExitStack() as ends:
        waiting = [ends.enter_context(socket.socket()) for _ in range(3)]
        with none_left():
            began_s = loop.time()
            for client in waiting:
                client.setblocking(False)
                await loop.sock_connect(client, (host, int(port)))
                await loop.sock_sendall(client, ALIVE)
            await asyncio.sleep(WITHOUT_S)
            for client in waiting:
                with pytest.raises(BlockingIOError):
                    client.recv(1)
            tries = 1 + int(loop.time() - began_s)  # the first, and one after each second
        told = [record for record in caplog.records if COMPLAINT in record.getMessage()]
        assert told and len(told) <= tries, len(told)
        for client in waiting:
            async with asyncio.timeout(10):
                assert (await loop.sock_recv(client, 100)).startswith(b"HTTP/1.1 200")
    await server.stop()


async def test_as_many_wait_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio makes a listener's queue as long as what it takes in a turn."""
    true_start, listeners = asyncio.start_server, list[asyncio.Server]()

    async def start_server(*given: object, **named: object) -> asyncio.Server:
        listeners.append(await true_start(*given, **named))  # type: ignore[arg-type]  # as it came
        return listeners[0]

    monkeypatch.setattr(asyncio, "start_server", start_server)
    server = AdminServer("127.0.0.1", 0, lambda _: {})
    await server.start()
    (listener,) = listeners[0].sockets
    told = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
    await server.stop()
    assert struct.unpack_from("=I", told, 28) == (admin.BACKLOG,)  # tcpi_sacked: of a listener
