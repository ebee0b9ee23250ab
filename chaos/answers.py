"""An answer as its client has it, and in what it is not the right one.

Of each choice its tokens, their logprobs, its text and why it ended; of them all the usage. What
HTTP and gRPC tell is put into the same words. Pure: knows no requests and no processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.proto import client_pb2

Usage = tuple[int, int]  # tokens of the prompt, tokens of all choices


@dataclass(slots=True)
class Choice:
    """It grows as pieces arrive. `finish`: "" until its end. `token_s`: when its tokens came,
    where they come one after the other; of the loop's clock."""

    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    token_s: list[float] = field(default_factory=list, compare=False)

    def add(self, piece: Choice) -> None:
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.text += piece.text
        self.finish += piece.finish  # two reasons equal no right one

    def begins(self, whole: Choice) -> bool:
        """Whether it may still become that one, or is it if it has ended."""
        if self.finish:
            return self == whole
        count = len(self.tokens)
        return (
            self.tokens == whole.tokens[:count]
            and self.logprobs == whole.logprobs[:count]
            and whole.text.startswith(self.text)
        )

    def fits_in(self, whole: Choice) -> bool:
        """Same as `begins`, where tokens are drawn again."""
        (tokens, logprobs, finish), (most, most_logprobs, _) = self.shape(), whole.shape()
        if finish:
            return self.shape() == whole.shape()
        return tokens <= most and logprobs <= most_logprobs

    def shape(self) -> tuple[int, int, str]:
        """The part that does not depend on which tokens were drawn."""
        return len(self.tokens), len(self.logprobs), self.finish


@dataclass(slots=True)
class Answer:
    """`choices` by index. `usage`: None before it arrives."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: Usage | None = None

    @property
    def tokens(self) -> list[str]:
        """The tokens of every choice, one after the other."""
        return [token for _, choice in sorted(self.choices.items()) for token in choice.tokens]

    def add(self, heard: AnswerPart, now_s: float | None = None) -> None:
        """`now_s`: when it arrived; None where all of it comes at once."""
        for index, piece in heard.pieces:
            choice = self.choices.setdefault(index, Choice())
            choice.add(piece)
            if now_s is not None:
                choice.token_s += [now_s] * len(piece.tokens)
        self.usage = heard.usage or self.usage

    def differs(self, right: Answer, *, usage: bool, redrawn: bool = False) -> str | None:
        """Return in what, None if in nothing. `usage`: it was expected. `redrawn`: the tokens may
        be others, but not more or fewer."""
        if self.choices.keys() != right.choices.keys():
            return f"choices {sorted(self.choices)} instead of {sorted(right.choices)}"
        for index, choice in self.choices.items():
            wanted = right.choices[index]
            same = choice.shape() == wanted.shape() if redrawn else choice == wanted
            if not same:
                return f"choice {index}: {choice} instead of {wanted}"
        heard = right.usage if usage else None
        return None if self.usage == heard else f"usage {self.usage} instead of {heard}"

    def begins(self, right: Answer, *, redrawn: bool = False) -> bool:
        """Whether what is there of it is the beginning of the right one."""
        for index, choice in self.choices.items():
            wanted = right.choices.get(index)
            if wanted is None:
                return False
            if not (choice.fits_in(wanted) if redrawn else choice.begins(wanted)):
                return False
        return self.usage in (None, right.usage)


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """The content of one message: pieces, each with the index of its choice, and the usage."""

    pieces: list[tuple[int, Choice]]
    usage: Usage | None = None


def of_http(body: Mapping[str, Any]) -> AnswerPart:
    """A completion, or an event of one."""
    pieces = []
    for heard in body["choices"]:
        logprobs = heard["logprobs"] or {"tokens": [], "token_logprobs": []}
        tokens, values = logprobs["tokens"], logprobs["token_logprobs"]
        reason = heard["finish_reason"] or ""
        if reason == "error":  # it breaks off, and an event says why
            reason = ""
        pieces.append((heard["index"], Choice(tokens, values, heard["text"], reason)))
    usage = body.get("usage")
    return AnswerPart(
        pieces, (usage["prompt_tokens"], usage["completion_tokens"]) if usage else None
    )


def of_grpc(message: client_pb2.GenerateResponse) -> AnswerPart:
    pieces = []
    for heard in message.pieces:
        tokens = [entry.bytes.decode(errors="replace") for entry in heard.logprobs]
        values = [entry.logprob for entry in heard.logprobs]
        reason = client_pb2.FinishReason.Name(heard.finish_reason) if heard.finish_reason else ""
        pieces.append((heard.choice, Choice(tokens, values, heard.text, reason.lower())))
    usage = message.usage if message.HasField("usage") else None
    return AnswerPart(pieces, (usage.prompt_tokens, usage.completion_tokens) if usage else None)
