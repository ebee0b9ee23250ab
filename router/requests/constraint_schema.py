"""The fields by which a request constrains the form of its answer: OpenAI's `response_format`, and
vLLM's `structured_outputs`.

Shapes and bounds only; whether a grammar can be made of them is `grammars/`'s.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from baton.router.requests.schema_body import MAX_SCHEMA_VALUES, Body, count_values

MAX_CHOICES = 1024
MAX_PATTERN_CHARS = 8192
MAX_GRAMMAR_CHARS = 64 << 10
MAX_SCHEMA_CHARS = 128 << 10


def _schema(value: Any) -> Any:
    """Take a schema as an object, or as the text of one."""
    if isinstance(value, str):
        if len(value) > MAX_SCHEMA_CHARS:
            raise PydanticCustomError(
                "too_long", "give at most {most} characters", {"most": MAX_SCHEMA_CHARS}
            )
        try:
            value = orjson.loads(value)
        except ValueError as error:
            raise PydanticCustomError("no_schema", "it should be a JSON schema") from error
    if value is True:
        return {}
    if isinstance(value, dict) and count_values(value) > MAX_SCHEMA_VALUES:
        raise PydanticCustomError(
            "too_long", "give at most {most} values", {"most": MAX_SCHEMA_VALUES}
        )
    return value


Schema = Annotated[dict[str, Any], BeforeValidator(_schema)]
_Text = Annotated[str, Field(min_length=1, max_length=4096)]


class JsonSchema(Body):
    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None  # the answer is held to the schema with either value


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """One of the constraints; the other fields are vLLM's defaults."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_CHARS)] | None = None
    choice: (
        Annotated[list[_Text], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)] | None
    ) = None
    grammar: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)] | None = None
    disable_any_whitespace: bool | None = None  # JSON is compact with either value
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None
