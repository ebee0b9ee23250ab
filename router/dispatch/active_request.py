"""An active request, from the side that answers the client.

    dispatcher ── put ──▶ [ bounded buffer ] ── next ──▶ the task that writes the answer

Holds the accepted tokens of every choice: a retry continues them, and outputs are checked against
them (I4). Knows no links and no HTTP. Both sides run on the event loop, which owns all state.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from baton.router.dispatch.prompt_logprobs import PromptScores
from baton.router.fleet.worker_view import NumericsId
from baton.router.requests.request_trace import RequestTrace
from baton.router.requests.validated_request import ValidatedRequest
from baton.runtime.errors import BatonError

Finish = Literal["stop", "length"]
FULL_BUFFER_S = 1.0  # then a client that reads nothing is too slow
MAX_BUFFERS = 8  # unread outputs, in buffers, before that


@dataclass(frozen=True, slots=True)
class OutputToken:
    """One accepted token of one choice, or its end, or both."""

    choice: int
    token: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish: Finish | None = None
    accepted_proposal: bool = False  # proposed before it was drawn
    rejected_proposals: int = 0  # of the same step

    @property
    def weight(self) -> int:
        """The memory that it takes, in tokens; each alternative with its logprob counts as one."""
        return 1 + len(self.top)

    @property
    def largest(self) -> int:
        """The largest token id, also of the alternatives; -1 without any."""
        return max((-1 if self.token is None else self.token, *(token for token, _ in self.top)))


@dataclass(slots=True)
class Choice:
    """`accepted` are all output tokens so far; nothing is accepted after the end."""

    accepted: list[int] = field(default_factory=list)
    ended: bool = False


class ActiveRequest:
    """`buffer` bounds the weight of the outputs that wait for a slow client; `deadline_s` is on
    the loop's clock, and `timer` the dispatcher's, which ends the request then. `over` is set
    exactly once: finished, failed (`error`) or cancelled (`error`)."""

    def __init__(
        self,
        request_id: str,
        request: ValidatedRequest,
        buffer: int,
        deadline_s: float,
        trace: RequestTrace | None = None,
    ) -> None:
        self.trace = trace or RequestTrace()
        self.request_id = request_id
        self.request = request
        self.deadline_s = deadline_s
        self.choices = [Choice() for _ in range(request.choices)]
        self.cached_tokens = 0
        self.scores: PromptScores | None = None  # of the prompt, with the first choice's first
        self.numerics: NumericsId | None = None  # of the worker that has it, or had it last
        self.migrations = 0
        self.timer: asyncio.TimerHandle | None = None
        self.over = False
        self.error: BatonError | None = None
        self._buffer: deque[OutputToken] = deque()
        self._weight = 0  # of the buffer
        self._limit = buffer * request.choices
        self._full_s: float | None = None  # since when nothing was taken out of a full buffer
        self._wake = asyncio.Event()

    @property
    def begun(self) -> bool:
        """Whether any choice has an accepted token."""
        return any(choice.accepted for choice in self.choices)

    @property
    def unscored(self) -> bool:
        """Whether the prompt's log-probabilities are wanted, and have not come. They come with
        the first token of the first choice."""
        return self.request.scored and not self.choices[0].accepted

    @property
    def full(self) -> bool:
        """Whether the buffer has reached its limit."""
        return self._weight >= self._limit

    def put(self, output: OutputToken) -> None:
        """Accept an output, also into a full buffer (see `too_slow`)."""
        choice = self.choices[output.choice]
        if output.token is not None:
            choice.accepted.append(output.token)
        if output.finish is not None:
            choice.ended = True
        self._buffer.append(output)
        self._weight += output.weight
        if self.full and self._full_s is None:
            self._full_s = asyncio.get_running_loop().time()
        self._wake.set()

    def too_slow(self) -> bool:
        """Return whether the client has left a full buffer unread for too long, or has left far too
        much unread. Call it before the outputs of a message, not between them: a worker that
        reconnects sends all that it kept at once, and the client had no chance to read it."""
        return self._full_s is not None and self._too_slow(self._full_s)

    def _too_slow(self, full_s: float) -> bool:
        waited_s = asyncio.get_running_loop().time() - full_s
        return waited_s >= FULL_BUFFER_S or self._weight >= MAX_BUFFERS * self._limit

    def end(self, error: BatonError | None = None) -> None:
        """End the request: no output follows. Only the first end counts."""
        if not self.over:
            self.over = True
            self.error = error
            self._wake.set()
            if self.timer is not None:
                self.timer.cancel()

    async def next(self) -> list[OutputToken]:
        """Wait for outputs and return all of them; an empty list once the request is finished.
        Raises the error that the request ended with."""
        if not self._buffer and not self.over:
            self._wake.clear()
            await self._wake.wait()  # bounded by the timer
        if self._buffer:
            outputs = list(self._buffer)
            self._buffer.clear()
            self._weight = 0
            self._full_s = None
            return outputs
        if self.error is not None:
            raise self.error
        return []
