"""Pieces of a choice: text, logprobs, ends; and the bodies that are made of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.proto import worker_pb2
from baton.router.answers.choice_text import ChoiceDelta, ChoiceText, TokenLogprob
from baton.router.answers.request_handler import Usage
from baton.router.client_access.error_body import error_body
from baton.router.dispatch.active_request import Finish, OutputToken
from baton.router.http_frontend.http_error import error_response
from baton.router.http_frontend.openai_answer import ChatRenderer, CompletionRenderer, ResponseHead
from baton.router.requests.validated_request import ValidatedRequest
from baton.router.text.call_form import CallableTools
from baton.router.text.call_forms import FORMS
from baton.router.text.tool_calls import ParsedCall
from baton.runtime import errors

END = 0
REQUEST = ValidatedRequest((), worker_pb2.Sampling(), max_tokens=9)
HEADING = ResponseHead("id-1", 123, "tiny", include_usage=True)
USAGE = Usage(prompt=5, completion=2, cached=3, accepted=1, rejected=4)


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


def tokens(text: str, finish: Finish = "length") -> list[OutputToken]:
    made = [OutputToken(0, ord(letter) - ord("a")) for letter in text]
    return [*made, OutputToken(0, None, finish=finish)]


def choice(*stops: str, stop_tokens: tuple[int, ...] = ()) -> ChoiceText:
    return ChoiceText(replace(REQUEST, stops=stops, stop_token_ids=stop_tokens), 0, Letters())


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


def test_proposals_after_a_stop_string_are_not_counted() -> None:
    text = choice("cd")
    run = [OutputToken(0, token, accepted_proposal=True) for token in (1, 2, 3, 4)]
    text.push([*run, OutputToken(0, 5, rejected_proposals=2)])
    assert (text.tokens, text.accepted_proposals, text.rejected_proposals) == (3, 3, 0)
    text = choice()
    text.push([*run, OutputToken(0, 5, rejected_proposals=2)])
    assert (text.tokens, text.accepted_proposals, text.rejected_proposals) == (5, 4, 2)


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
    edges = [0, *sorted(min(cut, len(outputs)) for cut in cuts), len(outputs)]
    cut_up = choice(*stops)
    pieces = [cut_up.push(outputs[start:end]) for start, end in zip(edges, edges[1:], strict=False)]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.finish for piece in pieces if piece.finish] == [whole.finish]


CALL = '<tool_call>{"name": "f", "arguments": {"b": "cd"}}</tool_call>'


class Signs(Letters):
    """Token n is the character n."""

    def push(self, token: int) -> str:
        return chr(token)


def calling_choice(*stops: str, parallel: bool = True) -> ChoiceText:
    may_call = CallableTools(FORMS["hermes"], frozenset({"f"}), parallel)
    return ChoiceText(replace(REQUEST, stops=stops, calling=may_call), 0, Signs())


def signs(text: str, finish: Finish) -> list[OutputToken]:
    return [*(OutputToken(0, ord(sign)) for sign in text), OutputToken(0, None, finish=finish)]


@pytest.mark.parametrize(
    ("text", "finish", "content", "calls", "reported"),
    [
        (f"a {CALL}", "stop", "a", 1, "tool_calls"),
        (f"{CALL}\n{CALL}", "stop", "", 2, "tool_calls"),
        (f"{CALL} and th", "length", "and th", 1, "length"),
        (f"{CALL}{CALL[:-30]}", "length", CALL[:-30], 1, "length"),
        (f"{CALL}{CALL[:-30]}", "stop", CALL[:-30], 1, "tool_calls"),
        (CALL[:-12], "stop", "", 1, "tool_calls"),
        (CALL[:-13], "stop", CALL[:-13], 0, "stop"),
        ("no call", "stop", "no call", 0, "stop"),
    ],
)
def test_calls_are_taken_out_of_the_text(
    text: str, finish: Finish, content: str, calls: int, reported: str
) -> None:
    outputs = signs(text, finish)
    whole = calling_choice().push(outputs)
    assert (whole.text, whole.finish) == (content, reported)
    assert whole.calls == [ParsedCall(index, "f", '{"b": "cd"}') for index in range(calls)]
    one_by_one = calling_choice()
    pieces = [one_by_one.push([output]) for output in outputs]
    assert "".join(piece.text for piece in pieces) == content
    assert [call for piece in pieces for call in piece.calls] == whole.calls
    assert [piece.finish for piece in pieces if piece.finish] == [reported]
    assert one_by_one.tokens == len(text)


@pytest.mark.parametrize(
    ("stop", "content", "calls", "reported"),
    [
        ("after", "", 1, "tool_calls"),  # beyond the call
        ("</tool_call>", "", 1, "tool_calls"),  # its end
        ('"name"', "<tool_call>{", 0, "stop"),  # inside it: then it is none
    ],
)
def test_stop_strings_count_in_the_whole_text(
    stop: str, content: str, calls: int, reported: str
) -> None:
    piece = calling_choice(stop).push(signs(f"{CALL}after all", "length"))
    assert (piece.text, len(piece.calls), piece.finish) == (content, calls, reported)


def test_the_first_call_ends_a_choice_that_may_have_one_only() -> None:
    text = calling_choice(parallel=False)
    piece = text.push(signs(f"{CALL}{CALL}", "length"))
    assert text.finished and text.tokens == len(CALL)
    assert (piece.text, len(piece.calls), piece.finish) == ("", 1, "tool_calls")
    text = calling_choice(parallel=False)
    pieces = [text.push([output]) for output in signs(CALL, "length")]
    assert [piece.finish for piece in pieces if piece] == ["tool_calls"]


def token_bytes(token: int) -> bytes:
    return b"\xe2\x82" if token == 9 else bytes([ord("a") + token])


def entry(token: int, logprob: float = -0.5) -> TokenLogprob:
    return TokenLogprob(token, logprob, ((token, logprob), (9, float("-inf"))), 4)


@pytest.mark.parametrize("text", ["a", '"\\\n', "猫🎉", ""])
def test_chat_chunks_are_json(text: str) -> None:
    renderer = ChatRenderer(HEADING, token_bytes, True)
    (body,) = map(json.loads, renderer.chunks(ChoiceDelta(2, text)))
    assert body["choices"] == [
        {"index": 2, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    ]
    assert body["object"] == "chat.completion.chunk" and body["usage"] is None
    assert (body["id"], body["created"], body["model"]) == ("id-1", 123, "tiny")


def test_chat_ends_and_openings() -> None:
    renderer = ChatRenderer(HEADING, token_bytes, True)
    opening = renderer.opening(ChoiceDelta(1))
    assert opening is not None
    assert json.loads(opening)["choices"][0]["delta"]["role"] == "assistant"
    (chunk,) = renderer.chunks(ChoiceDelta(1, finish="stop"))
    last = json.loads(chunk)["choices"][0]
    assert last["delta"] == {} and last["finish_reason"] == "stop"
    assert json.loads(renderer.usage_chunk(USAGE))["usage"]["total_tokens"] == 7


def test_a_call_is_sent_name_first() -> None:
    renderer = ChatRenderer(HEADING, token_bytes, True, tools=True)
    opening = renderer.opening(ChoiceDelta(0))
    assert opening is not None
    assert json.loads(opening)["choices"][0]["delta"]["content"] is None
    calls = [ParsedCall(0, "f", '{"a": "é"}'), ParsedCall(1, "g", "{}")]
    bodies = renderer.chunks(ChoiceDelta(1, "So", [entry(1)], "tool_calls", calls))
    choices = [json.loads(body)["choices"][0] for body in bodies]
    assert all(choice["index"] == 1 for choice in choices)
    assert choices[0]["delta"] == {"content": "So"} and choices[0]["logprobs"]["content"]
    reported = [choice["delta"]["tool_calls"] for choice in choices[1:5]]
    for index, call in enumerate(calls):
        (named,), (filled,) = reported[2 * index : 2 * index + 2]
        identity = named.pop("id")
        assert identity.startswith("call_") and len(bytes.fromhex(identity[5:])) == 16
        assert named == {
            "index": call.index,
            "type": "function",
            "function": {"name": call.name, "arguments": ""},
        }
        assert filled == {"index": call.index, "function": {"arguments": call.arguments}}
    assert [choice["finish_reason"] for choice in choices] == [None] * 5 + ["tool_calls"]
    assert choices[5]["delta"] == {} and choices[5]["logprobs"] is None


def test_pieces_beside_calls_say_no_content() -> None:
    renderer = ChatRenderer(HEADING, token_bytes, True, tools=True)
    (held,) = renderer.chunks(ChoiceDelta(0, "", [entry(1)]))
    assert json.loads(held)["choices"][0]["delta"] == {"content": None}
    assert len(renderer.chunks(ChoiceDelta(0, calls=[ParsedCall(0, "f", "{}")]))) == 2


@pytest.mark.parametrize(("text", "content"), [("", None), ("So", "So")])
def test_calls_of_a_whole_answer(text: str, content: str | None) -> None:
    renderer = ChatRenderer(HEADING, token_bytes, False, tools=True)
    pieces = [
        ChoiceDelta(
            0, text, finish="tool_calls", calls=[ParsedCall(0, "f", "{}"), ParsedCall(1, "g", "{}")]
        ),
        ChoiceDelta(1, "", finish="stop"),
    ]
    called, silent = json.loads(renderer.whole(pieces, USAGE))["choices"]
    ids = {call.pop("id") for call in called["message"]["tool_calls"]}
    assert len(ids) == 2 and called["finish_reason"] == "tool_calls"
    assert called["message"] == {
        "role": "assistant",
        "content": content,
        "refusal": None,
        "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": "{}"}} for name in "fg"
        ],
    }
    assert silent["message"] == {"role": "assistant", "content": "", "refusal": None}


def test_chat_logprobs_give_bytes_of_half_characters() -> None:
    renderer = ChatRenderer(HEADING, token_bytes, True)
    whole = json.loads(renderer.whole([ChoiceDelta(0, "x", [entry(9)], "stop")], USAGE))
    (content,) = whole["choices"][0]["logprobs"]["content"]
    assert content["bytes"] == [0xE2, 0x82] and content["token"] == "\ufffd"
    assert content["top_logprobs"][1]["logprob"] == -9999.0  # JSON knows no infinity
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert whole["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 1,
        "rejected_prediction_tokens": 4,
    }


def test_without_logprobs_there_are_none() -> None:
    for renderer in (ChatRenderer, CompletionRenderer):
        body = renderer(HEADING, token_bytes, False).whole([ChoiceDelta(0, "x", [], "stop")], USAGE)
        assert json.loads(body)["choices"][0]["logprobs"] is None


def test_completion_bodies() -> None:
    renderer = CompletionRenderer(HEADING, token_bytes, True)
    assert renderer.opening(ChoiceDelta(0)) is None
    (body,) = renderer.chunks(ChoiceDelta(1, "b", [entry(1)]))
    chunk = json.loads(body)
    assert chunk["object"] == "text_completion"
    assert chunk["choices"][0]["logprobs"] == {
        "tokens": ["b"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"b": -0.5, "bytes:\\xe2\\x82": -9999.0}],
        "text_offset": [4],
    }
    plain = ResponseHead("id", 1, "m", include_usage=False)
    (body,) = CompletionRenderer(plain, token_bytes, False).chunks(ChoiceDelta(0, "x"))
    assert "usage" not in json.loads(body)


def test_completion_top_logprobs_hold_the_drawn_token() -> None:
    pieces = {1: b"a", 2: b"\xe2", 3: b"\x82", 4: b"b"}
    drawn = TokenLogprob(4, -3.0, ((1, -0.5), (2, -1.0), (3, -2.0)), 0)
    renderer = CompletionRenderer(HEADING, pieces.__getitem__, True)
    choice = json.loads(renderer.whole([ChoiceDelta(0, "b", [drawn], "stop")], USAGE))["choices"][0]
    expected = {"a": -0.5, "bytes:\\xe2": -1.0, "bytes:\\x82": -2.0, "b": -3.0}
    assert choice["logprobs"]["top_logprobs"] == [expected]
    assert choice["logprobs"]["tokens"] == ["b"]


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


@pytest.mark.parametrize("kind", [ChatRenderer, CompletionRenderer])
def test_kept_logprobs_follow_those_of_the_piece(
    kind: type[ChatRenderer | CompletionRenderer],
) -> None:
    """The prompt's come with the piece, at the end; the outputs' were rendered as they came."""
    entries = [entry(1), entry(2), entry(9)]
    at_once = kind(HEADING, token_bytes, True).whole([ChoiceDelta(0, "x", entries, "stop")], USAGE)
    renderer = kind(HEADING, token_bytes, True)
    for each in entries[1:]:
        renderer.keep_logprobs(ChoiceDelta(0, "x", [each]))
    renderer.keep_logprobs(ChoiceDelta(1, "y", [entry(1)]))
    kept = renderer.whole([ChoiceDelta(0, "x", entries[:1], "stop")], USAGE)
    assert json.loads(kept) == json.loads(at_once)


def test_offsets_begin_after_the_echo() -> None:
    request = ValidatedRequest((1,), worker_pb2.Sampling(), 9, echo="abc")
    text = ChoiceText(request, 0, Letters())
    pieces = [text.push([OutputToken(0, token, logprob=-1.0)]) for token in (1, 2)]
    assert [piece.logprobs[0].offset for piece in pieces] == [3, 4]
