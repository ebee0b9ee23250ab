"""What comes before a body: bounded in size and time, and answered as every other error."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from baton.router.http_frontend import http_protocol
from baton.router.http_frontend.http_protocol import HEAD_BYTES, BoundedHttpProtocol
from tests.support.json_values import Json
from tests.support.machine_speed import slowness
from tests.support.router_process import FAST_ROUTER, RunningRouter, StartRouter
from tests.support.waiting import eventually

pytestmark = pytest.mark.timed

Talk = Callable[..., Awaitable[tuple[int, bytes]]]
# What asks on an open connection, and both ends of it.
Wire = tuple[Callable[[bytes], Awaitable[bytes]], asyncio.StreamReader, asyncio.StreamWriter]
Unread = tuple[RunningRouter, socket.socket, list[BoundedHttpProtocol]]


@pytest.fixture
async def talk(router: StartRouter) -> AsyncIterator[Talk]:
    async with router() as running:
        host, port = running.url.removeprefix("http://").split(":")

        async def send(*parts: bytes) -> tuple[int, bytes]:
            """Write, and read to the end: the status and the body."""
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                async with asyncio.timeout(20):
                    answer = await reader.read()
            finally:
                writer.close()
            head, _, body = answer.partition(b"\r\n\r\n")
            return int(head.split()[1]), body

        yield send


def message(body: bytes) -> str:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return str(error["message"])


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00" + bytes(64),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: abc\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: [::]\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /livez HTTP/1.1\r\nX-Request-Id: a\x01b\r\n\r\n",
    ],
)
async def test_what_is_not_http_gets_an_error_as_every_other(talk: Talk, raw: bytes) -> None:
    status, body = await talk(raw)
    assert status == 400 and "HTTP/1.1" in message(body)


async def test_a_head_without_end_is_cut_off(talk: Talk) -> None:
    line = b"X-Filler: " + b"a" * 8000 + b"\r\n"
    head = [b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"] + [line] * (HEAD_BYTES // len(line) + 2)
    status, body = await talk(*head)
    assert status == 431 and str(HEAD_BYTES) in message(body)


async def test_a_long_body_is_no_head(talk: Talk) -> None:
    body = json.dumps({"prompt": "fox " * (HEAD_BYTES // 2)}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nHost: [::]\r\nConnection: close\r\n"
    head += b"Content-Length: %d\r\n\r\n"
    status, answer = await talk(head % len(body), body[:100], body[100:])
    assert status == 400 and "shorten" in message(answer)


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\nX-Slow: "])
async def test_a_head_that_does_not_come_ends_the_connection(
    talk: Talk, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    status, body = await talk(sent)
    assert status == 408 and "0.2 s" in message(body)


async def test_pipelined_requests_are_all_answered(talk: Talk) -> None:
    one = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    last = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    status, rest = await talk(one * 20 + last)
    assert status == 200 and rest.count(b"200 OK") == 20


async def test_connections_are_bounded_and_health_is_not(router: StartRouter) -> None:
    async with router(
        config=replace(FAST_ROUTER, max_requests=3, connections_per_request=1)
    ) as running:
        host, port = running.url.removeprefix("http://").split(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(2)]

        async def ask(head: bytes) -> tuple[bytes, bytes]:
            """What is answered on a connection of its own, up to its end."""
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head)
            async with asyncio.timeout(20):
                answer = await reader.read()
            writer.close()
            head, _, body = answer.partition(b"\r\n\r\n")
            return head, body

        for line in (b"GET /v1/models HTTP/1.1\r\n\r\n", b"", b"\x00"):
            head, body = await ask(line)
            assert b" 503 " in head and b"retry-after: 1" in head
            assert json.loads(body)["error"]["code"] == "overloaded"
        for what in (b"GET /livez", b"GET /readyz", b"GET /metrics", b"HEAD /readyz"):
            head, _ = await ask(b"%s HTTP/1.1\r\nhost: localhost\r\n\r\n" % what)
            assert b" 200 " in head  # and closed afterwards: it is one too many still
        assert (await running.http.get("/v1/models")).status_code == 200
        idle[0][1].close()
        last = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"

        async def let_in() -> bool:
            return b" 200 " in (await ask(last))[0]

        await eventually(let_in)  # once the router has seen the end
        idle[1][1].close()


async def test_trailers_are_dropped(talk: Talk) -> None:
    body = b'{"model":"tiny","prompt":"a","max_tokens":1}'
    status, _ = await talk(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\nX-Request-Deadline: no\r\n\r\n"
        % (len(body), body)
    )
    assert status == 200


async def test_trailers_without_end_close_the_connection(router: StartRouter) -> None:
    async with router() as running:
        host, port = running.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"1\r\na\r\n0\r\n"
        )
        try:
            async with asyncio.timeout(20):
                while True:
                    writer.write(b"X-Filler: " + b"a" * 8000 + b"\r\n")
                    await writer.drain()
                    await asyncio.sleep(0)
        except ConnectionError:
            pass  # cut off, as it should be
        finally:
            writer.close()


@pytest.fixture
async def wire(router: StartRouter, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Wire]:
    """`reader, writer` of a connection on which one request was answered and kept open."""
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 1.0)
    async with router() as running:
        host, port = running.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))

        async def ask(head: bytes) -> bytes:
            writer.write(head)
            async with asyncio.timeout(20):
                answer = await reader.readuntil(b"\r\n\r\n")
                length = int(answer.lower().split(b"content-length: ")[1].split()[0])
                return answer + await reader.readexactly(length)

        yield ask, reader, writer
        writer.close()


LIVE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def test_head_gets_the_same_head_and_no_body(wire: Wire) -> None:
    """As balancers may ask for health. The next answer follows at once."""
    ask, reader, writer = wire
    whole = await ask(LIVE)
    for path in (b"livez", b"metrics", b"v1/models", b"v1/models/none"):
        writer.write(b"HEAD /%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)
        async with asyncio.timeout(20):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.split()[1] == (b"404" if path.endswith(b"none") else b"200")
        assert b"content-length" in head.lower()
    assert (await ask(LIVE)).splitlines()[-1] == whole.splitlines()[-1]


async def test_bytes_after_an_answer_that_are_no_head_close_it(wire: Wire) -> None:
    """Such a byte ended the wait for the next request, and none began: it was there for ever."""
    ask, reader, writer = wire
    assert b"200 OK" in await ask(LIVE)
    writer.write(b"\r\n")
    async with asyncio.timeout(10):
        assert await reader.read() == b""  # closed, and without a word


async def test_the_rest_of_an_unread_body_is_bounded(wire: Wire) -> None:
    ask, _, writer = wire
    endless = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert b"404" in await ask(endless)
    try:
        async with asyncio.timeout(10):
            while True:
                writer.write(b"1\r\na\r\n")
                await writer.drain()
                await asyncio.sleep(0.02)  # each piece comes by itself
    except ConnectionError:
        pass  # cut off, as it should be


async def test_a_request_after_a_stray_byte_is_answered(wire: Wire) -> None:
    ask, _, writer = wire
    assert b"200 OK" in await ask(LIVE)
    writer.write(b"\r\n")
    await asyncio.sleep(0.1)  # the stray bytes come first
    assert b"200 OK" in await ask(LIVE)
    await asyncio.sleep(1.2)  # longer than a head may take: the timer went with the request
    assert b"200 OK" in await ask(LIVE)


async def test_a_surplus_connection_has_a_second_for_its_head(
    router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "SURPLUS_TIMEOUT_S", 1.0)
    async with router(
        config=replace(FAST_ROUTER, max_requests=2, connections_per_request=1)
    ) as running:
        host, port = running.url.removeprefix("http://").split(":")
        idle = await asyncio.open_connection(host, int(port))
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /livez HTTP/1.1\r\nX-Slow: ")
        async with asyncio.timeout(10):  # much less than HEAD_TIMEOUT_S
            assert b" 503 " in await reader.read()
        writer.close()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(LIVE[:20])
        await asyncio.sleep(0.05)  # the parts come apart
        writer.write(LIVE[20:])
        async with asyncio.timeout(10):
            assert b" 200 " in await reader.read()
        for each in (writer, idle[1]):
            each.close()


async def test_a_long_body_and_the_next_head_are_no_long_head(
    router: StartRouter,
) -> None:
    async with router() as running:
        host, port = running.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"prompt": "a", "model": "tiny", "max_tokens": 1}).encode()
        body += b" " * (HEAD_BYTES + 20_000)
        first = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        writer.write(first % len(body) + body[:10])
        await writer.drain()
        await asyncio.sleep(0.1)  # the parts come apart
        writer.write(body[10:] + LIVE[:25])
        await asyncio.sleep(0.1)  # the parts come apart
        writer.write(LIVE[25:-2] + b"Connection: close\r\n\r\n")
        async with asyncio.timeout(20):
            answers = await reader.read()
        assert answers.count(b"200 OK") == 2 and b" 431 " not in answers
        writer.close()


async def test_a_head_that_began_behind_a_body_is_cut_off_too(router: StartRouter) -> None:
    async with router() as running:
        host, port = running.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabcGET /livez"
        )
        async with asyncio.timeout(20):
            assert b"404" in await reader.readline()
            while b" 431 " not in (line := await _next_line(reader, writer)):
                assert b"200" not in line
        writer.close()


async def _next_line(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """What is answered next, while the filling of a head goes on."""
    reading = asyncio.create_task(reader.readline())
    while not reading.done():
        writer.write(b"a" * 4000)
        await asyncio.sleep(0.005)  # each piece comes by itself
    return reading.result()


@pytest.fixture
async def unread(router: StartRouter, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Unread]:
    """A router that soon gives up a client that does not read, a connection with small buffers,
    and the connections that the router has given up or ended."""
    lost: list[BoundedHttpProtocol] = []
    made, ended = BoundedHttpProtocol.connection_made, BoundedHttpProtocol.connection_lost

    def narrow(self: BoundedHttpProtocol, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    def note(self: BoundedHttpProtocol, exc: Exception | None) -> None:
        lost.append(self)
        ended(self, exc)

    async with router() as running:
        monkeypatch.setattr(BoundedHttpProtocol, "connection_made", narrow)
        monkeypatch.setattr(BoundedHttpProtocol, "connection_lost", note)
        monkeypatch.setattr(http_protocol, "SEND_S", 0.5)
        host, port = running.url.removeprefix("http://").split(":")
        page = await running.http.get("/metrics")
        assert len(page.content) > 18 << 10  # more than the buffers below take
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
            yield running, client, lost


def post(**fields: Json) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 50, **fields}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


METRICS = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "requests",
    [METRICS * 20, METRICS.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")],
    ids=["pipelined", "closing"],
)
async def test_a_client_that_does_not_read_is_cut_off(unread: Unread, requests: bytes) -> None:
    """A close alone would wait for the client to take what is left, for ever."""
    _, client, lost = unread
    client.send(requests)
    await eventually(lambda: lost)


async def test_an_unread_stream_is_cut_off(unread: Unread) -> None:
    running, client, lost = unread
    client.send(post(max_tokens=900, stream=True, ignore_eos=True))
    await eventually(lambda: lost)
    await eventually(lambda: not running.workers["decode-0"].held)


async def test_a_slow_reader_gets_everything(
    unread: Unread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One long body, of which something is taken in every SEND_S."""
    _, client, lost = unread
    monkeypatch.setattr(http_protocol, "SEND_BYTES", 1)
    loop, read = asyncio.get_running_loop(), b""
    client.send(post(max_tokens=2000, logprobs=5, ignore_eos=True))
    async with asyncio.timeout(40 * slowness()):
        while b"\r\n\r\n" not in read:
            read += await loop.sock_recv(client, 1024)
        head, _, body = read.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split()[0])
        began_s = loop.time()
        while len(body) < length - (32 << 10):  # which the router has got rid of
            await asyncio.sleep(0.03)  # this client reads slowly
            body += await loop.sock_recv(client, 2048)
        assert loop.time() - began_s > 2 * http_protocol.SEND_S
        while len(body) < length:
            body += await loop.sock_recv(client, 8192)
    assert json.loads(body)["choices"] and not lost


@pytest.mark.parametrize("together", [True, False], ids=["one-write", "two-writes"])
async def test_a_leaving_client_ends_all_its_requests(router: StartRouter, together: bool) -> None:
    async with router() as running:
        worker = running.workers["decode-0"]
        worker.pause_at = 2
        host, port = running.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(post() + post(prompt="b") if together else post())
        await eventually(lambda: worker.held)
        if not together:
            writer.write(post(prompt="b"))
            await asyncio.sleep(0.1)  # it comes before the close
        writer.close()
        await eventually(lambda: not worker.held)
        assert len(worker.seen("cancel")) == 1
        await asyncio.sleep(0.1)  # no other request may begin
        assert len(worker.seen("submit")) == 1  # the other one was never begun
