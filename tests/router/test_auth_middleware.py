"""Bodies that do not come, on real sockets: they keep no client out, and the answer says why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from baton.proto import client_pb2
from baton.router.client_access.upload import awaiting_upload
from baton.router.http_frontend import request_body
from baton.router.requests.body_budget import PROGRESS_BYTES, BodyBudget
from baton.runtime.errors import InvalidRequest
from tests.support.machine_speed import slowness
from tests.support.router_process import FAST_ROUTER, StartRouter

pytestmark = pytest.mark.timed

GENERATE = "/baton.client.v1.Inference/Generate"
LENGTH = 4 * PROGRESS_BYTES
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % LENGTH
BODY = b'{"model":"tiny","max_tokens":1,"prompt":"hi"}'.ljust(LENGTH)


class Upload:
    """A request by hand: its head is sent, its body as the test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        writer.write(HEAD)

    def send(self, part: bytes) -> None:
        self._writer.write(part)

    async def status(self) -> int:
        async with asyncio.timeout(20):
            head = await self._reader.readuntil(b"\r\n\r\n")
        assert b"retry-after" in head.lower() or b" 503 " not in head
        return int(head.split()[1])

    async def waits(self) -> bool:
        """Nothing has come back so far."""
        try:
            async with asyncio.timeout(0.1):
                return not await self._reader.readexactly(1)
        except TimeoutError:
            return True

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


@asynccontextmanager
async def uploads(url: str, count: int) -> AsyncIterator[list[Upload]]:
    """They began in this order, each in a turn of its own."""
    host, port = url.removeprefix("http://").split(":")
    made: list[Upload] = []
    try:
        for _ in range(count):
            made.append(Upload(*await asyncio.open_connection(host, int(port))))
            # Uploads are ranked by age, so each has to be older than the next.
            await asyncio.sleep(0.05 * slowness())
        yield made
    finally:
        for upload in made:
            await upload.close()


async def test_bodies_that_never_come_keep_no_client_out(router: StartRouter) -> None:
    async with (
        router(config=replace(FAST_ROUTER, max_requests=3)) as running,
        uploads(running.url, 3) as silent,
    ):
        assert (await running.complete(max_tokens=1)).status_code == 200
        assert await silent[0].status() == 503
        assert await silent[1].waits() and await silent[2].waits()
        for _ in range(4):  # there is room now, which no request has to make
            assert (await running.complete(max_tokens=1)).status_code == 200
        assert await silent[1].waits() and await silent[2].waits()
        for upload in silent[1:]:
            upload.send(BODY)
            assert await upload.status() == 200


async def test_a_trickling_client_counts_as_silent(router: StartRouter) -> None:
    async with (
        router(config=replace(FAST_ROUTER, max_requests=2)) as running,
        uploads(running.url, 2) as (honest, dripping),
    ):
        for _ in range(3):
            dripping.send(b" ")
            # Each byte has to come by itself.
            await asyncio.sleep(0.02 * slowness())
        honest.send(BODY[:PROGRESS_BYTES])
        # The router has to read one upload before the other goes on.
        await asyncio.sleep(0.1 * slowness())
        dripping.send(b" ")
        # The byte has to come before the next request.
        await asyncio.sleep(0.02 * slowness())
        assert (await running.complete(max_tokens=1)).status_code == 200
        assert await dripping.status() == 503
        honest.send(BODY[PROGRESS_BYTES:])
        assert await honest.status() == 200


async def test_messages_that_never_come_keep_no_client_out(router: StartRouter) -> None:
    config = replace(FAST_ROUTER, max_requests=2, grpc_port=0)
    async with (
        router(config=config) as running,
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        silent = [channel.stream_stream(GENERATE)() for _ in range(2)]
        waiting = [asyncio.create_task(call.read()) for call in silent]
        # Both calls have to be open; their messages never come, so no event tells.
        await asyncio.sleep(0.3 * slowness())
        assert (await running.complete(max_tokens=1)).status_code == 200
        done, others = await asyncio.wait(waiting, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(grpc.aio.AioRpcError, match="slow to come") as refused:
            done.pop().result()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert len(others) == 1
        served = channel.unary_stream(GENERATE)
        asked = client_pb2.GenerateRequest(model="tiny", prompt="hi", max_tokens=1)
        assert [reply async for reply in served(asked.SerializeToString())]
        for call in silent:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_what_does_not_come_in_time_is_named() -> None:
    late = pytest.raises(InvalidRequest, match=r"the message did not arrive within 0\.05 s")
    with BodyBudget(1, 1, lambda: 0.0).account(b"") as body, late:
        async with awaiting_upload("the message", 0.05, body, None):
            await asyncio.sleep(60)  # This upload never comes.


async def test_a_body_ends_after_its_time(
    router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_body, "UPLOAD_TIMEOUT_S", 0.2)
    async with router() as running, uploads(running.url, 1) as (silent,):
        assert await silent.status() == 400
