"""A router without a file descriptor left: what is open goes on, and its log stays small."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from baton.router import server
from tests.support.router_process import FAST_ROUTER, StartRouter

pytestmark = pytest.mark.timed

COMPLAINT = "socket.accept() out of system resource"
LIVE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
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


async def test_connected_clients_are_answered_and_new_ones_wait(router: StartRouter) -> None:
    loop = asyncio.get_running_loop()
    complaints: list[str] = []
    loop.set_exception_handler(lambda _, reported: complaints.append(reported["message"]))
    async with router() as running:
        host, port = running.url.removeprefix("http://").split(":")
        assert (await running.http.get("/livez")).status_code == 200  # its connection stays open
        with ExitStack() as ends:
            waiting = [ends.enter_context(socket.socket()) for _ in range(3)]
            with none_left():
                began_s = loop.time()
                for client in waiting:
                    client.setblocking(False)
                    await loop.sock_connect(client, (host, int(port)))
                    await loop.sock_sendall(client, LIVE)
                while loop.time() < began_s + WITHOUT_S:
                    assert (await running.http.get("/livez")).status_code == 200
                    await asyncio.sleep(0.01)  # The client asks at this period.
                for client in waiting:
                    with pytest.raises(BlockingIOError):
                        client.recv(1)
                tries = 1 + int(loop.time() - began_s)  # the first, and one after each second
            assert set(complaints) == {COMPLAINT} and len(complaints) <= tries, len(complaints)
            for client in waiting:
                async with asyncio.timeout(10):
                    assert (await loop.sock_recv(client, 100)).startswith(b"HTTP/1.1 200")


async def test_as_many_connections_wait_as_the_setting_says(
    router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio makes a listener's queue as long as what it takes in a turn."""
    true_bind, listeners = server.bind, list[socket.socket]()

    def bind(host: str, port: int, backlog: int) -> socket.socket:
        listeners.append(true_bind(host, port, backlog))
        return listeners[0]

    monkeypatch.setattr("baton.router.server.bind", bind)
    async with router(config=replace(FAST_ROUTER, backlog=77)):
        reported = listeners[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
        assert struct.unpack_from("=I", reported, 28) == (
            77,
        )  # tcpi_sacked: of a listener, its most
