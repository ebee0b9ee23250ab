"""Several requests on one connection: each its own answer, in turn, whatever is wrong later on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

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
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    # Each part has to come by itself.
                    await asyncio.sleep(0.05)
                async with asyncio.timeout(30):
                    answers = await reader.read()
            finally:
                writer.close()
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


async def test_very_many_offers_in_one_read_are_answered(ask: Ask) -> None:
    one = b"GET /livez HTTP/1.1\r\n" + OFFER + b"\r\n"
    statuses, _ = await ask(one * 1200 + LAST)
    assert statuses == [200] * 1201


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
