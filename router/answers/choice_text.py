"""The text of one choice as it grows: detokenized, cut at stop strings, without its tool calls.

Turns accepted tokens into deltas that may be shown, with their logprobs. Knows no transport and no
JSON. One per choice, owned by the task that writes the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.router.dispatch.active_request import OutputToken
from baton.router.requests.validated_request import ValidatedRequest
from baton.router.text.detokenizer import Detokenizer
from baton.router.text.stop_strings import StopMatcher
from baton.router.text.tool_calls import ParsedCall, ToolCallParser


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """`offset` is where the token's text begins in the choice's text, in characters. A prompt's
    first token has no `logprob`."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int
    rank: int = 0  # of a prompt's token; 1: the most likely


@dataclass(slots=True)
class ChoiceDelta:
    """The addition of one or several tokens to a choice. `finish` is set in its last delta.
    `tokens` are all that were drawn up to there, a stop token included."""

    choice: int
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    calls: list[ParsedCall] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    prompt: Sequence[int] | None = None  # if the request asked for ids
    prompt_entries: list[TokenLogprob] | None = None  # if the request asked for them
    reasoning: str = ""  # before the text

    def __bool__(self) -> bool:
        found = self.text or self.reasoning or self.logprobs or self.finish
        return bool(found or self.calls or self.tokens or self.prompt)


class ChoiceText:
    """The text of one `choice` of a request. The request's stop tokens end it and are not part of
    it; its first `min_tokens` tokens are not searched for stop strings. `tokens` counts the tokens
    drawn up to the end, the stop token included; `accepted_proposals` counts those of them that
    were proposed, `rejected_proposals` the other proposals."""

    def __init__(self, request: ValidatedRequest, choice: int, detokenizer: Detokenizer) -> None:
        reasoning, calling = request.reasoning, request.calling
        self._choice = choice
        self._detokenizer = detokenizer
        self._stops = StopMatcher(request.stops)
        self._stop_tokens = frozenset(request.stop_token_ids)
        self._reasoning = None if reasoning is None else reasoning.parser()
        self._calls = None if calling is None else ToolCallParser(calling)
        self._min_tokens = request.sampling.min_tokens
        self._token_ids = request.token_ids
        self._characters = len(request.echo or "")
        self.tokens = 0
        self.accepted_proposals = self.rejected_proposals = 0
        self.finished = False

    def push(self, outputs: Sequence[OutputToken]) -> ChoiceDelta:
        """Return the delta of these outputs; outputs after the end are ignored."""
        piece = ChoiceDelta(self._choice)
        for output in outputs:
            if self.finished:
                break
            if output.token is not None:
                self._take(output, piece)
            if self._stops.stopped or (self._calls is not None and self._calls.full):
                self._end("stop", piece)
            elif output.finish is not None:
                self._show(self._detokenizer.flush(), piece)
                self._give(self._stops.flush(), piece)
                self._end("stop" if self._stops.stopped else output.finish, piece)
            self.finished = piece.finish is not None
        return piece

    def silenced(self) -> ChoiceDelta:
        """Return the only delta of a choice whose client asked for no output."""
        self.finished = True
        return ChoiceDelta(self._choice, finish="length")

    def _take(self, output: OutputToken, piece: ChoiceDelta) -> None:
        assert output.token is not None
        self.tokens += 1
        self.accepted_proposals += output.accepted_proposal
        self.rejected_proposals += output.rejected_proposals
        if self._token_ids:
            piece.tokens.append(output.token)
        if output.finish == "stop" or output.token in self._stop_tokens:
            return
        if output.logprob is not None:
            piece.logprobs.append(
                TokenLogprob(output.token, output.logprob, output.top, self._characters)
            )
        self._show(self._detokenizer.push(output.token), piece)

    def _show(self, text: str, piece: ChoiceDelta) -> None:
        self._characters += len(text)
        searched = self.tokens > self._min_tokens
        self._give(self._stops.push(text) if searched else text, piece)

    def _give(self, text: str, piece: ChoiceDelta) -> None:
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text)
            piece.reasoning += reasoning
        self._give_content(text, piece)

    def _give_content(self, text: str, piece: ChoiceDelta) -> None:
        self._add(piece, (text, []) if self._calls is None else self._calls.push(text))

    def _end(self, finish: str, piece: ChoiceDelta) -> None:
        """End the choice. The reason "stop" becomes "tool_calls" if it called tools."""
        piece.finish = finish
        if self._reasoning is not None:
            reasoning, text = self._reasoning.flush()
            piece.reasoning += reasoning
            self._give_content(text, piece)
        if self._calls is not None:
            self._add(piece, self._calls.flush())
            if self._calls.count and finish == "stop":
                piece.finish = "tool_calls"

    def _add(self, piece: ChoiceDelta, found: tuple[str, list[ParsedCall]]) -> None:
        piece.text += found[0]
        piece.calls += found[1]
