"""What is refused while it is bytes, and how a bad field is named."""

from __future__ import annotations

from typing import TypeVar

import orjson
import pytest

from baton.router.requests.openai_schema import (
    MAX_MESSAGES,
    MAX_TOKEN_VALUES,
    ChatRequest,
    CompletionRequest,
)
from baton.router.requests.request_parser import (
    MAX_CONTAINERS,
    MAX_PARTS_AND_CALLS,
    MAX_STRINGS,
    check_counts,
    decode_body,
    parse_fields,
)
from baton.router.requests.schema_body import MAX_VALUES, Body
from baton.runtime.errors import InvalidRequest

BodyT = TypeVar("BodyT", bound=Body)
TEXT = {"type": "text", "text": "a"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}


def parsed(body: bytes, shape: type[BodyT]) -> BodyT:
    check_counts(shape.max_values, body)
    return parse_fields(decode_body(body), shape)


def test_complaints_name_the_deepest_place() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text"}]}]}
    with pytest.raises(InvalidRequest, match="missing: add it") as refused:
        parsed(orjson.dumps(body), ChatRequest)
    assert refused.value.field == "messages[0].content[0].text"


def completion_of(value: bytes) -> CompletionRequest:
    return parsed(b'{"model":"m","prompt":' + value + b"}", CompletionRequest)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (b"[" + b"[]," * MAX_CONTAINERS + b"[]]", "lists and objects"),
        (b"[" * (MAX_CONTAINERS + 1), "lists and objects"),  # legal or not: counted first
        (b'[{"a":"[\\\\"},' + b"{}," * MAX_CONTAINERS + b"1]", "lists and objects"),
        (b"[" + b"1," * (MAX_TOKEN_VALUES + 1) + b"1]", "values"),
        (b'"' * 2 * (MAX_STRINGS + 1), "strings"),
        (b'{"a":"",' * (MAX_STRINGS // 2) + b'"a":1', "strings"),
    ],
    ids=["lists", "nested", "objects-after-an-escape", "numbers", "strings", "names"],
)
def test_a_body_of_very_many_values_is_refused_unparsed(value: bytes, what: str) -> None:
    with pytest.raises(InvalidRequest, match=f"the body holds .* {what}"):
        completion_of(value)


@pytest.mark.parametrize("text", ["[{,", '\\"[', '["],{"', "\\\\"])
def test_what_stands_in_a_string_is_not_counted(text: str) -> None:
    prompt = text * MAX_TOKEN_VALUES
    assert completion_of(orjson.dumps(prompt)).prompt == prompt


def test_as_many_tokens_as_are_read_are_read() -> None:
    made = completion_of(b"[" + b"1," * (MAX_TOKEN_VALUES - 10) + b"1]")
    assert isinstance(made.prompt, list) and len(made.prompt) == MAX_TOKEN_VALUES - 9


def test_arguments_of_calls_are_counted_before_they_are_parsed() -> None:
    def body(calls: int, values: int) -> bytes:
        text = "{" + ",".join(f'"k{n}":[]' for n in range(values)) + "}"
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": text}}
        messages = [{"role": "assistant", "content": None, "tool_calls": [call] * calls}]
        return orjson.dumps({"model": "m", "messages": messages})

    with pytest.raises(InvalidRequest, match="arguments of calls hold over 32768") as caught:
        parsed(body(100, 5000), ChatRequest)  # 5 MB, a million values
    assert caught.value.field == "messages"
    assert len(parsed(body(2, 500), ChatRequest).messages) == 1
    for odd in ("x", [1], [{"tool_calls": 1}], [{"tool_calls": [{"function": {"arguments": 1}}]}]):
        with pytest.raises(InvalidRequest):
            parsed(orjson.dumps({"model": "m", "messages": odd}), ChatRequest)


def chat_of(**fields: object) -> ChatRequest:
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}], **fields})
    return parsed(body, ChatRequest)


def test_a_chat_holds_fewer_values_than_a_prompt_of_tokens() -> None:
    with pytest.raises(InvalidRequest, match=f"over {MAX_VALUES} values"):
        chat_of(tools=[0] * (MAX_VALUES + 2))
    with pytest.raises(InvalidRequest, match=r"tools\[0\]"):
        chat_of(tools=[0] * (MAX_VALUES - 10))


def test_messages_parts_and_calls_have_a_bound_in_all() -> None:
    said = {"role": "user", "content": "a"}
    assert len(chat_of(messages=[said] * MAX_MESSAGES).messages) == MAX_MESSAGES
    with pytest.raises(InvalidRequest, match=f"at most {MAX_MESSAGES} items") as refused:
        chat_of(messages=[said] * (MAX_MESSAGES + 1))
    assert refused.value.field == "messages"
    calling = {"role": "assistant", "tool_calls": [CALL] * 64}
    parted = {"role": "user", "content": [TEXT] * 64}
    half = MAX_PARTS_AND_CALLS // 128
    assert len(chat_of(messages=[calling, parted] * half).messages) == 2 * half
    for over in ({"role": "user", "content": [TEXT]}, {"role": "assistant", "tool_calls": [CALL]}):
        with pytest.raises(InvalidRequest, match=f"over {MAX_PARTS_AND_CALLS} parts") as refused:
            chat_of(messages=[calling, parted] * half + [over])
        assert refused.value.field == "messages"
