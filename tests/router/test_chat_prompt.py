"""Chats with tools become a prompt or a refusal that names a field; nothing is ignored."""

from __future__ import annotations

import asyncio
import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.requests.chat_prompt import ChatPrompt
from baton.router.requests.loop_budget import LoopBudget
from baton.router.requests.openai_schema import ChatRequest
from baton.router.requests.request_parser import decode_body, parse_fields
from baton.router.templates.chat_template import ChatTemplate
from baton.router.text.call_form import CallableTools
from baton.router.text.call_forms import FORMS
from baton.runtime.config import ToolCalls
from baton.runtime.errors import InvalidRequest
from tests.support.json_values import Json, JsonObject

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TOLD = "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}" + PLAIN
ASKED = {"role": "user", "content": "hi"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_0123456789abcdef0123456789abcdef",
            "type": "function",
            "function": {"name": "f", "arguments": '{"far":[1, "two"]}'},
        }
    ],
}
ANSWERED = {
    "role": "tool",
    "content": "result",
    "tool_call_id": "call_0123456789abcdef0123456789abcdef",
}
TOOL = {"type": "function", "function": {"name": "f"}}


def prompt_of(source: str | None, setting: ToolCalls = "auto") -> ChatPrompt:
    return ChatPrompt("m", None if source is None else ChatTemplate(source, SPECIAL), setting)


def request(**fields: Json) -> ChatRequest:
    return parse_fields(
        decode_body(orjson.dumps({"model": "m", "messages": [ASKED], **fields})), ChatRequest
    )


def text_of(prompt: ChatPrompt, asked: ChatRequest) -> tuple[str, CallableTools | None]:
    tools, calling = prompt.tools(asked)
    plain = prompt.plain(asked.messages, tools)
    return asyncio.run(prompt.text(plain, tools, asked.chat_template_kwargs, LoopBudget())), calling


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral"])
def test_tools_calls_and_results_are_in_the_prompt(
    tool_templates: dict[str, str], name: str
) -> None:
    prompt = prompt_of(tool_templates[name])
    messages = [ASKED, CALLED, ANSWERED]
    text, calling = text_of(prompt, request(messages=messages, tools=[TOOL]))
    assert calling == CallableTools(FORMS[name], frozenset("f"), True, {"f": {}})
    assert '{"far": [1, "two"]}' in text and "result" in text and text.count('"f"') >= 2
    alone, calling = text_of(prompt, request(messages=messages))
    assert calling is None and '{"far": [1, "two"]}' in alone and "result" in alone
    assert len(alone) < len(text)


def test_arguments_as_a_text_where_the_template_wants_one(tool_templates: dict[str, str]) -> None:
    prompt = prompt_of(tool_templates["text"], "hermes")
    text, calling = text_of(prompt, request(messages=[ASKED, CALLED, ANSWERED], tools=[TOOL]))
    assert '<call>f<sep>{"far":[1,"two"]}<tool>result' in text
    assert calling == CallableTools(FORMS["hermes"], frozenset("f"), True, {"f": {}})


@pytest.mark.parametrize(
    ("source", "fields", "field", "word"),
    [
        (None, {}, "messages", "/v1/completions"),
        (None, {"tools": [TOOL]}, "messages", "/v1/completions"),
        (PLAIN, {"tools": [TOOL]}, "tools", "takes none"),
        (TOLD, {"tools": [TOOL]}, "tools", r"router\.tool_calls"),
        (TOLD, {"messages": [ASKED, CALLED]}, "messages[1].tool_calls", "takes no calls"),
        (
            TOLD,
            {"messages": [ASKED, CALLED, ANSWERED]},
            "messages[1].tool_calls",
            "takes no calls",
        ),
    ],
)
def test_what_the_template_would_ignore_is_refused(
    source: str | None, fields: JsonObject, field: str, word: str
) -> None:
    with pytest.raises(InvalidRequest, match=word) as refused:
        text_of(prompt_of(source), request(**fields))
    assert refused.value.field == field


def test_an_unused_tool_needs_no_template() -> None:
    text, calling = text_of(prompt_of(PLAIN), request(tools=[TOOL], tool_choice="none"))
    assert (text, calling) == ("<user>hi", None)


def test_none_tells_and_does_not_read() -> None:
    assert text_of(prompt_of(TOLD, "none"), request(tools=[TOOL])) == ("f;<user>hi", None)
    with pytest.raises(InvalidRequest, match="takes none"):
        text_of(prompt_of(PLAIN, "none"), request(tools=[TOOL]))


FINITE = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "properties", "items", "enum", "description", "x", "é"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": st.sampled_from(["f", "g", "get-it", "a b", ""])},
                optional={
                    "description": st.text(max_size=9) | JSON,
                    "parameters": st.dictionaries(st.sampled_from(["type", "properties"]), JSON)
                    | JSON,
                    "strict": JSON,
                },
            ),
        }
    ),
    max_size=3,
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.sampled_from(["1", "2", "call_1234", ""]),
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": st.sampled_from(["f", "g", ""]), "arguments": JSON.map(json.dumps)}
            ),
        }
    ),
    max_size=2,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system"])},
        optional={
            "content": st.none() | st.text(max_size=9),
            "tool_calls": CALLS,
            "tool_call_id": st.sampled_from(["1", "2", "call_1234"]),
        },
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_tools_and_messages_are_a_prompt_or_a_refusal(
    tool_templates: dict[str, str], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(tool_templates)))
    if name not in PROMPTS:
        PROMPTS[name] = prompt_of(tool_templates[name], "hermes")
    body = {
        "model": "m",
        "messages": data.draw(MESSAGES | st.just([ASKED, CALLED, ANSWERED])),
        "tools": data.draw(TOOLS),
        "tool_choice": data.draw(st.sampled_from([None, "auto", "none", "required"])),
    }
    try:
        text, calling = text_of(
            PROMPTS[name], parse_fields(decode_body(json.dumps(body).encode()), ChatRequest)
        )
    except InvalidRequest as error:
        assert error.field, str(error)
        assert len(str(error)) < 600
        return
    names = {tool["function"]["name"] for tool in body["tools"]}
    assert (calling is not None) == (bool(names) and body["tool_choice"] != "none")
    if calling is not None:
        assert calling.names == names
        if any(message["role"] == "user" for message in body["messages"]):  # Mistral's asks for one
            assert all(each in text for each in names)


PROMPTS: dict[str, ChatPrompt] = {}
