"""What comes before a body: bounded in size and time, and answered as every other error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.router import http_protocol
from baton.router.http_protocol import HEAD_BYTES


@pytest.fixture
async def talk(router: Any) -> AsyncIterator[Any]:
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
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /livez HTTP/1.1\r\nX-Request-Id: a\x01b\r\n\r\n",
    ],
)
async def test_what_is_not_http_gets_an_error_as_every_other(talk: Any, raw: bytes) -> None:
    status, body = await talk(raw)
    assert status == 400 and "HTTP/1.1" in message(body)


async def test_a_head_without_end_is_cut_off(talk: Any) -> None:
    line = b"X-Filler: " + b"a" * 8000 + b"\r\n"
    head = [b"GET /livez HTTP/1.1\r\nHost: x\r\n"] + [line] * (HEAD_BYTES // len(line) + 2)
    status, body = await talk(*head)
    assert status == 431 and str(HEAD_BYTES) in message(body)


async def test_a_long_body_is_no_head(talk: Any) -> None:
    body = json.dumps({"prompt": "fox " * (HEAD_BYTES // 2)}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    status, answer = await talk(head % len(body), body[:100], body[100:])
    assert status == 400 and "shorten" in message(answer)


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\nX-Slow: "])
async def test_a_head_that_does_not_come_ends_the_connection(
    talk: Any, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.2)
    status, body = await talk(sent)
    assert status == 408 and "0.2 s" in message(body)


async def test_pipelined_requests_are_all_answered(talk: Any) -> None:
    one = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    status, rest = await talk(one * 20 + last)
    assert status == 200 and rest.count(b"200 OK") == 20
