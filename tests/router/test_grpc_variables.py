"""Variables of the chat template by gRPC: a JSON object as text, which means the same by HTTP."""

from __future__ import annotations

import json

import orjson
import pytest

from baton.proto import client_pb2
from baton.router.grpc_frontend.request import generate_request, tokenize_request
from baton.router.requests.openai_schema import ChatRequest, TokenizeRequest
from baton.router.requests.prompt_limits import ContextLimits
from baton.router.requests.validated_request import ValidatedRequest
from baton.router.requests.validator import Validator
from baton.router.templates.chat_template import ChatTemplate
from baton.runtime.errors import InvalidRequest
from baton.simulation.fleet.byte_tokenizer import ByteTokenizer

LIMITS = ContextLimits(max_context=90, vocab_size=200)
TEMPLATE = "{{ messages[0].content }}{{ '' if enable_thinking is false else '<think>' }}{{ more }}"
VALIDATOR = Validator("m", ByteTokenizer(), ChatTemplate(TEMPLATE, {}), frozenset({7}), 4)
NAME = "chat_template_kwargs"


async def by_grpc(text: str) -> ValidatedRequest:
    said = [client_pb2.Message(role="user", content="hi")]
    sent = client_pb2.GenerateRequest(model="m", messages=said, seed=1, chat_template_kwargs=text)
    return await generate_request(sent, VALIDATOR, LIMITS)


async def by_http(text: str) -> ValidatedRequest:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "m", "messages": messages, "seed": 1, NAME: json.loads(text)}
    return await VALIDATOR.chat(await VALIDATOR.parsed(orjson.dumps(body), ChatRequest), LIMITS)


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("{}", "hi<think>"),
        ('{"enable_thinking": false}', "hi"),
        ('{"enable_thinking": true, "more": [1]}', "hi<think>[1]"),
    ],
)
async def test_variables_mean_the_same_by_http_and_grpc(text: str, prompt: str) -> None:
    made = await by_grpc(text)
    assert bytes(made.prompt).decode() == prompt
    assert made == await by_http(text)


async def test_a_tokenized_chat_has_its_variables() -> None:
    said = [client_pb2.Message(role="user", content="hi")]
    sent = client_pb2.TokenizeRequest(messages=said, chat_template_kwargs='{"more": 5}')
    asked = await tokenize_request(sent, VALIDATOR.turns)
    assert isinstance(asked, TokenizeRequest)
    assert bytes(await VALIDATOR.tokens(asked, LIMITS)).decode() == "hi<think>5"


@pytest.mark.parametrize("text", ["", "{", '{"a": 1} x'])
async def test_variables_that_are_no_json_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="JSON object as text") as refused:
        await by_grpc(text)
    assert refused.value.field == NAME


@pytest.mark.parametrize("text", ["[1]", '{"messages": []}', '{"a": ' + "[" * 40 + "]" * 40 + "}"])
async def test_variables_that_http_refuses_are_refused_alike(text: str) -> None:
    with pytest.raises(InvalidRequest) as http:
        await by_http(text)
    with pytest.raises(InvalidRequest) as grpc:
        await by_grpc(text)
    assert str(http.value.field).startswith(NAME)
    assert (grpc.value.field, str(grpc.value)) == (http.value.field, str(http.value))


async def test_variables_of_a_plain_prompt_are_refused() -> None:
    sent = client_pb2.GenerateRequest(model="m", prompt="a", chat_template_kwargs='{"a": 1}')
    with pytest.raises(InvalidRequest) as refused:
        await generate_request(sent, VALIDATOR, LIMITS)
    assert refused.value.field == NAME
