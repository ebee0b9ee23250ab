"""A gRPC client's message, as the shapes that the one validator checks.

Fields have the names of the HTTP API and mean the same, so both front ends refuse the same things
by the same names. Only what differs stands here: token ids have a field of their own, `logprobs`
is a count for chats too, and a schema is sent as text. Knows no call. Stateless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic import Field

from baton.proto import client_pb2
from baton.router.requests.context_limits import ContextLimits
from baton.router.requests.loop_budget import LoopBudget
from baton.router.requests.openai_schema import (
    MAX_BIAS,
    MOST_TOKEN_VALUES,
    MOST_VALUES,
    Alternatives,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    Tokens,
)
from baton.router.requests.request_parser import check_counts, shaped
from baton.router.requests.validated_request import ValidatedRequest
from baton.router.requests.validator import Validator
from baton.runtime.errors import InvalidRequest

MOST_MESSAGES = 1 << 14  # one in the other: a call of a tool is two
_SOURCES = ("prompt", "prompt_tokens", "messages")


class TokenPrompt(CompletionRequest):
    prompt: Tokens = Field(alias="prompt_tokens")


class CountingChat(ChatRequest):
    logprobs: bool | None = Field(None, alias="with_logprobs")  # no field of the message
    top_logprobs: Alternatives | None = Field(None, alias="logprobs")


async def generation_of(
    message: client_pb2.GenerateRequest, validator: Validator, limits: ContextLimits
) -> ValidatedRequest:
    """Raises InvalidRequest naming the field as the message has it."""
    sent = await validator.turns.run(0, _sent, message)
    sources = [name for name in _SOURCES if name in sent]
    if len(sources) != 1:
        raise InvalidRequest(f"give one of {', '.join(_SOURCES)}", "prompt")
    if sources == ["messages"]:
        sent["with_logprobs"] = "logprobs" in sent
        chat = await validator.turns.run(0, shaped, sent, CountingChat)
        return await validator.chat(chat, limits)
    shape = CompletionRequest if sources == ["prompt"] else TokenPrompt
    completion = await validator.turns.run(0, shaped, sent, shape)
    return await validator.completion(completion, limits, *sources)


async def tokenizing_of(message: client_pb2.TokenizeRequest, turns: LoopBudget) -> TokenizeRequest:
    sent = await turns.run(0, _sent, message)
    return await turns.run(0, shaped, sent, TokenizeRequest)


async def detokenizing_of(
    message: client_pb2.DetokenizeRequest, turns: LoopBudget
) -> DetokenizeRequest:
    sent = {"tokens": [], **await turns.run(0, _sent, message)}
    return await turns.run(0, shaped, sent, DetokenizeRequest)


def _sent(message: Message) -> dict[str, Any]:
    """What was sent, by names. Raises InvalidRequest for a field that is not known, and for so
    many values that to read them would hold up the other requests."""
    sent = _Reader().fields(message)
    functions = {
        f"tools[{place}].function.parameters": tool["function"]
        for place, tool in enumerate(sent.get("tools", ()))
        if "parameters" in tool.get("function", ())
    }
    check_counts(MOST_VALUES, *(function["parameters"].encode() for function in functions.values()))
    for field, function in functions.items():
        try:
            function["parameters"] = orjson.loads(function["parameters"])
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(
                f"{field}: it should be the text of a JSON object", field
            ) from error
    return sent


class _Reader:
    """Of one message, with all that lies in it. What is over its bounds is refused before it is
    copied."""

    def __init__(self) -> None:
        self._left = MOST_MESSAGES

    def fields(self, message: Message) -> dict[str, Any]:
        unknown = UnknownFieldSet(message)
        if len(unknown):
            raise InvalidRequest(
                f"field number {unknown[0].field_number} of {message.DESCRIPTOR.name} is not "
                "known here: leave it out"
            )
        return {field.name: self._value(field.name, value) for field, value in message.ListFields()}

    def _value(self, name: str, value: Any) -> Any:
        if isinstance(value, Message):
            self._take(1)
            return self.fields(value)
        if isinstance(value, str | bytes) or not isinstance(value, Mapping | Sequence):
            return value
        if isinstance(value, Mapping):
            if len(value) > MAX_BIAS:
                raise InvalidRequest(f"{name}: give at most {MAX_BIAS} tokens", name)
            return {str(key): entry for key, entry in value.items()}
        if isinstance(value[0], Message):
            self._take(len(value))
            return [self.fields(entry) for entry in value]
        if len(value) > MOST_TOKEN_VALUES:
            raise InvalidRequest(f"{name} has over {MOST_TOKEN_VALUES} values: send fewer", name)
        return list(value)

    def _take(self, messages: int) -> None:
        self._left -= messages
        if self._left < 0:
            raise InvalidRequest(f"the message holds over {MOST_MESSAGES} others: send fewer")
