"""Messages and tools as templates take them, and which are refused, by name."""

from __future__ import annotations

import pytest

from baton.router.requests.chat_prompt import plain_messages, plain_tools
from baton.router.requests.openai_schema import Message, Tool
from baton.runtime.errors import InvalidRequest
from tests.support.json_values import Json, JsonObject


def call(identity: str = "1", arguments: str = "{}") -> JsonObject:
    return {
        "id": identity,
        "type": "function",
        "function": {"name": "f", "arguments": arguments},
    }


def messages(*given: JsonObject) -> list[Message]:
    return [Message.model_validate(each) for each in given]


def test_messages_for_templates() -> None:
    wanted = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"é": [1.5]}}}
    assert plain_messages(
        messages(
            {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"], "name": "n"},
            {"role": "assistant", "content": None, "tool_calls": [call("1", '{"é": [1.5]}')]},
            {"role": "tool", "content": "", "tool_call_id": "1"},
        )
    ) == [
        {"role": "user", "content": "a\nb", "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [wanted]},
        {"role": "tool", "content": "", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize("text", ["", " ", "{}"])
def test_no_arguments(text: str) -> None:
    (made,) = plain_messages(messages({"role": "assistant", "tool_calls": [call("1", text)]}))
    assert made["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("fields", [{}, {"content": None}, {"content": None, "tool_calls": []}])
def test_an_answer_without_text_may_be_sent_back(fields: JsonObject) -> None:
    (made,) = plain_messages(messages({"role": "assistant", **fields}))
    assert made == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("number", [1 << 63, 1 << 64, -(1 << 63) - 1, 10**300, 0.1, 1e23])
def test_numbers_of_arguments_are_those_that_were_sent(number: float) -> None:
    (made,) = plain_messages(
        messages(
            {"role": "assistant", "tool_calls": [call("1", f'{{"a": ["{number}", {number}]}}')]}
        )
    )
    assert made["tool_calls"][0]["function"]["arguments"] == {"a": [str(number), number]}


TEXT, REFUSED = {"type": "text", "text": "Well."}, {"type": "refusal", "refusal": "I do not."}
THOUGHT = {"type": "thinking", "thinking": "May I?", "signature": "x"}


@pytest.mark.parametrize(
    ("fields", "content", "reasoning"),
    [
        ({"content": [TEXT, REFUSED]}, "Well.\nI do not.", None),
        ({"content": None, "refusal": "I do not."}, "I do not.", None),
        ({"content": "Well.", "refusal": None}, "Well.", None),
        ({"content": "Well.", "refusal": "I do not."}, "Well.", None),
        ({"content": [THOUGHT, TEXT]}, "Well.", "May I?"),
        ({"content": [THOUGHT, {"type": "reasoning", "reasoning": "No."}]}, "", "May I?\nNo."),
        ({"content": [{"type": "reasoning", "text": "No."}, REFUSED]}, "I do not.", "No."),
        ({"content": [THOUGHT, TEXT], "reasoning_content": "Hm."}, "Well.", "Hm."),
        ({"content": [THOUGHT, TEXT], "reasoning": "Hm."}, "Well.", "Hm."),
        ({"content": [{**THOUGHT, "thinking": ""}, TEXT]}, "Well.", None),
        ({"content": "Well.", "reasoning": {"of": "another server"}}, "Well.", None),
    ],
)
def test_refusals_are_text_and_thoughts_are_reasoning(
    fields: JsonObject, content: str, reasoning: str | None
) -> None:
    (made,) = plain_messages(messages({"role": "assistant", **fields}))
    expected = {"role": "assistant", "content": content}
    assert made == (expected if reasoning is None else {**expected, "reasoning_content": reasoning})


def test_a_call_may_be_answered_later_and_twice() -> None:
    made = plain_messages(
        messages(
            {"role": "assistant", "content": "x", "tool_calls": [call("1"), call("2")]},
            {"role": "tool", "content": "a", "tool_call_id": "2"},
            {"role": "user", "content": "and?"},
            {"role": "tool", "content": "b", "tool_call_id": "1"},
        )
    )
    assert [each["role"] for each in made] == ["assistant", "tool", "user", "tool"]


CALLED = {"role": "assistant", "tool_calls": [call()]}


@pytest.mark.parametrize(
    ("given", "field", "word"),
    [
        ([{"role": "user"}], "messages[0].content", "missing"),
        ([{"role": "system", "content": None}], "messages[0].content", "missing"),
        ([CALLED, {"role": "tool", "tool_call_id": "1"}], "messages[1].content", "missing"),
        ([CALLED, {"role": "tool", "content": "x"}], "messages[1].tool_call_id", "add the id"),
        (
            [CALLED, {"role": "tool", "content": "x", "tool_call_id": "2"}],
            "messages[1].tool_call_id",
            "call '2'",
        ),
        (
            [{"role": "tool", "content": "x", "tool_call_id": "1"}, CALLED],
            "messages[0].tool_call_id",
            "before",
        ),
        (
            [{"role": "user", "content": "x", "tool_calls": [call()]}],
            "messages[0].tool_calls",
            "only an assistant",
        ),
        *(
            (
                [{"role": "user", "content": "x", name: "thought"}],
                f"messages[0].{name}",
                "only an assistant",
            )
            for name in ("reasoning_content", "reasoning", "refusal")
        ),
    ],
)
def test_messages_that_make_no_sense(given: list[JsonObject], field: str, word: str) -> None:
    with pytest.raises(InvalidRequest, match=word) as refused:
        plain_messages(messages(*given))
    assert refused.value.field == field


def tool(name: str = "f", **fields: Json) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, **fields}})


def test_tools_for_templates() -> None:
    schema = {"type": "object", "properties": {"b": {"enum": [None, 1]}, "a": {}}}
    assert plain_tools(
        [tool("f", description="d", parameters=schema, strict=False), tool("g")]
    ) == [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}},
        {
            "type": "function",
            "function": {"name": "g", "parameters": {"type": "object", "properties": {}}},
        },
    ]


@pytest.mark.parametrize(
    ("tools", "field", "word"),
    [
        ([tool("f"), tool("g"), tool("f")], "tools[2].function.name", "two tools 'f'"),
    ],
)
def test_tools_that_cannot_be_served(tools: list[Tool], field: str, word: str) -> None:
    with pytest.raises(InvalidRequest, match=word) as refused:
        plain_tools(tools)
    assert refused.value.field == field
