"""A gRPC message means what the HTTP body of the same names means, and is refused by the same
names and words."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson
import pytest
from google.protobuf.json_format import ParseDict

from baton.proto import client_pb2
from baton.router.grpc_frontend import request as grpc_request
from baton.router.grpc_frontend.request import (
    MAX_MESSAGES,
    detokenize_request,
    generate_request,
    tokenize_request,
)
from baton.router.requests.openai_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from baton.router.requests.prompt_limits import ContextLimits
from baton.router.requests.validated_request import ValidatedRequest
from baton.router.requests.validator import Validator
from baton.router.templates.chat_template import ChatTemplate
from baton.runtime.errors import InvalidRequest, NotFound
from baton.simulation.fleet.byte_tokenizer import ByteTokenizer
from tests.support.json_values import Json, JsonObject

LIMITS = ContextLimits(max_context=50, vocab_size=200)
TOOLS_TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %};{% endfor %}"
)


VALIDATOR = Validator("m", ByteTokenizer(), ChatTemplate(TOOLS_TEMPLATE, {}), frozenset({7}), 4)
ROOMY = ContextLimits(max_context=5000, vocab_size=200)


def tool(**fields: Json) -> JsonObject:
    return {"type": "function", "function": {"name": "f", **fields}}


def called(**fields: Json) -> list[JsonObject]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, **fields}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "1"},
    ]


USER = [{"role": "user", "content": "hi"}]


def message_of(body: JsonObject, shape: type[Any] = client_pb2.GenerateRequest) -> Any:
    """An HTTP body as a client of ours would write it: token ids and schemas where they belong,
    and logprobs as a count."""
    sent = json.loads(json.dumps({"model": "m", **body}))
    if isinstance(sent.get("prompt"), list):
        sent["prompt_tokens"] = sent.pop("prompt")
    if isinstance(sent.get("stop"), str):
        sent["stop"] = [sent["stop"]]
    if sent.pop("logprobs", None) is not None:
        sent["logprobs"] = sent.pop("top_logprobs", body["logprobs"])
    for each in sent.get("tools", ()):
        function = each.get("function", {})
        if "parameters" in function:
            function["parameters"] = json.dumps(function["parameters"])
    return ParseDict(sent, shape())


async def by_http(body: JsonObject, limits: ContextLimits = LIMITS) -> ValidatedRequest:
    raw = orjson.dumps({"model": "m", **body})
    if "messages" in body:
        return await VALIDATOR.chat(await VALIDATOR.parsed(raw, ChatRequest), limits)
    asked = await VALIDATOR.parsed(raw, CompletionRequest)
    return await VALIDATOR.completion(asked, limits)


async def by_grpc(body: JsonObject, limits: ContextLimits = LIMITS) -> ValidatedRequest:
    return await generate_request(message_of(body), VALIDATOR, limits)


SAMPLING: JsonObject = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "frequency_penalty": -0.5,
    "presence_penalty": 1.5,
    "logit_bias": {"7": -100.0, "9": 2.5},
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        SAMPLING,
        {"temperature": 0.0, "top_k": -1},
        {"max_tokens": 20, "n": 3, "stop": ["a", "b"], "stop_token_ids": [3, 5]},
        {"stop": "a", "ignore_eos": True},
        {"ignore_eos": False, "user": "someone", "cache_salt": "salt"},
    ],
    ids=lambda fields: ",".join(fields) or "none",
)
@pytest.mark.parametrize("source", [{"prompt": "ab"}, {"prompt": [1, 2, 3]}, {"messages": USER}])
@pytest.mark.parametrize("seed", [-(1 << 63), 0, 7])
async def test_what_both_take_means_the_same(
    source: JsonObject, fields: JsonObject, seed: int
) -> None:
    body = {**source, **fields, "seed": seed}
    assert await by_grpc(body) == await by_http(body)


@pytest.mark.parametrize("count", [0, 1, 20])
async def test_logprobs_are_a_count_for_prompts_and_chats(count: int) -> None:
    made = await by_grpc({"prompt": "ab", "logprobs": count, "seed": 1})
    assert made == await by_http({"prompt": "ab", "logprobs": count, "seed": 1})
    chat = {"messages": USER, "logprobs": True, "top_logprobs": count, "seed": 1}
    made = await by_grpc(chat)
    assert made == await by_http(chat)
    assert made.logprobs and made.sampling.top_logprobs == count
    assert not (await by_grpc({"messages": USER})).logprobs


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 1, "x": 1.0}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [tool(description="what", parameters=SCHEMA)]},
        {"tools": [tool(), {"type": "function", "function": {"name": "g"}}]},
        {"tools": [tool(strict=False)], "tool_choice": "auto", "parallel_tool_calls": False},
        {"tools": [tool()], "tool_choice": "none"},
        {"tool_choice": "none", "parallel_tool_calls": True},
        {"messages": called(), "tools": [tool()]},
        {"messages": [{"role": "user", "content": "hi", "name": "Ada"}]},
    ],
    ids=lambda fields: ",".join(fields),
)
async def test_chats_with_tools_mean_the_same(fields: JsonObject) -> None:
    body = {"messages": USER, "seed": 1, "max_tokens": 4, **fields}
    made = await by_grpc(body, ROOMY)
    assert made == await by_http(body, ROOMY)
    assert (made.calling is None) is ("tools" not in fields or fields.get("tool_choice") == "none")


# what both can say, and neither takes; the field as HTTP names it
REFUSED: list[tuple[JsonObject, str]] = [
    ({"prompt": "ab", "model": "other"}, "model"),
    ({"prompt": "a" * 60}, "prompt"),
    ({"prompt": "a" * 49}, "prompt"),
    ({"prompt": [1] * 60}, "prompt"),
    ({"prompt": [1, 199, 200]}, "prompt[2]"),
    ({"prompt": [1, 1 << 31]}, "prompt[1]"),
    ({"prompt": "ab", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "ab", "max_tokens": -1}, "max_tokens"),
    ({"prompt": [1], "max_tokens": 50}, "max_tokens"),
    ({"prompt": "ab", "max_tokens": (1 << 24) + 1}, "max_tokens"),
    ({"prompt": "ab", "n": 0}, "n"),
    ({"prompt": "ab", "n": 5}, "n"),
    ({"prompt": "ab", "n": 129}, "n"),
    ({"prompt": "ab", "stop": ["a", ""]}, "stop[1]"),
    ({"prompt": "ab", "stop": ["a" * 1025]}, "stop[0]"),
    ({"prompt": "ab", "stop": ["a"] * 17}, "stop"),
    ({"prompt": "ab", "stop_token_ids": [1] * 65}, "stop_token_ids"),
    ({"prompt": "ab", "stop_token_ids": [5, 300]}, "stop_token_ids[1]"),
    ({"prompt": "ab", "temperature": -0.1}, "temperature"),
    ({"prompt": "ab", "temperature": 2.1}, "temperature"),
    ({"prompt": "ab", "top_p": 0.0}, "top_p"),
    ({"prompt": "ab", "top_k": -2}, "top_k"),
    ({"prompt": "ab", "min_p": 1.1}, "min_p"),
    ({"prompt": "ab", "repetition_penalty": 0.0}, "repetition_penalty"),
    ({"prompt": "ab", "frequency_penalty": 3.0}, "frequency_penalty"),
    ({"prompt": "ab", "presence_penalty": -3.0}, "presence_penalty"),
    ({"prompt": "ab", "logit_bias": {"300": 1.0}}, "logit_bias.300"),
    ({"prompt": "ab", "logit_bias": {"7": 101.0}}, "logit_bias.7"),
    ({"prompt": "ab", "logit_bias": {str(n): 1.0 for n in range(1025)}}, "logit_bias"),
    ({"prompt": "ab", "logprobs": 21}, "logprobs"),
    ({"prompt": "ab", "logprobs": -1}, "logprobs"),
    ({"prompt": "ab", "user": "a" * 4097}, "user"),
    ({"prompt": "ab", "cache_salt": ""}, "cache_salt"),
    ({"prompt": "ab", "cache_salt": "a" * 1025}, "cache_salt"),
    ({"prompt": "ab", "tools": [tool()]}, "tools"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [*USER, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": called(id="2"), "tools": [tool()]}, "messages[2].tool_call_id"),
    (
        {"messages": called(function={"name": "f", "arguments": "[]"})},
        "messages[1].tool_calls[0].function.arguments",
    ),
    (
        {"messages": called(function={"name": "é", "arguments": "{}"})},
        "messages[1].tool_calls[0].function.name",
    ),
    ({"messages": called(type="other")}, "messages[1].tool_calls[0].type"),
    (
        {"messages": called(function={"name": "f", "arguments": "[" + "1," * 40_000 + "1]"})},
        "messages",
    ),
    ({"messages": USER, "tools": [tool(), tool()]}, "tools[1].function.name"),
    ({"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": USER, "tools": [tool(parameters=[1])]}, "tools[0].function.parameters"),
    (
        {"messages": USER, "tools": [tool(parameters={"type": "array"})]},
        "tools[0].function.parameters",
    ),
    (
        {"messages": USER, "tools": [tool(parameters={"a": [1] * 9000})]},
        "tools[0].function.parameters",
    ),
    ({"messages": USER, "tools": [tool()] * 129}, "tools"),
    ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
    ({"messages": USER, "structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"messages": USER, "response_format": {"type": "x"}}, "response_format.type"),
    ({"messages": USER, "max_tokens": 50}, "max_tokens"),
]


@pytest.mark.parametrize(
    ("body", "field"), REFUSED, ids=[f"{n}-{field}" for n, (_, field) in enumerate(REFUSED)]
)
async def test_what_both_refuse_is_refused_by_the_same_words(body: JsonObject, field: str) -> None:
    """But for the name of a prompt in token ids."""
    with pytest.raises(InvalidRequest) as http:
        await by_http(body)
    with pytest.raises(InvalidRequest) as grpc:
        await by_grpc(body)
    assert http.value.field == field and type(grpc.value) is type(http.value)
    if isinstance(body.get("prompt"), list):
        expected = re.sub(r"\bprompt\b", "prompt_tokens", str(http.value))
        assert grpc.value.field == field.replace("prompt", "prompt_tokens")
        assert str(grpc.value) == expected
    else:
        assert (grpc.value.field, str(grpc.value)) == (field, str(http.value))


@pytest.mark.parametrize("count", [-1, 21])
async def test_a_chats_logprobs_are_named_as_sent(count: int) -> None:
    with pytest.raises(InvalidRequest, match=r"^logprobs: it should be ") as refused:
        await generate_request(
            ParseDict({"model": "m", "messages": USER, "logprobs": count}, message()),
            VALIDATOR,
            LIMITS,
        )
    assert refused.value.field == "logprobs"


def message(**fields: Any) -> client_pb2.GenerateRequest:
    return client_pb2.GenerateRequest(**fields)


@pytest.mark.parametrize(
    ("sent", "field", "word"),
    [
        (message(prompt="a"), "model", "missing"),
        (message(model="m"), "prompt", "prompt, prompt_tokens, messages"),
        (message(model="m", prompt="a", prompt_tokens=[1]), "prompt", "one of"),
        (message(model="m", temperature=float("nan"), prompt="a"), "temperature", "finite"),
        (message(model="m", temperature=float("inf"), prompt="a"), "temperature", "finite"),
        (message(model="m", logit_bias={7: float("nan")}, prompt="a"), "logit_bias.7", "finite"),
        (message(model="m", prompt="a", tool_choice="required"), "tool_choice", "not supported"),
    ],
)
async def test_what_http_cannot_say_is_refused_too(
    sent: client_pb2.GenerateRequest, field: str, word: str
) -> None:
    with pytest.raises(InvalidRequest, match=word) as refused:
        await generate_request(sent, VALIDATOR, LIMITS)
    assert refused.value.field == field


async def test_another_model_is_not_found() -> None:
    with pytest.raises(NotFound):
        await by_grpc({"prompt": "a", "model": "x"})


@pytest.mark.parametrize("text", ["", "{", "NaN", "{}}", '{"a": 1} x'])
async def test_a_schema_that_is_no_json_is_refused(text: str) -> None:
    sent = message(model="m", messages=[client_pb2.Message(role="user", content="a")])
    function = sent.tools.add(type="function").function
    function.name, function.parameters = "f", text
    with pytest.raises(InvalidRequest, match="JSON object as text") as refused:
        await generate_request(sent, VALIDATOR, LIMITS)
    assert refused.value.field == "tools[0].function.parameters"


async def test_schemas_are_counted_together_before_any_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unexpected(_: str) -> None:
        raise AssertionError("parsed")

    sent = message(model="m", messages=[client_pb2.Message(role="user", content="a")])
    for _ in range(3):
        sent.tools.add(type="function").function.parameters = "[" * 30_000
    monkeypatch.setattr(grpc_request.orjson, "loads", unexpected)
    with pytest.raises(InvalidRequest, match="90000 lists and objects"):
        await generate_request(sent, VALIDATOR, LIMITS)


async def test_unknown_fields_are_refused_at_any_depth() -> None:
    """A newer client asks for something: it gets an error, not an answer without it."""
    unknown = b"\xf8\x07\x01"  # field 127
    good = message(model="m", prompt="a").SerializeToString()
    sent = client_pb2.GenerateRequest.FromString(good + unknown)
    with pytest.raises(InvalidRequest, match="field number 127 of GenerateRequest"):
        await generate_request(sent, VALIDATOR, LIMITS)
    inner = client_pb2.Message(role="user", content="a").SerializeToString() + unknown
    chat = message(model="m").SerializeToString() + b"\x22" + bytes([len(inner)]) + inner
    sent = client_pb2.GenerateRequest.FromString(chat)
    with pytest.raises(InvalidRequest, match="field number 127 of Message"):
        await generate_request(sent, VALIDATOR, LIMITS)


async def test_very_many_values_are_refused_before_they_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = message(model="m", messages=[client_pb2.Message()] * (MAX_MESSAGES + 1))
    few = message(model="m", messages=[client_pb2.Message(role="user", content="a")])
    few.messages[0].tool_calls.add()
    biased = message(model="m", prompt="a", logit_bias=dict.fromkeys(range(1025), 1.0))
    monkeypatch.setattr(grpc_request, "MAX_TOKEN_VALUES", 100)
    for sent, word, field in (
        (many, f"over {MAX_MESSAGES} others", None),
        (biased, "give at most 1024 tokens", "logit_bias"),
        (message(model="m", prompt_tokens=[1] * 101), "over 100 values", "prompt_tokens"),
    ):
        with pytest.raises(InvalidRequest, match=word) as refused:
            await generate_request(sent, VALIDATOR, LIMITS)
        assert refused.value.field == field
    monkeypatch.setattr(grpc_request, "MAX_MESSAGES", 2)  # the call's function would be the third
    few.messages[0].tool_calls[0].function.name = "f"
    with pytest.raises(InvalidRequest, match="over 2 others"):
        await generate_request(few, VALIDATOR, LIMITS)


async def tokens(body: JsonObject) -> tuple[list[int], list[int]]:
    """By HTTP and by gRPC; the first error, if both raise it."""
    http = await VALIDATOR.parsed(orjson.dumps(body), TokenizeRequest)
    sent = message_of(body, client_pb2.TokenizeRequest)
    grpc = await tokenize_request(sent, VALIDATOR.turns)
    return await VALIDATOR.tokens(http, ROOMY), await VALIDATOR.tokens(grpc, ROOMY)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "ab", "model": "m"},
        {"prompt": "", "model": "m"},
        {"prompt": "ab", "add_special_tokens": False, "model": "m"},
        {"messages": USER, "tools": [tool(parameters=SCHEMA)], "model": "m"},
    ],
)
async def test_tokenizing_means_the_same(body: JsonObject) -> None:
    http, grpc = await tokens(body)
    assert http == grpc


async def test_tokenizing_takes_one_source() -> None:
    for sent in (
        client_pb2.TokenizeRequest(),
        client_pb2.TokenizeRequest(prompt="a", messages=[client_pb2.Message(role="user")]),
    ):
        with pytest.raises(InvalidRequest, match="either prompt or messages"):
            await VALIDATOR.tokens(await tokenize_request(sent, VALIDATOR.turns), LIMITS)
    with pytest.raises(NotFound):
        sent = client_pb2.TokenizeRequest(prompt="a", model="other")
        await VALIDATOR.tokens(await tokenize_request(sent, VALIDATOR.turns), LIMITS)


async def text_of(sent: client_pb2.DetokenizeRequest) -> str:
    return await VALIDATOR.text(await detokenize_request(sent, VALIDATOR.turns), LIMITS)


async def test_detokenizing_means_the_same() -> None:
    assert await text_of(client_pb2.DetokenizeRequest(tokens=b"abc")) == "abc"
    assert await text_of(client_pb2.DetokenizeRequest()) == ""
    http = await VALIDATOR.parsed(b'{"tokens": []}', DetokenizeRequest)
    assert await VALIDATOR.text(http, LIMITS) == ""
    with pytest.raises(InvalidRequest) as refused:
        await text_of(client_pb2.DetokenizeRequest(tokens=[1, 200]))
    assert refused.value.field == "tokens[1]"
