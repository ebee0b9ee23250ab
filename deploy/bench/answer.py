"""One request as its client sees it: what was measured, and the reader of its answer.

A chunk counts when it carries text, reasoning or a tool call: the opening chunk of a chat and the
usage do not. Times are seconds of the load's clock.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import Any

import orjson

from baton.deploy.bench.event_stream import EventStream
from baton.planner.traces import TraceRequest

MAX_BODY_BYTES = 64 << 20
DONE = b"[DONE]"
SHOWN_CHARACTERS = 200
TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
UNFINISHED = "unfinished"  # its client stopped waiting for it: not the server's error


@dataclass(slots=True)
class Measurement:
    """One request. `intended_s`: the moment at which it should have been sent, from which its
    latencies count; not-a-number: it has not happened. `error`: the kind; empty without one."""

    asked: TraceRequest
    warm_up: bool
    intended_s: float
    sent_s: float = math.nan
    first_s: float = math.nan  # of its text
    last_s: float = math.nan
    end_s: float = math.nan
    gaps_s: array[float] = field(default_factory=lambda: array("d"))  # between chunks of text
    chunks: int = 0
    prompt_tokens: int | None = None  # as the server counts them
    output_tokens: int | None = None
    error: str | None = None
    message: str = ""  # of the error, if it has one
    retry_after_s: float | None = None

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.intended_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.intended_s

    @property
    def send_lag_s(self) -> float:
        return self.sent_s - self.intended_s

    @property
    def tokens(self) -> int:
        """Return the output tokens; the chunks of text if the server does not say them."""
        return self.chunks if self.output_tokens is None else self.output_tokens

    @property
    def mean_gap_s(self) -> float:
        """Return the mean time between two tokens; 0 with a single token, or without streaming."""
        if not self.chunks or self.tokens <= 1:
            return 0.0
        return (self.last_s - self.first_s) / (self.tokens - 1)

    def fail(self, kind: str, message: str) -> None:
        """Record an error. The first one counts."""
        if self.error is None:
            self.error, self.message = kind, message


class AnswerReader:
    """Implements `ResponseSink` for completions and chats, streamed or not."""

    def __init__(self, measurement: Measurement, *, stream: bool) -> None:
        self._measurement = measurement
        self._stream = stream
        self._events: EventStream | None = None
        self._whole = bytearray()
        self._status = 0
        self._done = False

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status = status
        if status == 200:
            kind = headers.get(b"content-type", b"").lower()
            self._events = EventStream() if b"text/event-stream" in kind else None
        else:
            self._measurement.retry_after_s = _seconds(headers.get(b"retry-after"))

    def body(self, data: bytes, now_s: float) -> None:
        if self._events is None:
            self._whole += data[: MAX_BODY_BYTES - len(self._whole)]
            return
        try:
            for event in self._events.feed(data):
                self._event(event, now_s)
        except (ValueError, TypeError, AttributeError) as error:
            self._measurement.fail("malformed", f"an event is not JSON of the API: {error}")

    def finish(self, now_s: float) -> None:
        """The answer is complete as HTTP: check that it is one, and record its end."""
        measurement = self._measurement
        measurement.end_s = now_s
        if self._status != 200:
            measurement.fail(f"http {self._status}", _shown(bytes(self._whole)))
        elif self._events is not None and not self._done:
            measurement.fail("broken", "the stream ended without a finish reason or [DONE]")
        elif self._events is None and self._stream:
            measurement.fail("malformed", "the server does not stream: use --no-stream")
        elif self._events is None:
            self._read_whole()
        elif not measurement.chunks:
            measurement.fail("empty", "the answer has no text")

    def _read_whole(self) -> None:
        try:
            content = orjson.loads(self._whole)
            if not content["choices"]:
                raise ValueError("it has no choice")
            self._usage(content)
        except (ValueError, KeyError, TypeError) as error:
            self._measurement.fail("malformed", f"the answer is not JSON of the API: {error}")

    def _event(self, event: bytes, now_s: float) -> None:
        if event.startswith(b"[") and event.strip() == DONE:
            self._done = True
            return
        content = orjson.loads(event)
        if not isinstance(content, dict):
            raise ValueError("an event is not an object")
        if content.get("error"):
            self._measurement.fail("error event", _shown(event))
            return
        if content.get("usage"):
            self._usage(content)
        for choice in content.get("choices") or ():
            self._done |= bool(choice.get("finish_reason"))
            if _has_text(choice):
                self._token(now_s)
                return

    def _token(self, now_s: float) -> None:
        measurement = self._measurement
        measurement.chunks += 1
        if measurement.chunks == 1:
            measurement.first_s = measurement.last_s = now_s
            return
        measurement.gaps_s.append(now_s - measurement.last_s)
        measurement.last_s = now_s

    def _usage(self, content: dict[str, Any]) -> None:
        usage = content.get("usage")
        if isinstance(usage, dict):
            self._measurement.prompt_tokens = _count(usage.get("prompt_tokens"))
            self._measurement.output_tokens = _count(usage.get("completion_tokens"))


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return any(delta.get(name) for name in TEXT_FIELDS)


def _count(found: object) -> int | None:
    return found if isinstance(found, int) and found >= 0 else None


def _seconds(value: bytes | None) -> float | None:
    """Parse `Retry-After` in seconds; None if it is absent or a date."""
    try:
        seconds = float(value or b"")
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


def _shown(body: bytes) -> str:
    """Return the message of an OpenAI error body, or else the start of the body, printable."""
    try:
        text = str(orjson.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = body.decode(errors="replace")
    return "".join(c if c.isprintable() else " " for c in text[:SHOWN_CHARACTERS]).strip()
