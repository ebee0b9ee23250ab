"""Several requests on one connection: each its own answer, in turn, whatever is wrong later on."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest

from baton.router.http_frontend.http_protocol import MAX_PIPELINED
from tests.support.machine_speed import slowness
from tests.support.router_process import StartRouter

Ask = Callable[..., Awaitable[tuple[list[int], bytes]]]

BODY = b'{"model":"tiny","prompt":"a","max_tokens":3,"stream":true}'
COMPLETE = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
STREAM = COMPLETE + b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
LAST = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"


@pytest.fixture
async def ask(router: StartRouter) -> AsyncIterator[Ask]:
    """Sends the parts, each in a read of its own, and reads to the end: all statuses, and all."""
    async with router() as running:
        host, port = running.url.removeprefix("http://").split(":")

        async def send(*parts: bytes) -> tuple[list[int], bytes]:
            loop, answers = asyncio.get_running_loop(), b""
            with socket.socket() as client:
                client.setblocking(False)
                await loop.sock_connect(client, (host, int(port)))
                with suppress(ConnectionError):  # a refusal, which does not read on
                    for part in parts:
                        await loop.sock_sendall(client, part)
                        # Each part has to come by itself.
                        await asyncio.sleep(0.05)
                with suppress(ConnectionError):
                    async with asyncio.timeout(30):
                        while piece := await loop.sock_recv(client, 1 << 16):
                            answers += piece
            return [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", answers)], answers

        yield send


@pytest.mark.parametrize(
    "bad",
    [
        b"garbage\r\n\r\n",
        COMPLETE + b"Content-Length: abc\r\n\r\n",
        COMPLETE + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["no head", "bad head", "bad body"],
)
async def test_an_invalid_request_is_answered_behind_earlier_ones(ask: Ask, bad: bytes) -> None:
    """Its error was written into the midst of the stream, or taken for an earlier answer."""
    statuses, answers = await ask(STREAM + STREAM + bad)
    assert statuses == [200, 200, 400]
    assert answers.count(b"data: [DONE]") == 2
    assert b"0\r\n\r\nHTTP/1.1 400 " in answers  # the stream before it is whole


async def test_a_bad_body_is_answered_though_its_request_waits_for_it(ask: Ask) -> None:
    statuses, _ = await ask(COMPLETE + b"Transfer-Encoding: chunked\r\n\r\n", b"zz\r\n")
    assert statuses == [400]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("apart", [False, True])
async def test_an_offer_to_speak_another_protocol_is_passed_over(
    ask: Ask, chunked: bool, apart: bool
) -> None:
    """Java's client makes it with each request. The body was dropped, or read as a request."""
    framing = b"Content-Length: %d\r\n\r\n" % len(BODY)
    sent = BODY
    if chunked:
        framing = b"Transfer-Encoding: chunked\r\n\r\n"
        sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    parts = [COMPLETE + OFFER + framing, sent + STREAM, LAST]
    statuses, answers = await ask(*parts if apart else [b"".join(parts)])
    assert statuses == [200, 200, 200]
    assert answers.count(b"data: [DONE]") == 2


async def test_an_empty_body_behind_such_an_offer_is_not_waited_for(ask: Ask) -> None:
    statuses, _ = await ask(COMPLETE + OFFER + b"Content-Length: 0\r\n\r\n" + LAST)
    assert statuses == [400, 200]


async def test_no_request_is_smuggled_in_a_body_behind_such_an_offer(ask: Ask) -> None:
    inner = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = COMPLETE + OFFER + b"Content-Length: %d\r\n\r\n" % len(inner)
    statuses, answers = await ask(head, inner, LAST)
    assert statuses == [400, 200] and b"not valid JSON" in answers


async def test_several_offers_in_one_read_are_answered(ask: Ask) -> None:
    one = b"GET /livez HTTP/1.1\r\n" + OFFER + b"\r\n"
    statuses, _ = await ask(one * 20 + LAST)
    assert statuses == [200] * 21


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_closing_request_may_offer_another_protocol(ask: Ask, chunked: bool) -> None:
    """Its body was not read, and its answer waited for it."""
    head = COMPLETE + b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n"
    if chunked:
        sent = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    else:
        sent = b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
    async with asyncio.timeout(5 * slowness()):
        statuses, answers = await ask(head + sent)
    assert statuses == [200] and answers.count(b"data: [DONE]") == 1


@pytest.mark.parametrize("offer", [b"", OFFER], ids=["plain", "offers"])
async def test_pipelined_requests_are_bounded(ask: Ask, offer: bytes) -> None:
    """One read began a thousand requests, in one turn of the event loop."""
    statuses, answers = await ask((b"GET /livez HTTP/1.1\r\n" + offer + b"\r\n") * 1000)
    assert statuses == [200] * (len(statuses) - 1) + [400]
    assert len(statuses) <= MAX_PIPELINED + 1
    assert b"32 requests wait" in answers and b"connection: close" in answers


@pytest.mark.parametrize(
    ("head", "word"),
    [
        (b"".join(b"X-%d: %s\r\n" % (n, b"a" * 8000) for n in range(25)), b"65536 bytes"),
        (b"a: b\r\n" * 10_000, b"256 headers"),
        (b"X-Long: %s\r\n" % (b"a" * (200 << 10)), b"65536 bytes"),
    ],
    ids=["200 KiB", "10000 headers", "one header"],
)
async def test_a_complete_head_in_one_read_is_bounded(ask: Ask, head: bytes, word: bytes) -> None:
    """The bounds held only for a head that came in several reads."""
    live = b"GET /livez HTTP/1.1\r\n"
    statuses, answers = await ask(live + head + b"\r\n")
    assert statuses == [431] and word in answers
    statuses, _ = await ask(live + b"\r\n" + live + head + b"\r\n" + LAST)
    assert statuses == [200, 431]


@pytest.mark.parametrize(
    ("header", "word"),
    [(b"Content-Encoding: gzip", b"'gzip'"), (b"Transfer-Encoding: gzip, chunked", b"uncompress")],
)
async def test_a_compressed_body_is_refused_by_its_header(
    ask: Ask, header: bytes, word: bytes
) -> None:
    framing = b"" if b"chunked" in header else b"Content-Length: 0\r\n"
    end = b"0\r\n\r\n" if b"chunked" in header else b""
    statuses, answers = await ask(COMPLETE + framing + header + b"\r\n\r\n" + end + LAST)
    assert statuses == [400, 200]
    assert word in answers and b'"param":"%s"' % header.partition(b":")[0] in answers


async def test_a_refused_method_names_the_allowed_one(ask: Ask) -> None:
    statuses, answers = await ask(b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n" + LAST)
    assert statuses == [405, 200] and b"use POST" in answers
