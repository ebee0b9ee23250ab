"""OpenAI's response bodies, for chats and completions, whole and in pieces.

Bodies only: rendered to bytes with as little work per token as can be; the constant head of a
chunk is rendered once. Knows no transport. One renderer serves one request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from baton.router.choice_text import Piece, TokenLogprob

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens; `cached` are prompt tokens taken from a prefix cache."""

    prompt: int
    completion: int
    cached: int

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Renderer(Protocol):
    """`opening` comes before a choice's first piece. `chunk` and `usage_chunk` are JSON bodies
    of server-sent events; `whole` is that of an answer in one."""

    def opening(self, choice: int) -> bytes | None: ...

    def chunk(self, piece: Piece) -> bytes: ...

    def usage_chunk(self, usage: Usage) -> bytes: ...

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Heading:
    """What all bodies of one answer share. `created_s` is Unix time."""

    answer_id: str
    created_s: int
    model: str
    include_usage: bool

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
        }

    def opened(self, kind: str) -> bytes:
        """The start of every chunk, up to its choices."""
        return orjson.dumps(self.fields(kind))[:-1] + b',"choices":['

    def closed(self) -> bytes:
        return b'],"usage":null}' if self.include_usage else b"]}"


class ChatRenderer:
    def __init__(self, heading: Heading, token_bytes: TokenBytes, logprobs: bool) -> None:
        self._heading = heading
        self._token_bytes = token_bytes
        self._logprobs = logprobs
        self._head = heading.opened("chat.completion.chunk")
        self._tail = heading.closed()

    def opening(self, choice: int) -> bytes | None:
        delta = {"role": "assistant", "content": "", "refusal": None}
        opened = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._head + orjson.dumps(opened) + self._tail

    def chunk(self, piece: Piece) -> bytes:
        parts = [self._head, b'{"index":', str(piece.choice).encode()]
        if piece.text or piece.finish is None:
            parts += [b',"delta":{"content":', orjson.dumps(piece.text), b"}"]
        else:
            parts.append(b',"delta":{}')
        logprobs = self._logprob_body(piece) if piece.logprobs else None
        parts += [b',"logprobs":', orjson.dumps(logprobs)]
        parts += [b',"finish_reason":', orjson.dumps(piece.finish), b"}", self._tail]
        return b"".join(parts)

    def usage_chunk(self, usage: Usage) -> bytes:
        fields = self._heading.fields("chat.completion.chunk")
        return orjson.dumps({**fields, "choices": [], "usage": usage.body()})

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        choices = [
            {
                "index": piece.choice,
                "message": {"role": "assistant", "content": piece.text, "refusal": None},
                "logprobs": self._logprob_body(piece) if self._logprobs else None,
                "finish_reason": piece.finish,
            }
            for piece in pieces
        ]
        fields = self._heading.fields("chat.completion")
        return orjson.dumps({**fields, "choices": choices, "usage": usage.body()})

    def _logprob_body(self, piece: Piece) -> dict[str, Any]:
        content = [
            {
                **self._entry(entry.token, entry.logprob),
                "top_logprobs": [self._entry(token, logprob) for token, logprob in entry.top],
            }
            for entry in piece.logprobs
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._token_bytes(token)
        return {"token": _text(raw), "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionRenderer:
    def __init__(self, heading: Heading, token_bytes: TokenBytes, logprobs: bool) -> None:
        self._heading = heading
        self._token_bytes = token_bytes
        self._logprobs = logprobs
        self._head = heading.opened("text_completion")
        self._tail = heading.closed()

    def opening(self, choice: int) -> bytes | None:
        return None

    def chunk(self, piece: Piece) -> bytes:
        return self._head + orjson.dumps(self._choice(piece, bool(piece.logprobs))) + self._tail

    def usage_chunk(self, usage: Usage) -> bytes:
        fields = self._heading.fields("text_completion")
        return orjson.dumps({**fields, "choices": [], "usage": usage.body()})

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        choices = [self._choice(piece, self._logprobs) for piece in pieces]
        fields = self._heading.fields("text_completion")
        return orjson.dumps({**fields, "choices": choices, "usage": usage.body()})

    def _choice(self, piece: Piece, logprobs: bool) -> Mapping[str, Any]:
        return {
            "index": piece.choice,
            "text": piece.text,
            "logprobs": self._logprob_body(piece.logprobs) if logprobs else None,
            "finish_reason": piece.finish,
        }

    def _logprob_body(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "tokens": [_text(self._token_bytes(entry.token)) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                {_text(self._token_bytes(token)): _finite(value) for token, value in entry.top}
                for entry in entries
            ],
            "text_offset": [entry.offset for entry in entries],
        }


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _finite(logprob: float) -> float:
    """JSON has no -inf: OpenAI's own stand-in for "as good as impossible"."""
    return max(logprob, -9999.0)
