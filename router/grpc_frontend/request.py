"""Turns a gRPC client's message into the models that the request validator checks.

Fields have the names and meaning of the HTTP API, so both front ends refuse the same values by the
same names. This module holds the differences: token ids have a field of their own, `logprobs` is a
number for chats too, and JSON objects are sent as text. Knows no call. Stateless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic import Field

from baton.proto import client_pb2
from baton.router.requests.loop_budget import LoopBudget
from baton.router.requests.openai_schema import (
    MAX_BIAS,
    MAX_TOKEN_VALUES,
    Alternatives,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    Tokens,
)
from baton.router.requests.prompt_limits import ContextLimits
from baton.router.requests.request_parser import check_counts, parse_fields
from baton.router.requests.request_trace import Mark, unmarked
from baton.router.requests.schema_body import MAX_VALUES
from baton.router.requests.validated_request import ValidatedRequest
from baton.router.requests.validator import Validator
from baton.runtime.errors import InvalidRequest

MAX_MESSAGES = 1 << 14  # nested ones included: a tool call counts as two
_SOURCES = ("prompt", "prompt_tokens", "messages")
_VARIABLES = "chat_template_kwargs"  # as text, like the parameters of a tool


class TokenCompletionRequest(CompletionRequest):
    prompt: Tokens = Field(alias="prompt_tokens")


class GrpcChatRequest(ChatRequest):
    logprobs: bool | None = Field(None, alias="with_logprobs")  # not a field of the message
    top_logprobs: Alternatives | None = Field(None, alias="logprobs")


async def generate_request(
    message: client_pb2.GenerateRequest,
    validator: Validator,
    limits: ContextLimits,
    mark: Mark = unmarked,
) -> ValidatedRequest:
    """Validate the message. Raises InvalidRequest, naming the field as the message does. `mark` is
    called after it was parsed, and as `Validator.chat` does."""
    sent = await validator.turns.run(0, _fields, message)
    sources = [name for name in _SOURCES if name in sent]
    if len(sources) != 1:
        raise InvalidRequest(f"give one of {', '.join(_SOURCES)}", "prompt")
    if sources == ["messages"]:
        sent["with_logprobs"] = "logprobs" in sent
        _name_tool(sent)
        chat = await validator.turns.run(0, parse_fields, sent, GrpcChatRequest)
        mark("parse")
        return await validator.chat(chat, limits, mark)
    request_type = CompletionRequest if sources == ["prompt"] else TokenCompletionRequest
    completion = await validator.turns.run(0, parse_fields, sent, request_type)
    mark("parse")
    return await validator.completion(completion, limits, sources[0], mark)


async def tokenize_request(
    message: client_pb2.TokenizeRequest, turns: LoopBudget
) -> TokenizeRequest:
    sent = await turns.run(0, _fields, message)
    return await turns.run(0, parse_fields, sent, TokenizeRequest)


async def detokenize_request(
    message: client_pb2.DetokenizeRequest, turns: LoopBudget
) -> DetokenizeRequest:
    sent = {"tokens": [], **await turns.run(0, _fields, message)}
    return await turns.run(0, parse_fields, sent, DetokenizeRequest)


def _name_tool(sent: dict[str, Any]) -> None:
    """Put the named tool where HTTP has it. Raises InvalidRequest beside a tool_choice."""
    name = sent.pop("tool_choice_function", None)
    if name is None:
        return
    if "tool_choice" in sent:
        raise InvalidRequest(
            "tool_choice and tool_choice_function: give one", "tool_choice_function"
        )
    sent["tool_choice"] = {"type": "function", "function": {"name": name}}


def _fields(message: Message) -> dict[str, Any]:
    """Return the message's fields by name. Raises InvalidRequest for an unknown field, and for so
    many values that reading them would delay the other requests."""
    sent = _FieldReader().fields(message)
    texts = {
        f"tools[{index}].function.parameters": (tool["function"], "parameters")
        for index, tool in enumerate(sent.get("tools", ()))
        if "parameters" in tool.get("function", ())
    }
    if _VARIABLES in sent:
        texts[_VARIABLES] = sent, _VARIABLES
    check_counts(MAX_VALUES, *(holder[name].encode() for holder, name in texts.values()))
    for field, (holder, name) in texts.items():
        try:
            holder[name] = orjson.loads(holder[name])
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(
                f"{field} is no JSON: send a JSON object as text", field
            ) from error
    return sent


class _FieldReader:
    """Reads one message with all nested ones. Too many values are refused before they are
    copied."""

    def __init__(self) -> None:
        self._left = MAX_MESSAGES

    def fields(self, message: Message) -> dict[str, Any]:
        unknown = UnknownFieldSet(message)
        if len(unknown):
            raise InvalidRequest(
                f"field number {unknown[0].field_number} of {message.DESCRIPTOR.name} is not "
                "known: leave it out"
            )
        return {field.name: self._value(field.name, value) for field, value in message.ListFields()}

    def _value(self, name: str, value: Any) -> Any:
        if isinstance(value, Message):
            self._count(1)
            return self.fields(value)
        if isinstance(value, str | bytes) or not isinstance(value, Mapping | Sequence):
            return value
        if isinstance(value, Mapping):
            if len(value) > MAX_BIAS:
                raise InvalidRequest(f"{name}: give at most {MAX_BIAS} tokens", name)
            return {str(key): entry for key, entry in value.items()}
        if isinstance(value[0], Message):
            self._count(len(value))
            return [self.fields(entry) for entry in value]
        if len(value) > MAX_TOKEN_VALUES:
            raise InvalidRequest(f"{name} has over {MAX_TOKEN_VALUES} values: send fewer", name)
        return list(value)

    def _count(self, messages: int) -> None:
        self._left -= messages
        if self._left < 0:
            raise InvalidRequest(f"the message holds over {MAX_MESSAGES} others: send fewer")
