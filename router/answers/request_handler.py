"""Runs a validated request from its admission to its end, for every front end.

    with handler.admitted():  ticket, span, log line of its end
        await handler.begin()
        while (deltas := await handler.next()) is not None: ...
        in any case: handler.leave()

Turns outputs into deltas that may be shown, and counts them. Knows no transport. One per request,
owned by the task that answers it.
"""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from opentelemetry.context import Context

from baton.router.answers.choice_text import ChoiceDelta, ChoiceText, TokenLogprob
from baton.router.answers.objectives import Scorekeeper
from baton.router.answers.trace_record import (
    RequestEnd,
    reasons_to_keep,
    refused_late,
    trace_record,
)
from baton.router.answers.trace_spans import export_trace, request_attributes
from baton.router.answers.trace_store import TraceStore
from baton.router.dispatch.active_request import ActiveRequest, OutputToken
from baton.router.dispatch.dispatcher import Dispatcher
from baton.router.dispatch.prompt_logprobs import PromptScores
from baton.router.requests.admission import Admission
from baton.router.requests.refusals import count_refusal
from baton.router.requests.request_trace import RequestTrace
from baton.router.requests.validated_request import ValidatedRequest
from baton.router.text.tokenizer import Tokenizer
from baton.runtime import logs, metrics
from baton.runtime.errors import BatonError, Cancelled, InvalidRequest, Overloaded, Unavailable
from baton.runtime.exposition.genai import RequestTimes
from baton.runtime.telemetry import tracing

SEND_S = 60.0  # then a client that reads nothing is disconnected

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class RequestServices:
    """The parts of the router that request handlers share."""

    dispatcher: Dispatcher
    admission: Admission
    tokenizer: Tokenizer
    scorekeeper: Scorekeeper = Scorekeeper()
    traces: TraceStore = field(default_factory=TraceStore)


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts of an answer. `cached` are prompt tokens taken from a prefix cache.
    `accepted` are the output tokens that a worker proposed, `rejected` its other proposals."""

    prompt: int
    completion: int
    cached: int
    accepted: int = 0
    rejected: int = 0


class ClientGone(Exception):
    """The client has closed its connection, or has stopped reading."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """`at_s` is when a request came, by `time.perf_counter()`, `deadline_s` when it must have
    ended, by the loop's clock; `context` is the client's span."""

    at_s: float
    deadline_s: float
    context: Context


class RequestHandler:
    """The handler of one validated request."""

    def __init__(
        self,
        serving: RequestServices,
        request: ValidatedRequest,
        request_id: str,
        arrival: Arrival,
        trace: RequestTrace | None = None,
    ) -> None:
        self._trace = trace or RequestTrace()
        self._serving = serving
        self._request = request
        self._request_id = request_id
        self._arrival = arrival
        self._context = arrival.context
        markers = request.calling.form.markers if request.calling is not None else ()
        if (reasoning := request.reasoning) is not None:
            markers = (*markers, *reasoning.form.markers)
        self._texts = [
            ChoiceText(request, choice, serving.tokenizer.detokenizer(request.prompt, markers))
            for choice in range(request.choices)
        ]
        self._active_request: ActiveRequest | None = None
        self._finishes: dict[int, str] = {}  # why each choice has finished
        self._first_s: dict[int, float] = {}  # when each choice's first output came
        self._last_s: dict[int, float] = {}  # when each choice's last output came

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Hold a ticket within the block, and count and log how the request ends. Raises Overloaded
        without a ticket; exceptions of the block pass. ClientGone, or the task's cancellation,
        means that the client left."""
        outcome = "failed"  # also for an exception that is a bug
        started_s = time.time()
        error: Exception | None = None
        try:
            with (
                self._serving.admission.ticket(),
                tracing.span(
                    tracing.REQUEST, self._context, self._trace.begun_wall_s, served=True
                ) as self._context,
            ):
                self._trace.mark("admit")
                try:
                    yield
                finally:
                    self._annotate_span()
            outcome = "finished"
        except (ClientGone, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        except BatonError as caught:
            outcome, error = self._outcome(caught), caught
            raise
        except Exception as caught:  # of any kind: it is counted, and raised again
            error = caught
            raise
        finally:
            self._note_end(outcome, started_s, error)

    async def begin(self) -> None:
        """Place the request. Raises the same errors as `Dispatcher.start`."""
        if (validated := self._request.grammar_wall_s) is not None:
            tracing.record(tracing.VALIDATE, *validated, self._context)
        self._active_request = await self._serving.dispatcher.start(
            self._request, self._request_id, self._context, self._arrival.deadline_s, self._trace
        )

    async def next(self) -> list[ChoiceDelta] | None:
        """Wait for outputs and return them as one delta a choice, which may be empty; None once the
        request is finished. Raises the error that the request ended with."""
        assert self._active_request is not None
        outputs = await self._active_request.next()
        if not outputs:
            return None
        first = not self._last_s
        if self._trace.answered or not (first or self._request.stream):
            return self._pieces(self._active_request, outputs)
        self._trace.mark("deliver" if first else "decode")
        pieces = self._pieces(self._active_request, outputs)
        self._trace.mark("detokenize")
        return pieces

    @property
    def trace_response(self) -> str | None:
        """The ids of the request's span, for its client; empty if no spans are exported."""
        return tracing.response_value(self._context)

    def record_decoded(self) -> None:
        """Record that all output is there, which is sent as one body."""
        self._trace.mark("decode")

    def record_written(self) -> None:
        """Record that the client is sent a part of the answer now: its first token, if any came."""
        self._trace.record_written()

    def leave(self) -> None:
        """End the request if it is not over; cancels to its workers leave in the same tick."""
        if self._active_request is not None and not self._active_request.over:
            self._serving.dispatcher.cancel(self._active_request)

    def usage(self) -> Usage:
        return Usage(
            prompt=len(self._request.prompt),
            completion=sum(text.tokens for text in self._texts),
            cached=self._active_request.cached_tokens if self._active_request is not None else 0,
            accepted=sum(text.accepted_proposals for text in self._texts),
            rejected=sum(text.rejected_proposals for text in self._texts),
        )

    @property
    def choices(self) -> int:
        return self._request.choices

    def with_prompt(self, piece: ChoiceDelta) -> ChoiceDelta:
        """Return `piece`, the first of its choice or the whole choice, with the parts of the prompt
        that the request asked for before it. Scores exist once the request is finished."""
        request = self._request
        scores = self._active_request.scores if self._active_request is not None else None
        if request.echo is not None:
            own = piece.logprobs
            if request.echo_top is not None and scores is not None:
                own = [*self._prompt_entries(scores, request.echo_top), *own]
            piece = replace(piece, text=request.echo + piece.text, logprobs=own)
        return replace(
            piece,
            prompt=request.prompt if request.token_ids else None,
            prompt_entries=self.prompt_entries() if request.prompt_top is not None else None,
        )

    def prompt_entries(self) -> list[TokenLogprob]:
        """Return the prompt's tokens with the alternatives that the request asked for; the first
        token has no log-probability."""
        scores = self._active_request.scores if self._active_request is not None else None
        top = self._request.prompt_top
        return [] if scores is None or top is None else self._prompt_entries(scores, top)

    def _prompt_entries(self, scores: PromptScores, most: int) -> list[TokenLogprob]:
        token_bytes = self._serving.tokenizer.token_bytes
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        entries, offset = [], 0
        for position, token in enumerate(self._request.prompt):
            logprob = scores.logprobs[position - 1] if position else None
            top = scores.top(position, most) if position else ()
            rank = scores.ranks[position - 1] if position else 0
            entries.append(TokenLogprob(token, logprob, top, offset, rank))
            text = decoder.decode(token_bytes(token))
            # else the tokenizer has added it
            if position or (self._request.echo or "").startswith(text):
                offset += len(text)
        return entries

    def unfinished(self) -> list[int]:
        """Return the choices whose last delta has not been returned."""
        return [choice for choice, text in enumerate(self._texts) if not text.finished]

    def _pieces(
        self, active_request: ActiveRequest, outputs: Sequence[OutputToken]
    ) -> list[ChoiceDelta]:
        by_choice: dict[int, list[OutputToken]] = {}
        for output in outputs:
            by_choice.setdefault(output.choice, []).append(output)
        self._note_outputs(by_choice)
        pieces = []
        for choice, its_outputs in by_choice.items():
            text = self._texts[choice]
            if text.finished:
                continue
            piece = text.push(its_outputs) if not self._request.silent else text.silenced()
            pieces.append(piece)
            if piece.finish is not None:
                metrics.FINISHED_CHOICES.labels(piece.finish).inc()
                self._finishes[choice] = piece.finish
            if text.finished and not active_request.choices[choice].ended:
                self._serving.dispatcher.finish_choice(active_request, choice)
        return pieces

    def _note_outputs(self, by_choice: dict[int, list[OutputToken]]) -> None:
        now_s = time.perf_counter()
        if not self._first_s:
            metrics.TTFT.observe(now_s - self._arrival.at_s)
        for choice, outputs in by_choice.items():
            steps = len(outputs) - sum(output.accepted_proposal for output in outputs)
            if choice in self._last_s and steps <= 1:  # else they waited for this router
                for _ in outputs:
                    metrics.ITL.observe((now_s - self._last_s[choice]) / len(outputs))
            self._first_s.setdefault(choice, now_s)
            self._last_s[choice] = now_s

    def _times(self) -> RequestTimes:
        duration_s = time.perf_counter() - self._arrival.at_s
        if not self._first_s:
            return RequestTimes(duration_s)
        means_s = [
            (self._last_s[choice] - first_s) / (self._texts[choice].tokens - 1)
            for choice, first_s in self._first_s.items()
            if self._texts[choice].tokens > 1
        ]
        first_s = min(self._first_s.values()) - self._arrival.at_s
        return RequestTimes(duration_s, first_s, max(means_s, default=None))

    def _outcome(self, error: BatonError) -> str:
        """Return how the request ended. Once a token of its answer is there, every other error
        fails it: the answer breaks off."""
        if isinstance(error, Cancelled):
            return "cancelled"
        begun = self._active_request is not None and self._active_request.begun
        refusal = isinstance(error, InvalidRequest | Overloaded) or type(error) is Unavailable
        return "refused" if refusal and not begun else "failed"

    def _note_end(self, outcome: str, started_s: float, error: Exception | None) -> None:
        if outcome == "refused" and isinstance(error, BatonError):
            count_refusal(error)
        else:
            metrics.REQUESTS.labels(outcome).inc()
        times, usage = self._times(), self.usage()
        metrics.E2E.observe(times.duration_s)
        if outcome in ("finished", "failed"):
            error_type = None if error is None else type(error).__name__
            self._serving.scorekeeper.record(
                times,
                usage.completion,
                chat=self._request.chat,
                error_type=error_type,
                phases=self._trace.path.phases,
            )
        log.info(
            "request ended",
            request_id=self._request_id,
            outcome=outcome,
            prompt_tokens=usage.prompt,
            output_tokens=usage.completion,
            cached_tokens=usage.cached,
            seconds=round(time.time() - started_s, 4),
        )
        self._keep_trace(outcome, times, usage, error)

    def _annotate_span(self) -> None:
        if tracing.exporting():
            tracing.annotate(self._context, self._standard(), request_id=self._request_id)

    def _standard(self) -> dict[str, tracing.Attribute]:
        """Return the conventional attributes of the request's span."""
        usage = self.usage()
        found = request_attributes(self._serving.scorekeeper.model, self._request)
        found |= {
            "gen_ai.usage.input_tokens": usage.prompt,
            "gen_ai.usage.output_tokens": usage.completion,
            "gen_ai.usage.cache_read.input_tokens": usage.cached,
        }
        if self._finishes:
            reasons = [self._finishes[choice] for choice in sorted(self._finishes)]
            found["gen_ai.response.finish_reasons"] = tuple(reasons)
        if self._request.stream and self._trace.answered:
            found["gen_ai.response.time_to_first_chunk"] = self._trace.path.seconds
        return found

    def _keep_trace(
        self, outcome: str, times: RequestTimes, usage: Usage, error: Exception | None
    ) -> None:
        """Store the request's trace, and export it if a collector should have it."""
        trace = self._trace
        trace.mark("end")  # of one that was not answered
        seconds = asyncio.get_running_loop().time() - trace.begun_s
        active_request = self._active_request
        end = RequestEnd(
            self._request_id,
            outcome,
            seconds,
            usage.prompt,
            usage.completion,
            usage.cached,
            active_request.migrations if active_request is not None else 0,
            tracing.trace_id(self._context),
        )
        traces = self._serving.traces
        slow = trace.answered and traces.is_slow(trace.path.seconds, times.per_token_s)
        kept = reasons_to_keep(trace, end, slow=slow)
        if outcome != "refused" or refused_late(trace, end):
            traces.add(trace_record(trace, end, kept), trace.tenant)
        if tracing.exporting():
            ended_wall_s = trace.begun_wall_s + seconds
            standard = self._standard() | {"baton.request_id": self._request_id}
            if error is not None:
                standard[tracing.ERROR_TYPE] = type(error).__name__
            contexts = self._context, self._arrival.context
            export_trace(trace, *contexts, kept, ended_wall_s, standard)
