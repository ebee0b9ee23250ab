"""The answer to a generation request: the response that runs the request, watches its client,
and writes what comes, as one body or as server-sent events.

Errors before the first byte get their true status code; after it an error event and the finish
reason "error". A client that leaves ends the request on every worker at once. Knows HTTP by
ASGI's messages; owns the generation from its start to its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from opentelemetry.context import Context
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from baton.router.admission import Admission
from baton.router.choice_text import ChoiceText, Piece
from baton.router.dispatch import Dispatcher
from baton.router.generation import Generation, OutputToken
from baton.router.generation_request import GenerationRequest
from baton.router.http_error import error_body, error_response
from baton.router.openai_body import Renderer, Usage
from baton.router.tokenizer import Tokenizer
from baton.runtime import logs, metrics, tracing
from baton.runtime.errors import BatonError, Cancelled, InvalidRequest, Overloaded, Unavailable

SEND_S = 60.0  # a client that takes nothing for so long is gone

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Serving:
    """What answers need of the router."""

    dispatcher: Dispatcher
    admission: Admission
    tokenizer: Tokenizer


class ClientGone(Exception):
    """The client has closed its connection, or takes nothing any more."""


class Answer(Response):
    """`arrival_s` and the request's clock are `time.perf_counter()`'s, `deadline_s` the loop's."""

    def __init__(
        self,
        serving: Serving,
        request: GenerationRequest,
        renderer: Renderer,
        request_id: str,
        arrival_s: float,
        context: Context,
        deadline_s: float,
    ) -> None:
        super().__init__()
        self._serving = serving
        self._request = request
        self._renderer = renderer
        self._request_id = request_id
        self._arrival_s = arrival_s
        self._context = context
        self._deadline_s = deadline_s
        markers = request.calling.form.markers if request.calling is not None else ()
        self._texts = [
            ChoiceText(
                choice,
                serving.tokenizer.detokenizer(request.prompt, markers),
                request.stops,
                frozenset(request.stop_token_ids),
                request.calling,
            )
            for choice in range(request.choices)
        ]
        self._last_s = 0.0
        self._cached = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome = "failed"  # unless it is known better: what is not our error is a bug
        started_s = time.time()
        client = _Client(receive, send)
        try:
            with (
                self._serving.admission.ticket(),
                tracing.span(tracing.REQUEST, self._context) as context,
            ):
                await client.run(self._answer(client, context))
            outcome = "finished"
        except ClientGone:
            outcome = "cancelled"
        except BatonError as error:
            outcome = _outcome(error)
            await self._tell(error, client, scope, receive, send)
        finally:
            self._note_end(outcome, started_s)

    async def _answer(self, client: _Client, context: Context) -> None:
        admitted_s = time.time()
        generation = await self._serving.dispatcher.start(
            self._request, self._request_id, context, self._deadline_s
        )
        tracing.record("place", admitted_s, time.time(), context)
        try:
            if self._request.stream:
                await self._stream(generation, client)
            else:
                await self._collect(generation, client)
        finally:
            self._cached = generation.cached_tokens
            if not generation.over:
                self._serving.dispatcher.cancel(generation)

    # -- one body ----------------------------------------------------------------------------

    async def _collect(self, generation: Generation, client: _Client) -> None:
        whole = [Piece(choice) for choice in range(self._request.choices)]
        while outputs := await generation.next():
            for piece in self._pieces(generation, outputs):
                into = whole[piece.choice]
                into.text += piece.text
                into.logprobs += piece.logprobs
                into.calls += piece.calls
                into.finish = piece.finish or into.finish
        body = self._renderer.whole(whole, self._usage(generation))
        await client.start(b"application/json", len(body))
        await client.write(body, last=True)

    # -- server-sent events ------------------------------------------------------------------

    async def _stream(self, generation: Generation, client: _Client) -> None:
        opened: set[int] = set()
        try:
            while outputs := await generation.next():
                events = []
                for piece in self._pieces(generation, outputs):
                    if piece.choice not in opened:
                        opened.add(piece.choice)
                        opening = self._renderer.opening(piece.choice)
                        if opening is not None:
                            events.append(_event(opening))
                    if piece:
                        events += map(_event, self._renderer.chunks(piece))
                if not client.started:
                    await client.start(b"text/event-stream; charset=utf-8")
                if events:
                    await client.write(b"".join(events))
        except ClientGone:
            raise
        except Exception as error:
            if not client.started:
                raise
            await self._end_with(error, client)
            raise
        tail = b""
        if self._request.include_usage:
            tail = _event(self._renderer.usage_chunk(self._usage(generation)))
        await client.write(tail + b"data: [DONE]\n\n", last=True)

    async def _end_with(self, error: Exception, client: _Client) -> None:
        """The end of a stream that failed: each open choice finishes with "error", then why; of
        what is not our error, only that it is inside the server."""
        told = error if isinstance(error, BatonError) else BatonError()
        events = [
            _event(body)
            for choice, text in enumerate(self._texts)
            if not text.finished
            for body in self._renderer.chunks(Piece(choice, finish="error"))
        ]
        events.append(b"event: error\n" + _event(orjson.dumps(error_body(told))))
        events.append(b"data: [DONE]\n\n")
        await client.write(b"".join(events), last=True)

    # -- both --------------------------------------------------------------------------------

    def _pieces(self, generation: Generation, outputs: Sequence[OutputToken]) -> list[Piece]:
        self._note_outputs(outputs)
        by_choice: dict[int, list[OutputToken]] = {}
        for output in outputs:
            by_choice.setdefault(output.choice, []).append(output)
        pieces = []
        for choice, its_outputs in by_choice.items():
            text = self._texts[choice]
            if text.finished:
                continue
            piece = text.push(its_outputs)
            pieces.append(piece)
            if text.finished and not generation.choices[choice].ended:
                self._serving.dispatcher.finish_choice(generation, choice)
        return pieces

    def _usage(self, generation: Generation) -> Usage:
        return Usage(
            prompt=len(self._request.prompt),
            completion=sum(text.tokens for text in self._texts),
            cached=generation.cached_tokens,
        )

    async def _tell(
        self, error: BatonError, client: _Client, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if not client.started:
            try:
                async with asyncio.timeout(SEND_S):
                    await error_response(error)(scope, receive, send)
            except TimeoutError:
                log.info("client takes no answer", request_id=self._request_id)

    def _note_outputs(self, outputs: Sequence[OutputToken]) -> None:
        now_s = time.perf_counter()
        if not self._last_s:
            metrics.TTFT.observe(now_s - self._arrival_s)
        elif len(outputs) == 1:
            metrics.ITL.observe(now_s - self._last_s)
        self._last_s = now_s

    def _note_end(self, outcome: str, started_s: float) -> None:
        metrics.REQUESTS.labels(outcome).inc()
        metrics.E2E.observe(time.perf_counter() - self._arrival_s)
        log.info(
            "request ended",
            request_id=self._request_id,
            outcome=outcome,
            prompt_tokens=len(self._request.prompt),
            output_tokens=sum(text.tokens for text in self._texts),
            cached_tokens=self._cached,
            seconds=round(time.time() - started_s, 4),
        )


class _Client:
    """The client's end of the connection: writes with a deadline, and notices its leaving."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.started = False

    async def run(self, work: Any) -> None:
        """Do the work until it ends or the client leaves. Raises ClientGone, or what the work
        raised."""
        working = asyncio.create_task(work)
        watching = asyncio.create_task(self._watch())
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
        working.result()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, media_type: bytes, length: int | None = None) -> None:
        headers = [(b"content-type", media_type), (b"cache-control", b"no-store")]
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


def _event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"


def _outcome(error: BatonError) -> str:
    if isinstance(error, Cancelled):
        return "cancelled"
    if isinstance(error, InvalidRequest | Overloaded) or type(error) is Unavailable:
        return "refused"
    return "failed"
