"""Bad requests: each a clear refusal that names the field, at once, and no worker hears of it."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from baton.router.requests.openai_schema import ChatRequest, CompletionRequest, DetokenizeRequest
from baton.router.requests.request_parser import MAX_PARTS_AND_CALLS, decode_body, parse_fields
from baton.router.requests.schema_body import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    TOKENIZE_FIELDS,
    Body,
    Neutral,
)
from baton.runtime.errors import InvalidRequest
from tests.support.json_values import Json, JsonObject
from tests.support.router_process import StartRouter

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"

TOOL: JsonObject = {"type": "function", "function": {"name": "f"}}


def tool(**fields: Json) -> JsonObject:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


def called(**fields: Json) -> JsonObject:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, **fields}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [{"role": "user", "content": "hi"}, said]}


def nested(depth: int) -> JsonObject:
    value: JsonObject = {}
    for _ in range(depth):
        value = {"properties": value}
    return value


# (route, fields, status, param as the client wrote it, a word of the message)
REFUSED: list[tuple[str, JsonObject, int, str | None, str]] = [
    (COMPLETE, {"model": "other"}, 404, "model", "'tiny'"),
    (COMPLETE, {"model": 3}, 400, "model", "string"),
    (COMPLETE, {"model": None}, 400, "model", "string"),
    (COMPLETE, {"prompt": ""}, 400, "prompt", "empty"),
    (COMPLETE, {"prompt": []}, 400, "prompt", "empty"),
    (COMPLETE, {"prompt": [[]]}, 400, "prompt", "empty"),
    (COMPLETE, {"prompt": ["a", ""]}, 400, "prompt[1]", "empty"),
    (COMPLETE, {"prompt": [[5], [5, 99_999]]}, 400, "prompt[1][1]", "token id"),
    (COMPLETE, {"prompt": ["a"] * 129}, 400, "prompt", "128"),
    (COMPLETE, {"prompt": [[5]] * 129}, 400, "prompt", "128"),
    (COMPLETE, {"prompt": [1, -1]}, 400, "prompt[1]", "greater"),
    (COMPLETE, {"prompt": [1, 100_000]}, 400, "prompt[1]", "token id"),
    (COMPLETE, {"prompt": [[5, 99_999]]}, 400, "prompt[1]", "token id"),
    (COMPLETE, {"prompt": 5}, 400, "prompt", ""),
    (COMPLETE, {"prompt": [1, "a"]}, 400, "prompt[1]", ""),
    (COMPLETE, {"prompt": "fox " * 5000}, 400, "prompt", "shorten"),
    (COMPLETE, {"prompt": "x" * 3_000_000}, 400, "prompt", "shorten"),
    (COMPLETE, {"max_tokens": 0}, 400, "max_tokens", "at least 1"),
    (COMPLETE, {"max_tokens": 5000}, 400, "max_tokens", "lower it"),
    (COMPLETE, {"max_tokens": 1 << 70}, 400, "max_tokens", "integer"),
    (COMPLETE, {"max_tokens": 1.5}, 400, "max_tokens", "integer"),
    (COMPLETE, {"max_tokens": True}, 400, "max_tokens", "integer"),
    (COMPLETE, {"max_tokens": "9"}, 400, "max_tokens", "integer"),
    (COMPLETE, {"temperature": -0.1}, 400, "temperature", "greater"),
    (COMPLETE, {"temperature": 2.1}, 400, "temperature", "less"),
    (COMPLETE, {"top_p": 0}, 400, "top_p", "greater"),
    (COMPLETE, {"top_k": -2}, 400, "top_k", "greater"),
    (COMPLETE, {"min_p": 1.01}, 400, "min_p", "less"),
    (COMPLETE, {"repetition_penalty": 0}, 400, "repetition_penalty", "greater"),
    (COMPLETE, {"repetition_penalty": 1e-9}, 400, "repetition_penalty", "greater"),
    (COMPLETE, {"prompt": [5] * 100_000}, 400, "prompt", "shorten"),
    (COMPLETE, {"logit_bias": {str(n): 1 for n in range(1025)}}, 400, "logit_bias", "1024"),
    (COMPLETE, {f"f{n}": 1 for n in range(200)}, 400, None, "128 fields"),
    (COMPLETE, {"f" * 10_000: 1}, 400, "f" * 200 + "...", "leave it out"),
    (COMPLETE, {"frequency_penalty": 3}, 400, "frequency_penalty", "less"),
    (COMPLETE, {"n": 0}, 400, "n", "greater"),
    (COMPLETE, {"n": 17}, 400, "n", "at most 16"),
    (COMPLETE, {"seed": 1 << 63}, 400, "seed", ""),
    (COMPLETE, {"stop": ""}, 400, "stop", "at least 1"),
    (COMPLETE, {"stop": ["a"] * 17}, 400, "stop", "at most 16"),
    (COMPLETE, {"stop": ["a", 3]}, 400, "stop[1]", "string"),
    (COMPLETE, {"stop_token_ids": [400_000]}, 400, "stop_token_ids[0]", "token id"),
    (COMPLETE, {"logit_bias": {"x": 1}}, 400, "logit_bias.x", "token id"),
    (COMPLETE, {"logit_bias": {"7": 1, "07": 2}}, 400, "logit_bias.07", "already"),
    (COMPLETE, {"prompt": {}}, 400, "prompt", "string"),
    (COMPLETE, {"stop": {}}, 400, "stop", "string"),
    (COMPLETE, {"": 1}, 400, None, "leave it out"),
    (CHAT, {"messages": [{"role": "user", "content": {}}]}, 400, "messages[0].content", "string"),
    ("/tokenize", {"tools": [TOOL]}, 400, "tools", "beside prompt"),
    (COMPLETE, {"logit_bias": {"99999": 1}}, 400, "logit_bias.99999", "token id"),
    (COMPLETE, {"logit_bias": {"7": 101}}, 400, "logit_bias.7", "less"),
    (COMPLETE, {"logprobs": 21}, 400, "logprobs", "less"),
    (COMPLETE, {"logprobs": True}, 400, "logprobs", "integer"),
    (COMPLETE, {"best_of": 2}, 400, "best_of", "not supported"),
    (COMPLETE, {"suffix": "x"}, 400, "suffix", "not supported"),
    (COMPLETE, {"stream_options": {"include_usage": True}}, 400, "stream_options", "stream"),
    (
        COMPLETE,
        {"stream": True, "stream_options": {"wat": 1}},
        400,
        "stream_options.wat",
        "leave it out",
    ),
    (COMPLETE, {"wat": 1}, 400, "wat", "leave it out"),
    (CHAT, {"messages": []}, 400, "messages", "at least 1"),
    (CHAT, {"messages": "hi"}, 400, "messages", "list"),
    (CHAT, {"messages": [{}]}, 400, "messages[0].role", "missing"),
    (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, 400, "messages[0].role", "system"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content", "missing"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, 400, "messages[0].content", ""),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        400,
        "messages[0].content[0].type",
        "text",
    ),
    (CHAT, {"logprobs": 3}, 400, "logprobs", "boolean"),
    (CHAT, {"top_logprobs": 3}, 400, "top_logprobs", "logprobs"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, 400, "max_tokens", "give one"),
    (COMPLETE, {"tools": [TOOL]}, 400, "tools", "not supported"),
    (COMPLETE, {"tool_choice": "required"}, 400, "tool_choice", "not supported"),
    (CHAT, {"structured_outputs": {"regex": ""}}, 400, "structured_outputs.regex", "character"),
    (CHAT, {"structured_outputs": {"choice": []}}, 400, "structured_outputs.choice", "1 item"),
    (CHAT, {"response_format": {"type": "json"}}, 400, "response_format.type", "json_object"),
    (CHAT, {"tools": [TOOL]}, 400, "tools", "chat template"),
    (CHAT, {"tools": TOOL}, 400, "tools", "list"),
    (CHAT, {"tools": [{"type": "function"}]}, 400, "tools[0].function", "missing"),
    (CHAT, {"tools": [TOOL, {**TOOL, "type": "custom"}]}, 400, "tools[1].type", "function"),
    (CHAT, {"tools": [TOOL] * 129}, 400, "tools", "at most 128"),
    (CHAT, tool(name="a b"), 400, "tools[0].function.name", "match"),
    (CHAT, tool(name="a" * 65), 400, "tools[0].function.name", "match"),
    (CHAT, tool(why=1), 400, "tools[0].function.why", "leave it out"),
    (CHAT, tool(description=1), 400, "tools[0].function.description", "string"),
    (CHAT, tool(parameters=[]), 400, "tools[0].function.parameters", "dictionary"),
    (CHAT, tool(parameters={"type": "string"}), 400, "tools[0].function.parameters", "object"),
    (CHAT, tool(parameters={"properties": []}), 400, "tools[0].function.parameters", "object"),
    *(
        (
            CHAT,
            tool(parameters={"required": required}, strict=True),
            400,
            "tools[0].function.parameters",
            "list of names",
        )
        for required in (5, "a", [[1]], [{"a": 1}], ["a", 1])
    ),
    (CHAT, tool(parameters=nested(40)), 400, "tools[0].function.parameters", "flatter"),
    (
        CHAT,
        tool(parameters={"enum": list(range(9000))}),
        400,
        "tools[0].function.parameters",
        "at most 8192",
    ),
    (CHAT, {"tool_choice": "required"}, 400, "tool_choice", "no tools"),
    (CHAT, {"tool_choice": "perhaps"}, 400, "tool_choice", "'auto'"),
    (CHAT, {"tool_choice": ["auto"]}, 400, "tool_choice", "'auto'"),
    (
        CHAT,
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        400,
        "tool_choice",
        "no tools",
    ),
    (CHAT, {"parallel_tool_calls": 1}, 400, "parallel_tool_calls", "boolean"),
    (CHAT, called(), 400, "messages[1].tool_calls", "chat template"),
    (CHAT, called(id=""), 400, "messages[1].tool_calls[0].id", "at least 1"),
    (CHAT, called(id="x" * 257), 400, "messages[1].tool_calls[0].id", "at most 256"),
    (CHAT, called(type="custom"), 400, "messages[1].tool_calls[0].type", "function"),
    *(
        (
            CHAT,
            called(function={"name": "f", "arguments": arguments}),
            400,
            "messages[1].tool_calls[0].function.arguments",
            word,
        )
        for arguments, word in [
            ("[]", "JSON object"),
            ("{", "JSON object"),
            ("7", "JSON object"),
            ('{"a": NaN}', "JSON object"),
            (json.dumps(nested(40)), "flatter"),
            ('{"a":' * 5000 + "1" + "}" * 5000, "JSON object"),
            ({}, "string"),
        ]
    ),
    (
        CHAT,
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
        400,
        "messages[0].tool_call_id",
        "before",
    ),
    (CHAT, {"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema", "add"),
    (CHAT, {"reasoning_effort": "high"}, 400, "reasoning_effort", "'tiny' reads no"),
    (CHAT, {"reasoning_effort": 3}, 400, "reasoning_effort", "string"),
    (COMPLETE, {"reasoning_effort": "high"}, 400, "reasoning_effort", "not supported"),
]


def good(route: str) -> JsonObject:
    if route == CHAT:
        return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    return {"model": "tiny", "prompt": "hi"}


def check_error(reply: httpx.Response) -> JsonObject:
    error: JsonObject = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    return error


async def test_each_bad_field_is_named(router: StartRouter) -> None:
    async with router() as running:
        for route, fields, status, param, word in REFUSED:
            reply = await running.http.post(route, json={**good(route), **fields})
            reported = (route, str(fields)[:80], reply.text[:300])
            assert reply.status_code == status, reported
            error = check_error(reply)
            assert error["param"] == param, reported
            assert word in error["message"], reported
            assert len(error["message"]) < 600, reported
        assert not running.workers["decode-0"].seen("submit")


async def test_neutral_values_are_accepted(router: StartRouter) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "best_of": 1,
        "suffix": "",
        "store": False,
        "service_tier": "auto",
        "metadata": {},
        "modalities": ["text"],
        "user": "someone",
        "seed": -5,
        "top_k": -1,
        "logit_bias": {"5": -100},
    }
    async with router() as running:
        for route in (CHAT, COMPLETE):
            for name, value in {**dict.fromkeys(CHAT_FIELDS), **neutral}.items():
                body = {**good(route), "max_tokens": 1, name: value}
                reply = await running.http.post(route, json=body)
                assert reply.status_code == 200, (route, name, reply.text)
        roles = [{"role": r, "content": [{"type": "text", "text": "a"}]} for r in ("developer",)]
        echoed: JsonObject = {
            "role": "assistant",
            "content": "b",
            "refusal": None,
            "annotations": [],
        }
        reply = await running.chat(messages=[*roles, echoed], max_tokens=1)
        assert reply.status_code == 200, reply.text


NAMES = st.sampled_from(
    sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *CHAT_FIELDS})
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 66), 1 << 66)
    | st.floats()
    | st.text(max_size=10)
    | st.sampled_from(["tiny", "user", "text", 1, 0.5])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "1", "é"]), inner)
    ),
    max_leaves=6,
)


def test_no_body_is_an_error_of_ours(router: StartRouter) -> None:
    """Whatever the body: 200 or a 4xx with an OpenAI body, and only a 200 reaches a worker."""
    with asyncio.Runner() as runner:
        scope = router()
        running = runner.run(scope.__aenter__())

        @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(
            route=st.sampled_from([CHAT, COMPLETE, "/tokenize", "/detokenize"]),
            changes=st.dictionaries(NAMES | st.text(max_size=8), VALUES, max_size=4),
            start=st.booleans(),
        )
        def ask(route: str, changes: JsonObject, start: bool) -> None:
            body = {**(good(route) if start else {}), "max_tokens": 1, **changes}
            if route in ("/tokenize", "/detokenize"):
                body.pop("max_tokens")
            before = len(running.workers["decode-0"].seen("submit"))
            try:
                raw = json.dumps(body).encode()
            except UnicodeEncodeError:
                return
            reply = runner.run(running.http.post(route, content=raw))
            assert reply.status_code in (200, 400, 404), (body, reply.text)
            if reply.status_code != 200:
                check_error(reply)
                assert len(running.workers["decode-0"].seen("submit")) == before

        try:
            ask()
        finally:
            runner.run(scope.__aexit__(None, None, None))


@pytest.mark.parametrize("fields", [CHAT_FIELDS, COMPLETION_FIELDS, TOKENIZE_FIELDS])
def test_neutral_fields_take_null_and_refuse_something(fields: Neutral) -> None:
    for neutral in fields.values():
        assert neutral(None) and not neutral(object())


def test_error_of_a_body_does_not_repeat_its_values() -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_fields({"model": "m", "prompt": "a", "user": ["secret"]}, CompletionRequest)
    fault = refused.value.__cause__
    assert isinstance(fault, ValidationError) and "secret" not in repr(fault)


# one fault repeated as often as a body can hold it: each must cost one complaint, not many
MANY = 10_000
REPEATED: list[tuple[type[Body], JsonObject]] = [
    (CompletionRequest, {"prompt": [-1] * MANY}),
    (CompletionRequest, {"prompt": [None] * MANY}),
    (CompletionRequest, {"prompt": [[None]] * MANY}),
    (CompletionRequest, {"prompt": [1, ""] * MANY}),
    (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}),
    (CompletionRequest, {"prompt": "a", "stop_token_ids": [-1] * MANY}),
    (CompletionRequest, {"prompt": "a", "logit_bias": {str(n): "x" for n in range(MANY)}}),
    (CompletionRequest, {"prompt": "a", **{f"f{n}": 1 for n in range(MANY)}}),
    (ChatRequest, {"messages": [{}] * MANY}),
    (ChatRequest, {"messages": [{f"f{n}": 1 for n in range(MANY)}]}),
    (
        ChatRequest,
        {"messages": [{"role": "user", "content": [{"type": "image"}] * MAX_PARTS_AND_CALLS}]},
    ),
    (ChatRequest, {"messages": [{"role": "user", "annotations": [1] * MANY}]}),
    (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [{}] * MAX_PARTS_AND_CALLS}]}),
    (ChatRequest, {"messages": [], "tools": [{}] * MANY}),
    (ChatRequest, {"messages": [], "tools": [{f"f{n}": 1 for n in range(MANY)}]}),
    (ChatRequest, {"messages": [], **tool(parameters={f"f{n}": 1 for n in range(MANY)})}),
    (DetokenizeRequest, {"tokens": [-1] * MANY}),
]


@pytest.mark.parametrize(("shape", "fields"), REPEATED)
def test_a_fault_that_is_repeated_is_found_once(shape: type[Body], fields: JsonObject) -> None:
    body = json.dumps({"model": "tiny", **fields}).encode()
    with pytest.raises(InvalidRequest) as refused:
        parse_fields(decode_body(body), shape)
    fault = refused.value.__cause__
    assert isinstance(fault, ValidationError) and fault.error_count() <= 8
