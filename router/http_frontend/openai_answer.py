"""OpenAI's response bodies for chats and completions, whole and in chunks.

Bodies are rendered to bytes with little work for each token: the constant head of a chunk is
rendered once. Knows no transport. One renderer serves one request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import orjson

from baton.router.answers.choice_text import ChoiceDelta, TokenLogprob
from baton.router.answers.request_handler import Usage
from baton.router.text.tool_calls import new_call_id

TokenBytes = Callable[[int], bytes]


class Renderer(Protocol):
    """`opening` precedes a choice's first piece. `chunks` and `usage_chunk` are JSON bodies of
    server-sent events; `whole` is the body of an answer without streaming, with the
    log-probabilities that `keep_logprobs` has taken of each choice. `usage` is the usage up to a
    chunk, if each chunk is to hold it."""

    def opening(self, piece: ChoiceDelta, usage: Usage | None = None) -> bytes | None: ...

    def chunks(self, piece: ChoiceDelta, usage: Usage | None = None) -> list[bytes]: ...

    def usage_chunk(self, usage: Usage) -> bytes: ...

    def keep_logprobs(self, piece: ChoiceDelta) -> None: ...

    def whole(self, pieces: Sequence[ChoiceDelta], usage: Usage) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The fields that all bodies of one answer share. `created_s` is Unix time."""

    answer_id: str
    created_s: int
    model: str
    include_usage: bool
    token_ids: bool = False

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
        }

    def opened(self, kind: str) -> bytes:
        """Return the start of every chunk, up to its choices."""
        return orjson.dumps(self.fields(kind))[:-1] + b',"choices":['

    def closed(self, usage: Usage | None = None) -> bytes:
        """Return the end of a chunk; `usage` is the usage up to it, if each chunk holds it."""
        if usage is not None:
            return b'],"usage":' + orjson.dumps(_usage_body(usage)) + b"}"
        return b'],"usage":null}' if self.include_usage else b"]}"


class ChatRenderer:
    """`tools`: the answer may consist of tool calls, so its content is null until text comes."""

    def __init__(
        self, heading: ResponseHead, token_bytes: TokenBytes, logprobs: bool, tools: bool = False
    ) -> None:
        self._heading = heading
        self._token_bytes = token_bytes
        self._logprobs = logprobs
        self._no_content = None if tools else ""
        self._kept: defaultdict[int, list[orjson.Fragment]] = defaultdict(list)
        self._head = heading.opened("chat.completion.chunk")
        self._tail = heading.closed()

    def opening(self, piece: ChoiceDelta, usage: Usage | None = None) -> bytes | None:
        delta = {"role": "assistant", "content": self._no_content, "refusal": None}
        body = self._body(piece.choice, orjson.dumps(delta), usage=usage)
        if piece.prompt is None:
            return body
        return body[:-1] + b',"prompt_token_ids":' + orjson.dumps(piece.prompt) + b"}"

    def chunks(self, piece: ChoiceDelta, usage: Usage | None = None) -> list[bytes]:
        """Return one chunk, and for each tool call two: id and name, then arguments."""
        if not piece.calls:
            return [self._chunk(piece, usage)]
        bodies = []
        if piece.text or piece.reasoning or piece.logprobs or piece.tokens:
            shown = replace(piece, finish=None, calls=[])
            bodies.append(self._chunk(shown, usage))
        for call in piece.calls:
            named = {"index": call.index, **_call_body(call.name, "")}
            filled = {"index": call.index, "function": {"arguments": call.arguments}}
            for part in (named, filled):
                delta = orjson.dumps({"tool_calls": [part]})
                bodies.append(self._body(piece.choice, delta, usage=usage))
        if piece.finish is not None:
            bodies.append(self._chunk(ChoiceDelta(piece.choice, finish=piece.finish), usage))
        return bodies

    def _chunk(self, piece: ChoiceDelta, usage: Usage | None) -> bytes:
        delta = b"{}"
        if piece.reasoning:
            parts = {"reasoning_content": piece.reasoning}
            delta = orjson.dumps({**parts, "content": piece.text} if piece.text else parts)
        elif piece.text or piece.finish is None:
            delta = b'{"content":' + orjson.dumps(piece.text or self._no_content) + b"}"
        logprobs = _chat_logprobs(self._entries(piece)) if piece.logprobs else None
        return self._body(piece.choice, delta, logprobs, piece.finish, piece.tokens, usage)

    def _body(
        self,
        choice: int,
        delta: bytes,
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
        tokens: Sequence[int] = (),
        usage: Usage | None = None,
    ) -> bytes:
        parts = [self._head, b'{"index":', str(choice).encode(), b',"delta":', delta]
        parts += [b',"logprobs":', orjson.dumps(logprobs)]
        parts += [b',"finish_reason":', orjson.dumps(finish)]
        if self._heading.token_ids:
            parts += [b',"token_ids":', orjson.dumps(tokens)]
        parts += [b"}", self._tail if usage is None else self._heading.closed(usage)]
        return b"".join(parts)

    def usage_chunk(self, usage: Usage) -> bytes:
        fields = self._heading.fields("chat.completion.chunk")
        return orjson.dumps({**fields, "choices": [], "usage": _usage_body(usage)})

    def keep_logprobs(self, piece: ChoiceDelta) -> None:
        """Render now what `whole` would else have to render in one turn of the loop."""
        self._kept[piece.choice] += map(_rendered, self._entries(piece))

    def whole(self, pieces: Sequence[ChoiceDelta], usage: Usage) -> bytes:
        choices = [
            {
                "index": piece.choice,
                "message": _message(piece),
                "logprobs": (
                    _chat_logprobs([*self._entries(piece), *self._kept[piece.choice]])
                    if self._logprobs
                    else None
                ),
                "finish_reason": piece.finish,
                **({"token_ids": piece.tokens} if self._heading.token_ids else {}),
            }
            for piece in pieces
        ]
        fields = self._heading.fields("chat.completion") | self._prompt_fields(pieces[0])
        return orjson.dumps({**fields, "choices": choices, "usage": _usage_body(usage)})

    def _prompt_fields(self, piece: ChoiceDelta) -> dict[str, Any]:
        return _prompt_fields(piece, self._token_bytes)

    def _entries(self, piece: ChoiceDelta) -> list[dict[str, Any]]:
        return [
            {
                **self._entry(entry.token, entry.logprob),
                "top_logprobs": [self._entry(token, logprob) for token, logprob in entry.top],
            }
            for entry in piece.logprobs
        ]

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        raw = self._token_bytes(token)
        return {"token": _text(raw), "logprob": _finite(logprob), "bytes": list(raw)}


@dataclass(frozen=True, slots=True)
class _CompletionLogprob:
    """A token of a completion with its alternatives, which may be rendered already."""

    name: str
    logprob: float | None
    top: dict[str, float | None] | orjson.Fragment | None
    offset: int


class CompletionRenderer:
    def __init__(self, heading: ResponseHead, token_bytes: TokenBytes, logprobs: bool) -> None:
        self._heading = heading
        self._token_bytes = token_bytes
        self._logprobs = logprobs
        self._kept: defaultdict[int, list[_CompletionLogprob]] = defaultdict(list)
        self._head = heading.opened("text_completion")
        self._tail = heading.closed()

    def opening(self, piece: ChoiceDelta, usage: Usage | None = None) -> bytes | None:
        return None

    def chunks(self, piece: ChoiceDelta, usage: Usage | None = None) -> list[bytes]:
        logprobs = _completion_logprobs(self._entries(piece)) if piece.logprobs else None
        choice = orjson.dumps(self._choice(piece, logprobs))
        return [
            self._head + choice + (self._tail if usage is None else self._heading.closed(usage))
        ]

    def usage_chunk(self, usage: Usage) -> bytes:
        fields = self._heading.fields("text_completion")
        return orjson.dumps({**fields, "choices": [], "usage": _usage_body(usage)})

    def keep_logprobs(self, piece: ChoiceDelta) -> None:
        """Same as `ChatRenderer.keep_logprobs`."""
        self._kept[piece.choice] += [
            replace(entry, top=_rendered(entry.top)) for entry in self._entries(piece)
        ]

    def whole(self, pieces: Sequence[ChoiceDelta], usage: Usage) -> bytes:
        choices = []
        for piece in pieces:
            entries = [*self._entries(piece), *self._kept[piece.choice]]
            logprobs = _completion_logprobs(entries) if self._logprobs else None
            choices.append(self._choice(piece, logprobs))
        fields = self._heading.fields("text_completion")
        return orjson.dumps({**fields, "choices": choices, "usage": _usage_body(usage)})

    def _choice(self, piece: ChoiceDelta, logprobs: dict[str, Any] | None) -> Mapping[str, Any]:
        return {
            "index": piece.choice,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish,
            **({"token_ids": piece.tokens} if self._heading.token_ids else {}),
            **_prompt_fields(piece, self._token_bytes),
        }

    def _entries(self, piece: ChoiceDelta) -> list[_CompletionLogprob]:
        return [
            _CompletionLogprob(
                self._name(entry.token), _finite(entry.logprob), self._top(entry), entry.offset
            )
            for entry in piece.logprobs
        ]

    def _top(self, entry: TokenLogprob) -> dict[str, float | None] | None:
        """Return the most likely tokens and the drawn one, by name. Of tokens with the same name
        the drawn one counts, else the most likely. A prompt's first token has none."""
        if entry.logprob is None:
            return None
        named: dict[str, float | None] = {}
        for token, logprob in entry.top:
            named.setdefault(self._name(token), _finite(logprob))
        return named | {self._name(entry.token): _finite(entry.logprob)}

    def _name(self, token: int) -> str:
        """Return a token's text, or its bytes in OpenAI's form if it is no valid UTF-8, so that
        different tokens have different names."""
        raw = self._token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _rendered(value: object) -> orjson.Fragment:
    return orjson.Fragment(orjson.dumps(value))


def _chat_logprobs(entries: Sequence[object]) -> dict[str, Any]:
    return {"content": entries, "refusal": None}


def _completion_logprobs(entries: Sequence[_CompletionLogprob]) -> dict[str, Any]:
    return {
        "tokens": [entry.name for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [entry.top for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _prompt_fields(piece: ChoiceDelta, token_bytes: TokenBytes) -> dict[str, Any]:
    """Return the fields about the prompt that the request asked for."""
    fields: dict[str, Any] = {}
    if piece.prompt is not None:
        fields["prompt_token_ids"] = piece.prompt
    if piece.prompt_entries is not None:
        fields["prompt_logprobs"] = [
            None if entry.logprob is None else _by_id(entry, token_bytes)
            for entry in piece.prompt_entries
        ]
    return fields


def _by_id(entry: TokenLogprob, token_bytes: TokenBytes) -> dict[str, Any]:
    """Return the token and the most likely alternatives, by their ids."""
    ranked = [(entry.token, entry.logprob, entry.rank)]
    ranked += [(token, value, order) for order, (token, value) in enumerate(entry.top, 1)]
    return {
        str(token): {
            "logprob": _finite(value),
            "rank": rank,
            "decoded_token": _text(token_bytes(token)),
        }
        for token, value, rank in ranked
    }


def _message(piece: ChoiceDelta) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
    if piece.reasoning:
        message["reasoning_content"] = piece.reasoning
    if piece.calls:
        message["content"] = piece.text or None
        message["tool_calls"] = [_call_body(call.name, call.arguments) for call in piece.calls]
    return message


def _call_body(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": new_call_id(), "type": "function", "function": function}


def _usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.rejected,
        },
    }


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _finite(logprob: float | None) -> float | None:
    """Replace -inf, which JSON lacks, by OpenAI's value for "practically impossible"."""
    return None if logprob is None else max(logprob, -9999.0)
