"""Pieces of a choice: text, logprobs, ends; and the bodies that are made of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.choice_text import ChoiceText, Piece, TokenLogprob
from baton.router.generation import OutputToken
from baton.router.http_error import error_body, error_response
from baton.router.openai_body import ChatRenderer, CompletionRenderer, Heading, Usage
from baton.runtime import errors

END = 0
HEADING = Heading("id-1", 123, "tiny", include_usage=True)
USAGE = Usage(prompt=5, completion=2, cached=3)


class Letters:
    """Token n is the n-th letter; bytes of a character may be held as by any detokenizer."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, token: int) -> str:
        letter = chr(ord("a") + token)
        if letter == "z":  # as a part of a character: held until the next token
            self.held += letter
            return ""
        text, self.held = self.held + letter, ""
        return text

    def flush(self) -> str:
        text, self.held = self.held, ""
        return text


def tokens(text: str, finish: Any = "length") -> list[OutputToken]:
    made = [OutputToken(0, ord(letter) - ord("a")) for letter in text]
    return [*made, OutputToken(0, None, finish=finish)]


def choice(*stops: str, stop_tokens: tuple[int, ...] = ()) -> ChoiceText:
    return ChoiceText(0, Letters(), stops, frozenset(stop_tokens))


def test_text_comes_with_its_end() -> None:
    text = choice()
    piece = text.push(tokens("bcd"))
    assert (piece.text, piece.finish, text.tokens) == ("bcd", "length", 3)


def test_held_text_comes_out_at_the_end() -> None:
    text = choice()
    assert text.push([OutputToken(0, 25)]).text == ""
    assert text.push([OutputToken(0, None, finish="stop")]).text == "z"


def test_a_stop_string_in_the_flushed_text_counts() -> None:
    piece = choice("z").push(tokens("bz"))
    assert (piece.text, piece.finish) == ("b", "stop")


def test_a_possible_stop_is_shown_when_it_was_none() -> None:
    piece = choice("cde").push(tokens("bcd"))
    assert (piece.text, piece.finish) == ("bcd", "length")


def test_nothing_after_a_stop_string_counts() -> None:
    text = choice("cd")
    piece = text.push(tokens("bcdefg"))
    assert (piece.text, piece.finish, text.tokens) == ("b", "stop", 3)
    assert not text.push(tokens("h"))


def test_the_stop_token_is_counted_and_not_shown() -> None:
    text = choice(stop_tokens=(4,))
    piece = text.push([OutputToken(0, 1), OutputToken(0, 4, logprob=-1.0, finish="stop")])
    assert (piece.text, piece.finish, text.tokens, piece.logprobs) == ("b", "stop", 2, [])


def test_logprobs_come_with_their_offsets() -> None:
    outputs = [OutputToken(0, token, logprob=-1.0, top=((token, -1.0),)) for token in (1, 25, 2)]
    piece = choice().push(outputs)
    assert [entry.offset for entry in piece.logprobs] == [0, 1, 1]
    assert [entry.token for entry in piece.logprobs] == [1, 25, 2]


@given(
    text=st.text(alphabet="bcdz", max_size=20),
    cuts=st.lists(st.integers(0, 21), max_size=4),
    stop=st.sampled_from(["", "cd", "zb", "dd"]),
)
def test_any_cut_shows_the_same(text: str, cuts: list[int], stop: str) -> None:
    stops = [stop] if stop else []
    outputs = tokens(text)
    whole = choice(*stops).push(outputs)
    places = [0, *sorted(min(cut, len(outputs)) for cut in cuts), len(outputs)]
    cut_up = choice(*stops)
    pieces = [
        cut_up.push(outputs[start:end]) for start, end in zip(places, places[1:], strict=False)
    ]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.finish for piece in pieces if piece.finish] == [whole.finish]


def token_bytes(token: int) -> bytes:
    return b"\xe2\x82" if token == 9 else bytes([ord("a") + token])


def entry(token: int, logprob: float = -0.5) -> TokenLogprob:
    return TokenLogprob(token, logprob, ((token, logprob), (9, float("-inf"))), 4)


@pytest.mark.parametrize("text", ["a", '"\\\n', "猫🎉", ""])
def test_chat_chunks_are_json(text: str) -> None:
    renderer = ChatRenderer(HEADING, token_bytes, True)
    body = json.loads(renderer.chunk(Piece(2, text)))
    assert body["choices"] == [
        {"index": 2, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    ]
    assert body["object"] == "chat.completion.chunk" and body["usage"] is None
    assert (body["id"], body["created"], body["model"]) == ("id-1", 123, "tiny")


def test_chat_ends_and_openings() -> None:
    renderer = ChatRenderer(HEADING, token_bytes, True)
    opening = renderer.opening(1)
    assert opening is not None
    assert json.loads(opening)["choices"][0]["delta"]["role"] == "assistant"
    last = json.loads(renderer.chunk(Piece(1, finish="stop")))["choices"][0]
    assert last["delta"] == {} and last["finish_reason"] == "stop"
    assert json.loads(renderer.usage_chunk(USAGE))["usage"]["total_tokens"] == 7


def test_chat_logprobs_give_bytes_of_half_characters() -> None:
    renderer = ChatRenderer(HEADING, token_bytes, True)
    whole = json.loads(renderer.whole([Piece(0, "x", [entry(9)], "stop")], USAGE))
    (content,) = whole["choices"][0]["logprobs"]["content"]
    assert content["bytes"] == [0xE2, 0x82] and content["token"] == "\ufffd"
    assert content["top_logprobs"][1]["logprob"] == -9999.0  # JSON knows no infinity
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_without_logprobs_there_are_none() -> None:
    for renderer in (ChatRenderer, CompletionRenderer):
        body = renderer(HEADING, token_bytes, False).whole([Piece(0, "x", [], "stop")], USAGE)
        assert json.loads(body)["choices"][0]["logprobs"] is None


def test_completion_bodies() -> None:
    renderer = CompletionRenderer(HEADING, token_bytes, True)
    assert renderer.opening(0) is None
    chunk = json.loads(renderer.chunk(Piece(1, "b", [entry(1)])))
    assert chunk["object"] == "text_completion"
    assert chunk["choices"][0]["logprobs"] == {
        "tokens": ["b"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"b": -0.5, "\ufffd": -9999.0}],
        "text_offset": [4],
    }
    plain = Heading("id", 1, "m", include_usage=False)
    assert "usage" not in json.loads(
        CompletionRenderer(plain, token_bytes, False).chunk(Piece(0, "x"))
    )


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (errors.InvalidRequest("m", "n"), 400, "invalid_request_error", "invalid_value"),
        (errors.NotFound("m", "model"), 404, "invalid_request_error", "model_not_found"),
        (errors.NotFound("m"), 404, "invalid_request_error", "not_found"),
        (errors.TooLarge("m"), 413, "invalid_request_error", "body_too_large"),
        (errors.Unauthenticated("m"), 401, "authentication_error", "invalid_api_key"),
        (errors.RateLimited("m"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (errors.Overloaded("m"), 503, "server_error", "overloaded"),
        (errors.WorkerLost("m"), 503, "server_error", "worker_lost"),
        (errors.LeaseLost("m"), 503, "server_error", "unavailable"),
        (errors.DeadlineExceeded("m"), 504, "server_error", "deadline_exceeded"),
        (errors.BatonError("secret"), 500, "server_error", "internal_error"),
        (errors.ModelError("secret"), 500, "server_error", "internal_error"),
    ],
)
def test_error_bodies(error: errors.BatonError, status: int, kind: str, code: str) -> None:
    body = error_body(error)["error"]
    assert (body["type"], body["code"]) == (kind, code)
    assert ("secret" in body["message"]) is False
    response = error_response(error)
    assert response.status_code == status
    assert ("retry-after" in response.headers) == (status in (429, 503))
