"""The shape of the OpenAI-compatible requests that are served: names, types and bounds.

Shapes only: what depends on the model (context, vocabulary, template) is `validation.py`'s.
A field that is neither here nor neutral in `NEUTRAL` is refused by name: nothing that a client
asks for is dropped in silence. Each list ends at its first fault and each object is small: the
event loop waits for this check, and millions of faults in one body would hold it for minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenLists = Annotated[list[Tokens], Field(fail_fast=True)]
Alternatives = Annotated[int, Field(ge=0, le=20)]  # told of each token
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
MAX_TOKENS = 1 << 24
MAX_FIELDS = 128  # of one object
MAX_BIAS = 1024
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_CALLS = 128  # of one message
MAX_DEPTH = 32  # of lists and objects in a schema, or in a call's arguments
MAX_SCHEMA_VALUES = 8192  # of one function
MOST_VALUES = 1 << 16  # commas in a body
MOST_TOKEN_VALUES = 1 << 20  # commas in one whose prompt may be token ids


def _at_most(entries: int, what: str) -> Callable[[Any], Any]:
    """Refuses a larger object before its entries are looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > entries:
            raise PydanticCustomError("too_long", f"give at most {entries} {what}")
        return value

    return check


def _one_prompt(value: Any) -> Any:
    if isinstance(value, list) and len(value) > 1 and isinstance(value[0], str | list):
        raise PydanticCustomError(
            "several_prompts",
            "it holds {count} prompts, send one request for each",
            {"count": len(value)},
        )
    return value


def _object_text(value: Any) -> Any:
    """Refuses arguments that are no JSON object; an empty text stands for no arguments."""
    if isinstance(value, str) and value.strip():
        try:
            found = orjson.loads(value)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise PydanticCustomError("no_object", "it should be the text of a JSON object")
        if value.count("[") + value.count("{") > MAX_DEPTH:  # else it cannot be too deep
            _count_values(found)
    return value


def _count_values(value: Any) -> int:
    """How many there are, one in the other. Refuses what is nested too deep for a template."""
    count, layer = 0, [value]
    for _ in range(MAX_DEPTH + 1):
        count += len(layer)
        nested = [each for each in layer if isinstance(each, dict | list)]
        if not nested:
            return count
        layer = [
            inner
            for each in nested
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    raise PydanticCustomError(
        "too_deep", "it is nested over {most} deep, make it flatter", {"most": MAX_DEPTH}
    )


def _schema(value: Any) -> Any:
    """Refuses what can be no JSON schema of a function's arguments: they are an object."""
    if not isinstance(value, dict):
        return value
    if value.get("type", "object") != "object":
        raise PydanticCustomError("no_object", 'its type should be "object"')
    if not isinstance(value.get("properties", {}), dict):
        raise PydanticCustomError("no_object", "its properties should be an object")
    if _count_values(value) > MAX_SCHEMA_VALUES:
        raise PydanticCustomError(
            "too_long", "give at most {most} values", {"most": MAX_SCHEMA_VALUES}
        )
    return value


def _unforced(value: Any) -> Any:
    if value == "required" or isinstance(value, dict):
        raise PydanticCustomError("forced", 'no call can be forced here, give "auto" or "none"')
    return value


_few_fields = _at_most(MAX_FIELDS, "fields")


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    most_values: ClassVar[int] = MOST_VALUES

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        return _few_fields(value)


class TextPart(Body):
    type: Literal["text"]
    text: str


FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


class FunctionCall(Body):
    name: FunctionName
    arguments: Annotated[str, BeforeValidator(_object_text)]


class ToolCall(Body):
    id: CallId
    type: Literal["function"]
    function: FunctionCall


class Message(Body):
    """One message of a chat, as sent and as clients echo it back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None
    tool_call_id: CallId | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(fail_fast=True, max_length=0)] | None = None


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class Function(Body):
    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any], BeforeValidator(_schema)] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]


ToolChoice = Annotated[Literal["none", "auto"], BeforeValidator(_unforced)]


class StreamOptions(Body):
    include_usage: bool | None = None


class Generation(Body):
    """What chat and completion requests share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: StopString | Annotated[list[StopString], Field(fail_fast=True, max_length=16)] | None = (
        None
    )
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=64)] | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Finite, Field(ge=1e-3, le=10)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[Finite, Field(ge=-100, le=100)]],
            BeforeValidator(_at_most(MAX_BIAS, "tokens")),
        ]
        | None
    ) = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    user: Annotated[str, Field(max_length=4096)] | None = None  # a label; nothing depends on it
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None


class ChatRequest(Generation):
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(Generation):
    most_values = MOST_TOKEN_VALUES
    prompt: Annotated[str | Tokens | Texts | TokenLists, BeforeValidator(_one_prompt)]
    logprobs: Alternatives | None = None


class TokenizeRequest(Body):
    """`prompt` or `messages`, one of the two."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Body):
    most_values = MOST_TOKEN_VALUES
    model: str | None = None
    tokens: Tokens


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value == known and type(value) is type(known) for known in values)


_EMPTY = _one_of(None, [], {})
_ANY_BOOL = _one_of(None, True, False)

# Fields of OpenAI's API that are not served, and the values at which they ask for nothing.
NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "audio": _EMPTY,
    "best_of": _one_of(None, 1),
    "echo": _one_of(None, False),
    "function_call": _one_of(None, "none", "auto"),
    "functions": _EMPTY,
    "metadata": _EMPTY,
    "modalities": _one_of(None, ["text"]),
    "parallel_tool_calls": _ANY_BOOL,  # means nothing without tools
    "prediction": _one_of(None),
    "prompt_cache_key": _one_of(None),
    "reasoning_effort": _one_of(None),
    "response_format": _one_of(None, {"type": "text"}),
    "safety_identifier": lambda value: value is None or isinstance(value, str),  # a label
    "service_tier": _one_of(None, "auto", "default"),
    "store": _one_of(None, False),
    "suffix": _one_of(None, ""),
    "tool_choice": _one_of(None, "none", "auto"),
    "tools": _EMPTY,
    "verbosity": _one_of(None),
    "web_search_options": _one_of(None),
}
