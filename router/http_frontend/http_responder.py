"""The HTTP answer to a generation request: runs the request, watches its client, and writes the
output as one body or as server-sent events.

An error before the first byte gets its status code; a later one an error event and the finish
reason "error". A disconnect ends the request on every worker at once. Knows HTTP as ASGI messages;
`request_handler.py` runs the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.router.answers.choice_text import ChoiceDelta
from baton.router.answers.prompt_batch import PromptBatch
from baton.router.answers.request_handler import SEND_S, ClientGone, RequestHandler
from baton.router.client_access.error_body import error_body
from baton.router.http_frontend.client_connection import ClientConnection, while_connected
from baton.router.http_frontend.http_error import error_response
from baton.router.http_frontend.openai_answer import Renderer
from baton.router.requests.validated_request import ValidatedRequest
from baton.runtime import logs
from baton.runtime.errors import BatonError

log = logs.get(__name__)


class HttpResponder(Response):
    """The response of one request; `handler` runs it, `request_id` is for logs."""

    def __init__(
        self,
        handler: RequestHandler | PromptBatch,
        request: ValidatedRequest,
        renderer: Renderer,
        request_id: str,
    ) -> None:
        super().__init__()
        self._handler = handler
        self._request = request
        self._renderer = renderer
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = ClientConnection(send)
        try:
            with self._handler.admitted():
                await while_connected(receive, self._answer(client))
        except ClientGone:
            pass
        except BatonError as error:
            await self._send_error(error, client, scope, receive, send)

    async def _answer(self, client: ClientConnection) -> None:
        try:
            await self._handler.begin()
            if self._request.stream:
                await self._stream(client)
            else:
                await self._collect(client)
        finally:
            self._handler.leave()

    # -- one body ----------------------------------------------------------------------------

    async def _collect(self, client: ClientConnection) -> None:
        whole = [ChoiceDelta(choice) for choice in range(self._handler.choices)]
        while (pieces := await self._handler.next()) is not None:
            for piece in pieces:
                into = whole[piece.choice]
                into.text += piece.text
                into.reasoning += piece.reasoning
                self._renderer.keep_logprobs(piece)
                into.calls += piece.calls
                into.tokens += piece.tokens
                into.finish = piece.finish or into.finish
        self._handler.record_decoded()
        if self._request.scored:  # the prompt's, in a thread: it takes up to half a second
            body = await asyncio.to_thread(self._render, whole)
        else:
            body = self._render(whole)
        await client.start(b"application/json", self._handler.trace_response, len(body))
        self._handler.record_written()  # before the client can have it
        await client.write(body, last=True)

    def _render(self, pieces: Sequence[ChoiceDelta]) -> bytes:
        whole = [self._handler.with_prompt(piece) for piece in pieces]
        return self._renderer.whole(whole, self._handler.usage())

    # -- server-sent events ------------------------------------------------------------------

    async def _stream(self, client: ClientConnection) -> None:
        opened: set[int] = set()
        try:
            while (pieces := await self._handler.next()) is not None:
                events = []
                usage = self._handler.usage() if self._request.continuous_usage else None
                for piece in pieces:
                    if piece.choice not in opened:
                        opened.add(piece.choice)
                        piece = self._handler.with_prompt(piece)
                        opening = self._renderer.opening(piece, usage)
                        if opening is not None:
                            events.append(_event(opening))
                    if piece:
                        events += map(_event, self._renderer.chunks(piece, usage))
                if not client.started:
                    media_type = b"text/event-stream; charset=utf-8"
                    await client.start(media_type, self._handler.trace_response)
                if events:
                    self._handler.record_written()  # before the client can have it
                    await client.write(b"".join(events))
        except ClientGone:
            raise
        except Exception as error:
            # An answer that has begun ends with its error, whatever it is; earlier it is raised.
            if not client.started:
                raise
            await self._end_with(error, client)
            raise
        tail = b""
        if self._request.include_usage:
            tail = _event(self._renderer.usage_chunk(self._handler.usage()))
        await client.write(tail + b"data: [DONE]\n\n", last=True)

    async def _end_with(self, error: Exception, client: ClientConnection) -> None:
        """End a failed stream: each open choice finishes with "error", then the error follows. An
        exception that is no BatonError becomes an internal error."""
        sent = error if isinstance(error, BatonError) else BatonError()
        events = [
            _event(body)
            for choice in self._handler.unfinished()
            for body in self._renderer.chunks(ChoiceDelta(choice, finish="error"))
        ]
        events.append(b"event: error\n" + _event(orjson.dumps(error_body(sent))))
        events.append(b"data: [DONE]\n\n")
        await client.write(b"".join(events), last=True)

    async def _send_error(
        self,
        error: BatonError,
        client: ClientConnection,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        if not client.started:
            try:
                async with asyncio.timeout(SEND_S):
                    await error_response(error)(scope, receive, send)
            except TimeoutError:
                log.info("answer not accepted", request_id=self._request_id)


def _event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"
