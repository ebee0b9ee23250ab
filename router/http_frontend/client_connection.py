"""The client's end of an HTTP connection while it is answered, as ASGI messages."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Message, Receive, Send

from baton.router.answers.request_handler import SEND_S, ClientGone
from baton.runtime.telemetry import tracing

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what the work returns, if its client stays connected. Raises ClientGone, or what the
    work raised."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_watch(receive))
    try:
        # bounded by the work, which ends by the request's own deadline
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone = not working.done()
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if gone:
        raise ClientGone
    return working.result()


async def _watch(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ClientConnection:
    """Sends the answer to the client and bounds each write."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def start(
        self, media_type: bytes, trace_response: str | None = None, length: int | None = None
    ) -> None:
        headers = [(b"content-type", media_type), (b"cache-control", b"no-store")]
        if trace_response is not None:
            headers.append((tracing.RESPONSE_HEADER.encode(), trace_response.encode()))
        if length is None:
            headers.append((b"x-accel-buffering", b"no"))
        else:
            headers.append((b"content-length", str(length).encode()))
        self.started = True
        await self._emit({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, body: bytes, last: bool = False) -> None:
        await self._emit({"type": "http.response.body", "body": body, "more_body": not last})

    async def _emit(self, message: Message) -> None:
        try:
            async with asyncio.timeout(SEND_S):
                await self._send(message)
        except (TimeoutError, OSError) as error:
            raise ClientGone from error
