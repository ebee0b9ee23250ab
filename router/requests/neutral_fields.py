"""Fields of OpenAI's and vLLM's APIs that are not served, and the values at which they request
nothing.

Such a value is dropped; any other is refused by name. Labels and hints that change no answer are
neutral at every value of their type. Knows no shape. Stateless.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
    "prediction": _NULL,
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
STREAM_FIELDS: Neutral = {"include_obfuscation": _OFF}
TOKENIZE_FIELDS: Neutral = {**PROMPT_FIELDS, "return_token_strs": _OFF}
PART_FIELDS: Neutral = {"cache_control": _a(dict)}
