"""What clients send without requesting anything: nulls, neutral values, hints, and what servers
sent them. And what looks alike and requests something: refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from baton.router.text.tokenizer import HfTokenizer
from tests.support.json_values import Json, JsonObject
from tests.support.router_process import RunningRouter, StartRouter

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
HINTS: JsonObject = {
    "prompt_cache_key": "session-7",
    "prompt_cache_retention": "24h",
    "safety_identifier": "user-9",
    "metadata": {"trace": "a"},
    "prediction": {"type": "content", "content": "the quick brown fox"},
    "store": False,
    "service_tier": "auto",
    "verbosity": "medium",
    "chat_template_kwargs": {},
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "length_penalty": 1.0,
    "guided_json": None,
    "guided_regex": None,
    "use_beam_search": False,
    "a_field_of_next_year": None,
}
# (fields, param as the client wrote it)
REQUESTING: list[tuple[JsonObject, str]] = [
    ({"store": True}, "store"),
    ({"verbosity": "low"}, "verbosity"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"prompt_cache_key": 5}, "prompt_cache_key"),
    ({"metadata": "a"}, "metadata"),
    ({"a_field_of_next_year": 1}, "a_field_of_next_year"),
    ({"prediction": "a"}, "prediction"),
    ({"stream": True, "stream_options": {"include_obfuscation": 1}}, "stream_options."),
]
# a turn as LiteLLM and LangChain send back what servers sent them
ECHOED: JsonObject = {
    "role": "assistant",
    "content": [
        {"type": "text", "text": "yes", "cache_control": {"type": "ephemeral"}, "annotations": []}
    ],
    "reasoning_content": "the user said hi",
    "provider_specific_fields": {"refusal": None},
    "annotations": [{"type": "url_citation"}],
    "audio": None,
    "function_call": None,
    "index": 0,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "index": 0,
            "provider_specific_fields": {"a": 1},
            "function": {"name": "get_time", "arguments": "{}", "parsed_arguments": {}},
        }
    ],
}
REFUSAL: JsonObject = {"type": "refusal", "refusal": "I do not."}
THINKING: JsonObject = {"type": "thinking", "thinking": "May I?"}
ANSWERED: JsonObject = {"role": "tool", "tool_call_id": "call_1", "content": "12:00"}
ASKED: JsonObject = {"role": "user", "content": "hi"}
TIME: JsonObject = {"type": "function", "function": {"name": "get_time", "strict": None}}
NULL: JsonObject = {"a_field_of_next_year": None}
GET_TIME: JsonObject = {"name": "get_time"}
NAMED: JsonObject = {"type": "function", "function": GET_TIME}
SCHEMA: JsonObject = {"name": "a", "schema": {"type": "object", "properties": {}}}
FORM: JsonObject = {"type": "json_schema", "json_schema": SCHEMA}
CALLED: JsonObject = {"id": "call_1", "type": "function"}
CALLED |= {"function": {"name": "get_time", "arguments": "{}", **NULL}, **NULL}
# each object that a request holds, with an unknown null; and where one with a value is refused
NESTED: list[tuple[JsonObject, str | None]] = [
    ({"messages": [{**ASKED, **NULL}]}, "messages[0]"),
    ({"messages": [{"role": "system", "content": "a", **NULL}, ASKED]}, "messages[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **NULL}]}]},
        "messages[0].content[0]",
    ),
    ({"messages": [{**ECHOED, "tool_calls": [CALLED], **NULL}, ANSWERED]}, None),
    ({"messages": [{**ECHOED, "tool_calls": [CALLED]}, {**ANSWERED, **NULL}]}, "messages[1]"),
    ({"tools": [{**TIME, **NULL}]}, "tools[0]"),
    ({"tools": [{**TIME, "function": {**GET_TIME, **NULL}}]}, "tools[0].function"),
    ({"tools": [TIME], "tool_choice": {**NAMED, **NULL}}, "tool_choice"),
    (
        {"tools": [TIME], "tool_choice": {**NAMED, "function": {**GET_TIME, **NULL}}},
        "tool_choice.function",
    ),
    ({"stream": True, "stream_options": {"include_usage": True, **NULL}}, "stream_options"),
    ({"response_format": {**FORM, **NULL}}, "response_format"),
    (
        {"response_format": {**FORM, "json_schema": {**SCHEMA, **NULL}}},
        "response_format.json_schema",
    ),
    ({"structured_outputs": {"choice": ["a", "b"], **NULL}}, "structured_outputs"),
]


def with_value(part: Json) -> Json:
    """The same part of a request, in which the unknown fields are not null."""
    if isinstance(part, list):
        return [with_value(each) for each in part]
    if not isinstance(part, dict):
        return part
    return {name: 1 if name in NULL else with_value(each) for name, each in part.items()}


async def says(running: RunningRouter, folder: Path, text: str) -> None:
    """The text of the next answer."""
    tokenizer = HfTokenizer(folder / "tokenizer.json")
    running.workers["decode-0"].says = [await tokenizer.encode(text, add_special_tokens=False)]
    await tokenizer.close()


def body_of(route: str, **fields: Json) -> JsonObject:
    start = {"messages": [ASKED]} if route == CHAT else {"prompt": "the quick"}
    return {"model": "tiny", "max_tokens": 1, **start, **fields}


@pytest.mark.parametrize("route", [CHAT, COMPLETE])
async def test_neutral_values_and_hints_are_accepted(router: StartRouter, route: str) -> None:
    async with router() as running:
        plain = (await running.http.post(route, json=body_of(route, seed=1))).json()
        hinted = body_of(route, seed=1, **HINTS)
        hinted |= {"stream_options": None, "logprobs": None}
        reply = await running.http.post(route, json=hinted)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"] == plain["choices"]
        for padded in (False, True):
            options = {"include_obfuscation": padded}
            streamed = body_of(route, stream=True, stream_options=options)
            assert (await running.http.post(route, json=streamed)).status_code == 200


@pytest.mark.parametrize("route", [CHAT, COMPLETE])
@pytest.mark.parametrize(("fields", "param"), REQUESTING)
async def test_requests_for_unserved_features_are_refused(
    router: StartRouter, route: str, fields: JsonObject, param: str
) -> None:
    async with router() as running:
        reply = await running.http.post(route, json=body_of(route, **fields))
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["param"].startswith(param) and param in error["message"]
        assert not running.workers["decode-0"].seen("submit")


async def test_echoed_assistant_messages_are_accepted(
    router: StartRouter, tool_model: Callable[..., Path]
) -> None:
    """Neither their unknown fields nor those of calls and parts change the prompt."""
    called = {**ECHOED["tool_calls"][0], "function": {"name": "get_time", "arguments": "{}"}}
    called = {name: called[name] for name in ("id", "type", "function")}
    plain = {"role": "assistant", "content": "yes", "tool_calls": [called]}
    async with router(tool_model("hermes")) as running:
        tokens = []
        for said in (plain, ECHOED):
            asked = {"messages": [ASKED, said, ANSWERED], "tools": [TIME]}
            reply = await running.chat(max_tokens=1, **asked)
            assert reply.status_code == 200, reply.text
            found = await running.http.post("/tokenize", json={**asked, "return_token_strs": None})
            tokens.append(found.json()["tokens"])
        assert tokens[0] == tokens[1]


async def test_unknown_fields_of_other_messages_are_refused(router: StartRouter) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    async with router() as running:
        hinted = await running.chat(messages=[{"role": "user", "content": [part]}], max_tokens=1)
        assert hinted.status_code == 200, hinted.text
        for message, param in (
            ({**ASKED, "audio_url": "a"}, "messages[0].audio_url"),
            ({"role": "user", "content": [{**part, "image": "a"}]}, "messages[0].content[0].image"),
            ({**ASKED, "refusal": "no"}, "messages[0].refusal"),
            ({"role": "user", "content": [REFUSAL]}, "messages[0].content[0].type"),
            ({"role": "user", "content": [THINKING]}, "messages[0].content[0].type"),
            (
                {"role": "assistant", "content": [THINKING, {"type": "image_url"}]},
                "messages[0].content[1].type",
            ),
        ):
            reply = await running.chat(messages=[message])
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize(("fields", "path"), NESTED)
async def test_unknown_nulls_are_ignored_in_every_object(
    router: StartRouter, tool_model: Callable[..., Path], fields: JsonObject, path: str | None
) -> None:
    async with router(tool_model("hermes")) as running:
        reply = await running.chat(max_tokens=1, **fields)
        assert reply.status_code == 200, reply.text
        reply = await running.chat(max_tokens=1, **with_value(fields))
        if path is None:  # a server sent it
            assert reply.status_code == 200, reply.text
        else:
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == f"{path}.a_field_of_next_year"


async def test_calls_from_our_own_stream_can_be_sent_back(
    router: StartRouter, tool_model: Callable[..., Path]
) -> None:
    """Clients collect a stream's calls as they come, `index` and all."""
    folder = tool_model("hermes")
    async with (
        router(folder) as running,
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client,
    ):
        await says(
            running, folder, '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
        )
        fields: JsonObject = {"model": "tiny", "tools": [TIME]}
        collected: dict[int, JsonObject] = {}
        async for chunk in await client.chat.completions.create(
            messages=[ASKED],
            stream=True,
            **fields,
        ):
            for call in chunk.choices[0].delta.tool_calls or ():
                into = collected.setdefault(call.index, call.model_dump())
                into["function"]["arguments"] = call.function.arguments
        turn: JsonObject = {
            "role": "assistant",
            "content": None,
            "tool_calls": [*collected.values()],
        }
        answer: JsonObject = {
            "role": "tool",
            "tool_call_id": collected[0]["id"],
            "content": "12:00",
        }
        await says(running, folder, "noon")
        messages: Json = [ASKED, turn, answer]
        reply = await client.chat.completions.create(messages=messages, **fields)
        assert reply.choices[0].message.content == "noon"
