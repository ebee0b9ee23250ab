"""Links over real gRPC on loopback: order, ends, cancellation, the token, and our errors."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from baton.runtime.grpc_links import (
    ClientLink,
    ServerLink,
    credentials,
    open_channel,
)
from baton.runtime.links import LinkClosed
from tests.support.grpc_loopback import (
    TOKEN,
    Bytes,
    ServerBytes,
    ServerContext,
    echo,
    linked,
    served,
    within,
)

pytestmark = pytest.mark.timed


async def test_messages_arrive_in_order() -> None:
    async with linked(echo) as link:
        for number in range(50):
            await link.send(str(number).encode())
        got = [await within(link.receive()) for _ in range(50)]
        assert got == [str(number).encode() for number in range(50)]


async def test_one_task_sends_while_another_receives() -> None:
    async with linked(echo) as link:
        receiving = asyncio.create_task(link.receive())
        # The receiver has to wait before anything is sent.
        await asyncio.sleep(0.01)
        await link.send(b"x")
        assert await within(receiving) == b"x"


async def test_what_was_sent_before_a_close_reaches_the_server() -> None:
    seen: list[bytes] = []
    ended = asyncio.Semaphore(0)

    async def collect(_: object, context: ServerContext) -> None:
        link: ServerBytes = ServerLink(context)
        try:
            while True:
                seen.append(await link.receive())
        except LinkClosed:
            await link.close()
        finally:
            ended.release()

    rounds = 40
    async with served(collect) as address, open_channel(address) as channel:
        for _ in range(rounds):
            call = channel.stream_stream("/t/Stream")(metadata=credentials(TOKEN))
            link: Bytes = ClientLink(call)
            await link.send(b"renew")
            await link.send(b"closed")
            await link.close()
        for _ in range(rounds):
            await within(ended.acquire())
    assert seen == [b"renew", b"closed"] * rounds


async def test_what_was_sent_before_the_server_ended_is_received() -> None:
    async def burst(_: object, context: ServerContext) -> None:
        link: ServerBytes = ServerLink(context)
        for number in range(100):
            await link.send(str(number).encode())
        await link.close()

    async with linked(burst) as link:
        await asyncio.sleep(0.1)  # the end arrives before the first receive
        got = [await within(link.receive()) for _ in range(100)]
        assert got == [str(number).encode() for number in range(100)]
        for _ in range(2):
            with pytest.raises(LinkClosed, match="ended"):
                await within(link.receive())
        with pytest.raises(LinkClosed):
            await within(link.send(b"x"))


async def test_the_clients_close_ends_the_server_and_its_own_receiver() -> None:
    seen: list[str] = []
    done = asyncio.Event()

    async def wait(_: object, context: ServerContext) -> None:
        link: ServerBytes = ServerLink(context)
        try:
            await link.receive()
        except LinkClosed as closed:
            seen.append(str(closed))
        done.set()

    async with linked(wait) as link:
        receiving = asyncio.create_task(link.receive())
        # The receiver has to wait when the link is closed.
        await asyncio.sleep(0.01)
        await link.close()
        await within(done.wait())
        with pytest.raises(LinkClosed):
            await within(receiving)
        for work in (link.receive(), link.send(b"x")):
            with pytest.raises(LinkClosed, match="this side"):
                await within(work)
        await link.close()
    assert seen == ["the peer ended the stream"]


async def test_close_cuts_off_a_server_that_does_not_end() -> None:
    cancelled = asyncio.Event()

    async def stubborn(_: object, context: ServerContext) -> None:
        try:
            # This handler ends only when it is cancelled.
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    async with linked(stubborn) as link:
        await link.send(b"x")
        await within(link.close())
        await within(cancelled.wait())


async def test_the_servers_close_wakes_its_own_receiver() -> None:
    reasons: list[str] = []

    async def close_under(_: object, context: ServerContext) -> None:
        link: ServerBytes = ServerLink(context)
        await link.receive()
        receiving = asyncio.create_task(link.receive())
        # The receiver has to wait when the link is closed.
        await asyncio.sleep(0.01)
        await link.close()
        for work in (receiving, link.receive(), link.send(b"x")):
            try:
                await work
            except LinkClosed as closed:
                reasons.append(str(closed))

    async with linked(close_under) as link:
        await link.send(b"go")
        with pytest.raises(LinkClosed):
            await within(link.receive())
    assert len(reasons) == 3


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.02])
async def test_a_cancelled_receive_keeps_the_link_and_its_messages(
    delay_s: float,
) -> None:
    async def impatient_echo(_: object, context: ServerContext) -> None:
        link: ServerBytes = ServerLink(context)
        try:
            while True:
                await link.send(await _impatient(link, delay_s))
        except LinkClosed:
            await link.close()

    async with linked(impatient_echo) as link:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(link.receive(), 0.01)
        for number in range(30):
            await link.send(str(number).encode())
        got = [await within(_impatient(link, delay_s)) for _ in range(30)]
    assert got == [str(number).encode() for number in range(30)]


async def _impatient(link: Bytes | ServerBytes, delay_s: float) -> bytes:
    """Receive by cancelling and asking again, until a message is there."""
    while True:
        receiving = asyncio.create_task(link.receive())
        # The caller gives up after this time.
        await asyncio.sleep(delay_s)
        receiving.cancel()
        try:
            message: bytes = await receiving
        except asyncio.CancelledError:
            continue
        return message


async def test_a_cancelled_send_keeps_the_link() -> None:
    go = asyncio.Event()
    sizes: list[int] = []

    async def slow(_: object, context: ServerContext) -> None:
        link: ServerBytes = ServerLink(context)
        await go.wait()
        try:
            while True:
                sizes.append(len(await link.receive()))
        except LinkClosed:
            await link.close()

    async with linked(slow) as link:
        message = bytes(1 << 20)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 100:  # gRPC's flow control stops us long before
                await asyncio.wait_for(link.send(message), 0.2)
                sent += 1
        go.set()
        await within(link.send(b"last"))
    assert sizes == [1 << 20] * (sent + 1) + [4]  # the cancelled one went out, whole


async def test_a_link_without_a_peer_is_closed() -> None:
    async with served(echo) as address:
        pass
    async with open_channel(address) as channel:
        link: Bytes = ClientLink(channel.stream_stream("/t/Stream")(metadata=credentials(TOKEN)))
        with pytest.raises(LinkClosed):
            await within(link.receive())
        with pytest.raises(LinkClosed):
            await within(link.send(b"x"))
        await within(link.close())


_ECHO_PROCESS = """
import asyncio, grpc
from baton.runtime.grpc_links import ServerLink, open_server

async def echo(_, context):
    link = ServerLink(context)
    while True:
        await link.send(await link.receive())

async def main():
    server = open_server("a token")
    handler = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("t", {"Stream": handler}),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.sleep(100)

asyncio.run(main())
"""


@pytest.fixture
def echo_process() -> Iterator[tuple[int, int]]:
    """Pid and port of an echo server in a process of its own."""
    with subprocess.Popen([sys.executable, "-c", _ECHO_PROCESS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.kill()


async def test_a_killed_server_ends_the_link(echo_process: tuple[int, int]) -> None:
    pid, port = echo_process
    async with open_channel(f"127.0.0.1:{port}") as channel:
        link: Bytes = ClientLink(channel.stream_stream("/t/Stream")(metadata=credentials(TOKEN)))
        await within(link.send(b"x"))
        assert await within(link.receive()) == b"x"
        receiving = asyncio.create_task(link.receive())
        # The receiver has to wait when the server is killed.
        await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(LinkClosed):
            await within(receiving)
        with pytest.raises(LinkClosed):
            await within(link.send(b"y"))
        await within(link.close())
