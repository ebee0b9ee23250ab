"""HTTP and gRPC have the same fields, but for those that docs/api.md lists with their reasons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from baton.proto import client_pb2
from baton.router.requests import constraint_schema, openai_schema
from baton.router.requests.schema_body import Body

API = Path(__file__).parents[2] / "docs" / "api.md"
MODELS: dict[str, tuple[type[Body], ...]] = {  # by the message with the same meaning
    "GenerateRequest": (openai_schema.ChatRequest, openai_schema.CompletionRequest),
    "Message": (openai_schema.Message,),
    "Tool": (openai_schema.Tool,),
    "Function": (openai_schema.Function,),
    "ToolCall": (openai_schema.ToolCall,),
    "FunctionCall": (openai_schema.FunctionCall,),
    "ResponseFormat": (constraint_schema.ResponseFormat,),
    "JsonSchema": (constraint_schema.JsonSchema,),
    "StructuredOutputs": (constraint_schema.StructuredOutputs,),
    "TokenizeRequest": (openai_schema.TokenizeRequest,),
    "DetokenizeRequest": (openai_schema.DetokenizeRequest,),
}


def http_fields(message: str) -> set[str]:
    """Return the fields as clients write them."""
    fields = [item for model in MODELS[message] for item in model.model_fields.items()]
    return {field.alias or name for name, field in fields}


def grpc_fields(message: str) -> set[str]:
    return set(client_pb2.DESCRIPTOR.message_types_by_name[message].fields_by_name)


def documented(front_end: str) -> list[str]:
    """Return the fields that the document gives to one front end alone."""
    rows = re.findall(rf"^\| (.+) \| {front_end} \| .+ \|$", API.read_text(), re.MULTILINE)
    return sorted(name for cell in rows for name in re.findall(r"`(\w+)`", cell))


def messages_below(message: str) -> set[str]:
    """Return the messages that a client's message may hold, and itself."""
    fields = client_pb2.DESCRIPTOR.message_types_by_name[message].fields
    kinds = {field.message_type for field in fields if field.message_type is not None}
    inner = {kind.name for kind in kinds if not kind.GetOptions().map_entry}
    return {message}.union(*map(messages_below, inner))


@pytest.mark.parametrize("front_end", ["HTTP", "gRPC"])
def test_fields_of_one_front_end_alone_are_documented(front_end: str) -> None:
    found = set[str]()
    for message in MODELS:
        ours, others = http_fields(message), grpc_fields(message)
        found |= ours - others if front_end == "HTTP" else others - ours
    assert documented(front_end) == sorted(found)


def test_every_message_that_clients_send_is_compared() -> None:
    sent = ("GenerateRequest", "TokenizeRequest", "DetokenizeRequest")
    assert set(MODELS) == set[str]().union(*map(messages_below, sent))
