"""Bad requests: each a clear refusal that names the field, at once, and no worker hears of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from baton.router.openai_schema import (
    NEUTRAL,
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
)
from baton.router.validation import parse
from baton.runtime.errors import InvalidRequest

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


def called(**fields: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, **fields}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [{"role": "user", "content": "hi"}, said]}


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"properties": value}
    return value


# (route, fields, status, param as the client wrote it, a word of the message)
REFUSED: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    (COMPLETE, {"model": "other"}, 404, "model", "'tiny'"),
    (COMPLETE, {"model": 3}, 400, "model", "string"),
    (COMPLETE, {"model": None}, 400, "model", "string"),
    (COMPLETE, {"prompt": ""}, 400, "prompt", "empty"),
    (COMPLETE, {"prompt": []}, 400, "prompt", "empty"),
    (COMPLETE, {"prompt": [[]]}, 400, "prompt", "empty"),
    (COMPLETE, {"prompt": ["a", "b"]}, 400, "prompt", "one request"),
    (COMPLETE, {"prompt": [1, -1]}, 400, "prompt[1]", "greater"),
    (COMPLETE, {"prompt": [1, 100_000]}, 400, "prompt[1]", "token id"),
    (COMPLETE, {"prompt": [[5, 99_999]]}, 400, "prompt[1]", "token id"),
    (COMPLETE, {"prompt": 5}, 400, "prompt", ""),
    (COMPLETE, {"prompt": [1, "a"]}, 400, "prompt[1]", ""),
    (COMPLETE, {"prompt": "fox " * 5000}, 400, "prompt", "shorten"),
    (COMPLETE, {"prompt": "x" * 3_000_000}, 400, "prompt", "shorten"),
    (COMPLETE, {"max_tokens": 0}, 400, "max_tokens", "greater"),
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
    (COMPLETE, {"logit_bias": {"99999": 1}}, 400, "logit_bias.99999", "token id"),
    (COMPLETE, {"logit_bias": {"7": 101}}, 400, "logit_bias.7", "less"),
    (COMPLETE, {"logprobs": 21}, 400, "logprobs", "less"),
    (COMPLETE, {"logprobs": True}, 400, "logprobs", "integer"),
    (COMPLETE, {"echo": True}, 400, "echo", "not supported"),
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
    (CHAT, tool(parameters=nested(40)), 400, "tools[0].function.parameters", "flatter"),
    (
        CHAT,
        tool(parameters={"enum": list(range(9000))}),
        400,
        "tools[0].function.parameters",
        "at most 8192",
    ),
    (CHAT, {"tool_choice": "required"}, 400, "tool_choice", '"auto"'),
    (CHAT, {"tool_choice": "perhaps"}, 400, "tool_choice", "'auto'"),
    (CHAT, {"tool_choice": ["auto"]}, 400, "tool_choice", "'auto'"),
    (
        CHAT,
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        400,
        "tool_choice",
        '"auto"',
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
    (CHAT, {"response_format": {"type": "json_object"}}, 400, "response_format", "not supported"),
    (CHAT, {"reasoning_effort": "high"}, 400, "reasoning_effort", "not supported"),
]


def good(route: str) -> dict[str, Any]:
    if route == CHAT:
        return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    return {"model": "tiny", "prompt": "hi"}


def check_error(reply: Any) -> dict[str, Any]:
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    return error


async def test_each_bad_field_is_named(router: Any) -> None:
    async with router() as running:
        for route, fields, status, param, word in REFUSED:
            reply = await running.http.post(route, json={**good(route), **fields})
            told = (route, str(fields)[:80], reply.text[:300])
            assert reply.status_code == status, told
            error = check_error(reply)
            assert error["param"] == param, told
            assert word in error["message"], told
            assert len(error["message"]) < 600, told
        assert not running.workers["decode-0"].seen("submit")


async def test_neutral_values_are_accepted(router: Any) -> None:
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
            for name, value in {**dict.fromkeys(NEUTRAL), **neutral}.items():
                body = {**good(route), "max_tokens": 1, name: value}
                reply = await running.http.post(route, json=body)
                assert reply.status_code == 200, (route, name, reply.text)
        roles = [{"role": r, "content": [{"type": "text", "text": "a"}]} for r in ("developer",)]
        echoed: dict[str, Any] = {
            "role": "assistant",
            "content": "b",
            "refusal": None,
            "annotations": [],
        }
        reply = await running.chat(messages=[*roles, echoed], max_tokens=1)
        assert reply.status_code == 200, reply.text


RAW: list[tuple[bytes, str]] = [
    (b"", "JSON"),
    (b"{", "JSON"),
    (b"[]", "object"),
    (b"null", "object"),
    (b'{"model":"tiny","prompt":"\xff\xfe"}', "JSON"),
    (b'{"model":"tiny","prompt":"\\ud800"}', "JSON"),
    (b'{"model":"tiny","prompt":"a","temperature":NaN}', "JSON"),
    (b'{"model":"tiny","prompt":"a","temperature":1e999}', "JSON"),
    (b"[" * 60_000, "JSON"),
    (b"[" * 100_000, "lists"),
    (b'{"a":' * 5000 + b"1" + b"}" * 5000, "JSON"),
]


async def test_bodies_that_are_no_request(router: Any) -> None:
    async with router() as running:
        for body, word in RAW:
            for route in (CHAT, COMPLETE, "/tokenize", "/detokenize"):
                reply = await running.http.post(route, content=body)
                assert reply.status_code == 400, (route, body[:40], reply.text)
                assert word in check_error(reply)["message"]


async def test_routes_and_methods(router: Any) -> None:
    async with router() as running:
        for method, path, status in (
            ("GET", "/v1/nothing", 404),
            ("POST", "/", 404),
            ("GET", CHAT, 405),
            ("DELETE", "/v1/models", 405),
            ("GET", "/v1/models/other", 404),
        ):
            reply = await running.http.request(method, path)
            assert reply.status_code == status, (method, path)
            check_error(reply)
        assert (await running.http.get("/v1/models/tiny")).json()["id"] == "tiny"
        assert "baton_requests_total" in (await running.http.get("/metrics")).text
        assert (await running.http.get("/version")).json()["version"]


async def test_large_bodies_are_refused(router: Any, fast_config: Any) -> None:
    async with router(config=replace(fast_config, max_body_bytes=4096)) as running:
        body = json.dumps({**good(COMPLETE), "user": "x" * 5000}).encode()
        declared = await running.http.post(COMPLETE, content=body)
        assert declared.status_code == 413
        assert "4096" in check_error(declared)["message"]

        async def chunked() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 500):
                yield body[start : start + 500]

        assert (await running.http.post(COMPLETE, content=chunked())).status_code == 413
        assert (await running.complete(max_tokens=1)).status_code == 200


async def test_the_default_limit_is_8_mib_to_the_byte(router: Any) -> None:
    limit = 8 << 20
    start, end = b'{"model": "tiny", "prompt": "', b'"}'
    async with router() as running:
        for route in (CHAT, COMPLETE):
            over = start + b"a" * (limit + 1 - len(start) - len(end)) + end
            refused = await running.http.post(route, content=over)
            assert refused.status_code == 413
            assert str(limit) in check_error(refused)["message"]
            whole = b"{" + b" " * (limit - 2) + b"}"
            assert (await running.http.post(route, content=whole)).status_code == 400
        assert (await running.complete(max_tokens=1)).status_code == 200


async def test_an_endless_body_is_refused_as_soon_as_the_limit_is_passed(
    router: Any, fast_config: Any
) -> None:
    async with router(config=replace(fast_config, max_body_bytes=4096)) as running:
        host, port = running.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        writer.write(b"1000\r\n" + b" " * 0x1000 + b"\r\n" + b"10\r\n" + b" " * 16 + b"\r\n")
        async with asyncio.timeout(20):  # the body never ends, the answer comes all the same
            assert b"413" in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_template_refusals_name_messages(router: Any) -> None:
    async with router() as running:
        body = {"messages": [{"role": "user", "content": "a"}]}
        assert (await running.http.post("/tokenize", json=body)).status_code == 200
        both = await running.http.post("/tokenize", json={**body, "prompt": "x"})
        assert both.status_code == 400
        text = "größer 🎉 <|im_start|>"
        tokens = (await running.http.post("/tokenize", json={"prompt": text})).json()["tokens"]
        back = await running.http.post("/detokenize", json={"tokens": tokens})
        assert back.json() == {"prompt": text}
        bad = await running.http.post("/detokenize", json={"tokens": [1, 99_999]})
        assert bad.status_code == 400 and check_error(bad)["param"] == "tokens[1]"


def minted(reply: Any) -> str:
    """What follows `req-`: 128 bits of the server's own."""
    return str(reply.headers["x-request-id"]).removeprefix("req-")


async def test_client_ids_are_labels_only(router: Any) -> None:
    async with router() as running:
        for label in ("mine-1", "x" * 500, "bad\tone"):
            reply = await running.http.get("/livez", headers={"x-request-id": label})
            assert reply.headers["x-request-id"].startswith("req-")
            assert len(reply.headers.get_list("x-request-id")) == 1
        asked = {minted(await running.http.get("/livez")) for _ in range(50)}
        assert len(asked) == 50 and all(len(bytes.fromhex(number)) == 16 for number in asked)


NAMES = st.sampled_from(
    sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *NEUTRAL})
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


def test_no_body_is_an_error_of_ours(router: Any) -> None:
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
        def ask(route: str, changes: dict[str, Any], start: bool) -> None:
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


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_neutral_table_refuses_something(name: str) -> None:
    assert NEUTRAL[name](None)
    assert not NEUTRAL[name](object())


# one fault repeated as often as a body can hold it: each must cost one complaint, not many
MANY = 10_000
REPEATED: list[tuple[type[Body], dict[str, Any]]] = [
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
    (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "image"}] * MANY}]}),
    (ChatRequest, {"messages": [{"role": "user", "annotations": [1] * MANY}]}),
    (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [{}] * MANY}]}),
    (ChatRequest, {"messages": [], "tools": [{}] * MANY}),
    (ChatRequest, {"messages": [], "tools": [{f"f{n}": 1 for n in range(MANY)}]}),
    (ChatRequest, {"messages": [], **tool(parameters={f"f{n}": 1 for n in range(MANY)})}),
    (DetokenizeRequest, {"tokens": [-1] * MANY}),
]


@pytest.mark.parametrize(("shape", "fields"), REPEATED)
def test_a_fault_that_is_repeated_is_found_once(shape: type[Body], fields: dict[str, Any]) -> None:
    body = json.dumps({"model": "tiny", **fields}).encode()
    with pytest.raises(InvalidRequest) as refused:
        parse(body, shape)
    fault = refused.value.__cause__
    assert isinstance(fault, ValidationError) and fault.error_count() <= 8


async def test_a_route_with_a_slash_too_many_is_unknown(router: Any) -> None:
    async with router() as running:
        reply = await running.http.post(f"{COMPLETE}/", json=good(COMPLETE))
        assert reply.status_code == 404 and COMPLETE in check_error(reply)["message"]
        reply = await running.http.put(COMPLETE, json=good(COMPLETE))
        assert (reply.status_code, check_error(reply)["code"]) == (405, "method_not_allowed")


async def test_more_tokens_than_the_context_are_not_detokenized(router: Any) -> None:
    async with router() as running:
        reply = await running.http.post("/detokenize", json={"tokens": [5] * 100_000})
        assert reply.status_code == 400 and check_error(reply)["param"] == "tokens"
