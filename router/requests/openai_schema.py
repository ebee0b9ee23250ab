"""The schema of the OpenAI-compatible requests that are served: names, types and bounds.

What depends on the model (context, vocabulary, template) is checked in `validator.py`. A field that
is neither here nor neutral (`schema_body.py`) is refused by name, unless it is null: no field
that a client sends is dropped silently. Clients send back what servers sent, so unknown fields of
an assistant's message are ignored. The check of a list ends at its first fault and each object is
small: the event loop waits for this check, and millions of faults in one body would block it for
minutes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from baton.router.requests.constraint_schema import ResponseFormat, StructuredOutputs
from baton.router.requests.schema_body import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    MAX_SCHEMA_VALUES,
    PART_FIELDS,
    STREAM_FIELDS,
    TOKENIZE_FIELDS,
    Body,
    at_most,
    count_values,
    few_fields,
)
from baton.router.text.call_arguments import read_arguments

MAX_PROMPTS = 128  # of one completion
Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenLists = Annotated[list[Tokens], Field(fail_fast=True)]
Alternatives = Annotated[int, Field(ge=0, le=20)]  # reported of each token
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
MAX_TOKENS = 1 << 24
MAX_BIAS = 1024
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_CALLS = 128  # of one message
MAX_VARIABLES = 32  # of a chat template
MAX_VARIABLE_VALUES = 1024  # in all of them
MAX_TOKEN_VALUES = 1 << 20  # commas in one whose prompt may be token ids


RESERVED_VARIABLES = {
    *("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"),
    *("tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length"),
    *("range", "dict", "namespace", "cycler", "joiner", "raise_exception", "strftime_now"),
}


def _few_prompts(value: Any) -> Any:
    several = isinstance(value, list) and value and isinstance(value[0], str | list)
    if several and len(value) > MAX_PROMPTS:
        raise PydanticCustomError("too_long", "give at most {most} prompts", {"most": MAX_PROMPTS})
    return value


def _object_text(value: Any) -> Any:
    """Refuse arguments that are no JSON object; an empty text stands for no arguments."""
    if isinstance(value, str) and value.strip():
        try:
            read_arguments(value)
        except ValueError as error:
            raise PydanticCustomError("no_object", "{fault}", {"fault": str(error)}) from error
    return value


def _schema(value: Any) -> Any:
    """Refuse a schema that does not describe an object: a function's arguments are one."""
    if not isinstance(value, dict):
        return value
    if value.get("type", "object") != "object":
        raise PydanticCustomError("no_object", 'its type should be "object"')
    if not isinstance(value.get("properties", {}), dict):
        raise PydanticCustomError("no_object", "its properties should be an object")
    required = value.get("required") or []
    if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
        raise PydanticCustomError("no_object", "its required should be a list of names")
    if count_values(value) > MAX_SCHEMA_VALUES:
        raise PydanticCustomError(
            "too_long", "give at most {most} values", {"most": MAX_SCHEMA_VALUES}
        )
    return value


def _variables(value: Any) -> Any:
    """Refuse names that a chat template gets from elsewhere, and very many values."""
    if not isinstance(value, dict):
        return value
    for name in value:
        if not (name.isascii() and name.isidentifier() and len(name) <= 64) or name[0] == "_":
            raise PydanticCustomError("no_name", "give names of letters, digits and underscores")
        if name in RESERVED_VARIABLES or name.endswith("_token"):
            raise PydanticCustomError(
                "reserved", "{name} is not a variable that a request sets", {"name": name}
            )
    if count_values(value) > MAX_VARIABLE_VALUES:
        raise PydanticCustomError(
            "too_long", "give at most {most} values", {"most": MAX_VARIABLE_VALUES}
        )
    return value


def _seed(value: Any) -> Any:
    """Refuse numbers over 64 bits, which JSON's parser rounds, with a message of their own."""
    if not isinstance(value, int | float) or (type(value) is int and -_SEEDS <= value < _SEEDS):
        return value
    raise PydanticCustomError("seed", "give a whole number from -2**63 to 2**63 - 1")


_SEEDS = 1 << 63


class TextPart(Body):
    neutral = PART_FIELDS
    type: Literal["text"]
    text: str


FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


class FunctionCall(Body):
    model_config = ConfigDict(extra="ignore")

    name: FunctionName
    arguments: Annotated[str, BeforeValidator(_object_text)]


class ToolCall(Body):
    model_config = ConfigDict(extra="ignore")

    id: CallId
    type: Literal["function"]
    function: FunctionCall


class Message(Body):
    """One message of a chat, as sent and as clients echo it back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = None  # of an assistant's message, like `tool_calls`
    reasoning: str | None = None  # another name of it
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None
    tool_call_id: CallId | None = None
    refusal: str | None = None  # of an assistant's message, in place of content
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(fail_fast=True, max_length=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_echoes(cls, value: Any) -> Any:
        """Drop what a server may have put beside the text and calls of an assistant's message."""
        if not isinstance(value, dict) or value.get("role") != "assistant":
            return value
        few_fields(value)
        kept = {name: value[name] for name in _ECHOED & value.keys()}
        if not isinstance(kept.get("reasoning"), str):
            kept.pop("reasoning", None)  # of another form, which other servers answer
        if isinstance(parts := kept.get("content"), list):
            kept["content"] = [_plain_part(part) for part in parts]
            if not (kept.get("reasoning_content") or kept.get("reasoning")):
                thoughts = [thought for thought in map(_thought, parts) if thought]
                kept["reasoning_content"] = "\n".join(thoughts) or None
        return kept


_ECHOED = Message.model_fields.keys() - {"annotations"}


def _plain_part(part: Any) -> Any:
    """Return a part of an assistant's message as text. Reasoning becomes an empty one, so that an
    error counts the parts as they were sent."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    if _thought(part) is not None:
        return {"type": "text", "text": ""}
    if part.get("type") != "text":
        return part
    return {name: part[name] for name in ("type", "text") if name in part}


def _thought(part: Any) -> str | None:
    """Return the text of a part that is reasoning, and None for any other."""
    if not isinstance(part, dict) or part.get("type") not in ("thinking", "reasoning"):
        return None
    text = part.get(part["type"], part.get("text"))
    return text if isinstance(text, str) else None


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


Variables = Annotated[
    dict[str, Any],
    BeforeValidator(_variables),
    BeforeValidator(at_most(MAX_VARIABLES, "variables")),
]


class NamedFunction(Body):
    name: FunctionName


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class StreamOptions(Body):
    neutral = STREAM_FIELDS
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """The fields that chat and completion requests share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: StopString | Annotated[list[StopString], Field(fail_fast=True, max_length=16)] | None = (
        None
    )
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=64)] | None = None
    ignore_eos: bool | None = None
    seed: Annotated[int, BeforeValidator(_seed)] | None = None
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
            BeforeValidator(at_most(MAX_BIAS, "tokens")),
        ]
        | None
    ) = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    prompt_logprobs: Alternatives | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: Annotated[str, Field(max_length=4096)] | None = None  # a label; nothing depends on it
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None


class ChatRequest(GenerationBody):
    neutral = CHAT_FIELDS
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    chat_template_kwargs: Variables | None = None  # such as enable_thinking
    reasoning_effort: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None


class CompletionRequest(GenerationBody):
    neutral = COMPLETION_FIELDS
    max_values = MAX_TOKEN_VALUES
    prompt: Annotated[str | Tokens | Texts | TokenLists, BeforeValidator(_few_prompts)]
    echo: bool | None = None
    logprobs: Alternatives | None = None


class TokenizeRequest(Body):
    """`prompt` or `messages`, one of the two."""

    neutral = TOKENIZE_FIELDS
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    chat_template_kwargs: Variables | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Body):
    max_values = MAX_TOKEN_VALUES
    model: str | None = None
    tokens: Tokens
