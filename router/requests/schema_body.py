"""The base of all request models: fields that are refused, dropped or bounded.

Fields of OpenAI's and vLLM's APIs that are not served are neutral at the values at which they
request nothing. Such a value is dropped; any other is refused by name. Labels and hints that change
no answer are neutral at every value of their type. Knows no request. Stateless.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

Neutral = Mapping[str, Callable[[Any], bool]]


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value == known and type(value) is type(known) for known in values)


def _a(kind: type) -> Callable[[Any], bool]:
    return lambda value: value is None or type(value) is kind


_NULL = _one_of(None)
_EMPTY = _one_of(None, [], {})
_OFF = _one_of(None, False)
_ON = _one_of(None, True)
_ANY_BOOL = _one_of(None, True, False)

# of everything that renders a chat template
PROMPT_FIELDS: Neutral = {
    "add_generation_prompt": _ON,
    "chat_template": _NULL,
    "chat_template_kwargs": _EMPTY,
    "continue_final_message": _OFF,
    "documents": _EMPTY,
    "mm_processor_kwargs": _EMPTY,
}

GENERATION_FIELDS: Neutral = {
    **PROMPT_FIELDS,
    "allowed_token_ids": _EMPTY,
    "audio": _EMPTY,
    "bad_words": _EMPTY,
    "best_of": _one_of(None, 1),
    "early_stopping": _OFF,
    "echo": _OFF,
    "function_call": _one_of(None, "none", "auto"),
    "functions": _EMPTY,
    "guided_choice": _NULL,
    "guided_decoding_backend": _NULL,
    "guided_grammar": _NULL,
    "guided_json": _NULL,
    "guided_regex": _NULL,
    "guided_whitespace_pattern": _NULL,
    "include_reasoning": _ANY_BOOL,  # a completion's text is whole
    "include_stop_str_in_output": _OFF,
    "kv_transfer_params": _EMPTY,
    "length_penalty": _one_of(None, 1, 1.0),
    "logits_processors": _EMPTY,
    "metadata": _a(dict),
    "modalities": _one_of(None, ["text"]),
    "parallel_tool_calls": _ANY_BOOL,  # means nothing without tools
    "prediction": _a(dict),  # a hint of what the answer may be
    "priority": _one_of(None, 0),
    "prompt_cache_key": _a(str),
    "prompt_cache_retention": _a(str),
    "reasoning_effort": _NULL,
    "response_format": _one_of(None, {"type": "text"}),
    "return_tokens_as_token_ids": _OFF,
    "safety_identifier": _a(str),
    "service_tier": _one_of(None, "auto", "default"),
    "skip_special_tokens": _ON,
    "spaces_between_special_tokens": _ON,
    "store": _OFF,
    "suffix": _one_of(None, ""),
    "tool_choice": _one_of(None, "none", "auto"),
    "tools": _EMPTY,
    "truncate_prompt_tokens": _NULL,
    "use_beam_search": _OFF,
    "verbosity": _one_of(None, "medium"),
    "vllm_xargs": _EMPTY,
    "web_search_options": _NULL,
}

CHAT_FIELDS: Neutral = {**GENERATION_FIELDS, "add_special_tokens": _OFF}
COMPLETION_FIELDS: Neutral = {**GENERATION_FIELDS, "add_special_tokens": _ON}
STREAM_FIELDS: Neutral = {"include_obfuscation": _ANY_BOOL}  # whether chunks are padded
TOKENIZE_FIELDS: Neutral = {**PROMPT_FIELDS, "return_token_strs": _OFF}
PART_FIELDS: Neutral = {"cache_control": _a(dict)}


UNSUPPORTED = "unsupported"  # the type of the error; its context names the field
MAX_FIELDS = 128  # of one object
MAX_DEPTH = 32  # of lists and objects in a schema, or in variables of a template
MAX_SCHEMA_VALUES = 8192  # of one function, or of one answer
MAX_VALUES = 1 << 16  # commas in a body


def at_most(entries: int, what: str) -> Callable[[Any], Any]:
    """Return a validator that refuses a larger object before its entries are read."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > entries:
            raise PydanticCustomError("too_long", f"give at most {entries} {what}")
        return value

    return check


def count_values(value: Any) -> int:
    """Return the number of values, nested ones included. Refuse nesting too deep for a template."""
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


few_fields = at_most(MAX_FIELDS, "fields")


class Body(BaseModel):
    """A request model. `neutral` maps fields that are not served to the values that are dropped."""

    # An error's text holds no input, so that a traceback in the log has no text of a client.
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)
    max_values: ClassVar[int] = MAX_VALUES
    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, value: Any) -> Any:
        """Return the object without unknown fields that request nothing."""
        few_fields(value)
        known = _names_of(cls)
        if not isinstance(value, dict) or known.issuperset(value):
            return value
        kept = {}
        for name, given in value.items():
            if name in known or not (given is None or name in cls.neutral):
                kept[name] = given
            elif given is not None and not cls.neutral[name](given):
                raise PydanticCustomError(UNSUPPORTED, "it is not supported", {"field": name})
        return kept


@cache
def _names_of(shape: type[Body]) -> frozenset[str]:
    """Return the fields of `shape` by the names that clients write."""
    return frozenset(field.alias or name for name, field in shape.model_fields.items())
