"""Describes the answers of the HTTP API, and the chunks of its streams, as JSON Schemas: components
of the OpenAPI document.

A field that an answer holds only if the request asked for it is not required. Knows no route.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def shape(required: Schema, optional: Schema | None = None) -> Schema:
    """Return the schema of an object with these properties."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": [*required]}


def reference(name: str) -> Schema:
    """Return the schema that refers to a component."""
    return {"$ref": f"#/components/schemas/{name}"}


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_LOGPROB: Schema = {"type": "number"}
_NULL: Schema = {"type": "null"}
_FINISH = _or_null({"enum": ["stop", "length", "tool_calls"]})
_CALL = shape(
    {
        "id": TEXT,
        "type": {"const": "function"},
        "function": shape({"name": TEXT, "arguments": TEXT}),
    }
)
_USAGE = shape(
    {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT},
    {
        "prompt_tokens_details": shape({"cached_tokens": _COUNT}),
        "completion_tokens_details": shape(
            {"accepted_prediction_tokens": _COUNT, "rejected_prediction_tokens": _COUNT}
        ),
    },
)
_USED: Schema = {"usage": _or_null(_USAGE)}  # of a chunk, with `stream_options`
_HEAD: Schema = {"id": TEXT, "created": _COUNT, "model": TEXT}
_MESSAGE = shape(
    {"role": {"const": "assistant"}, "content": _or_null(TEXT), "refusal": _NULL},
    {"reasoning_content": TEXT, "tool_calls": list_of(_CALL)},
)
_TOKEN: Schema = {"token": TEXT, "logprob": _LOGPROB, "bytes": list_of(_COUNT)}
_CHAT_LOGPROBS = shape(
    {
        "content": list_of(shape({**_TOKEN, "top_logprobs": list_of(shape(_TOKEN))})),
        "refusal": _NULL,
    }
)
_COMPLETION_LOGPROBS = shape(
    {
        "tokens": list_of(TEXT),
        "token_logprobs": list_of(_or_null(_LOGPROB)),
        "top_logprobs": list_of(
            _or_null({"type": "object", "additionalProperties": _or_null(_LOGPROB)})
        ),
        "text_offset": list_of(_COUNT),
    }
)
_DELTA = shape(  # the first has the role, the last nothing
    {},
    {
        "role": {"const": "assistant"},
        "content": _or_null(TEXT),
        "refusal": _NULL,
        "reasoning_content": TEXT,
        "tool_calls": list_of(  # a call's first part has its id and name, its second the arguments
            shape(
                {"index": _COUNT, "function": shape({"arguments": TEXT}, {"name": TEXT})},
                {"id": TEXT, "type": {"const": "function"}},
            )
        ),
    },
)
_TOKEN_IDS: Schema = {"token_ids": list_of(_COUNT)}  # with `return_token_ids`
_RANKED = shape({"logprob": _LOGPROB, "rank": _COUNT, "decoded_token": TEXT})
_OF_PROMPT: Schema = {  # with `return_token_ids` and `prompt_logprobs`
    "prompt_token_ids": list_of(_COUNT),
    "prompt_logprobs": list_of(_or_null({"type": "object", "additionalProperties": _RANKED})),
}
_TEXT_CHOICE = shape(
    {
        "index": _COUNT,
        "text": TEXT,
        "logprobs": _or_null(_COMPLETION_LOGPROBS),
        "finish_reason": _FINISH,
    },
    {**_TOKEN_IDS, **_OF_PROMPT},
)
COMPONENTS: Schema = {
    "Error": shape(
        {
            "error": shape(
                {"message": TEXT, "type": TEXT, "param": _or_null(TEXT), "code": _or_null(TEXT)}
            )
        }
    ),
    "ChatCompletion": shape(
        {
            **_HEAD,
            "object": {"const": "chat.completion"},
            "choices": list_of(
                shape(
                    {
                        "index": _COUNT,
                        "message": _MESSAGE,
                        "logprobs": _or_null(_CHAT_LOGPROBS),
                        "finish_reason": _FINISH,
                    },
                    _TOKEN_IDS,
                )
            ),
            "usage": _USAGE,
        },
        _OF_PROMPT,
    ),
    "Completion": shape(
        {
            **_HEAD,
            "object": {"const": "text_completion"},
            "choices": list_of(_TEXT_CHOICE),
            "usage": _USAGE,
        }
    ),
    "ChatCompletionChunk": shape(
        {
            **_HEAD,
            "object": {"const": "chat.completion.chunk"},
            "choices": list_of(  # empty in the last chunk, which has the usage
                shape(
                    {
                        "index": _COUNT,
                        "delta": _DELTA,
                        "logprobs": _or_null(_CHAT_LOGPROBS),
                        "finish_reason": _FINISH,
                    },
                    _TOKEN_IDS,
                )
            ),
        },
        {**_USED, "prompt_token_ids": list_of(_COUNT)},
    ),
    "CompletionChunk": shape(
        {
            **_HEAD,
            "object": {"const": "text_completion"},
            "choices": list_of(_TEXT_CHOICE),
        },
        _USED,
    ),
    "Tokens": shape({"count": _COUNT, "max_model_len": _COUNT, "tokens": list_of(_COUNT)}),
    "Text": shape({"prompt": TEXT}),
    "Model": shape(
        {
            "id": TEXT,
            "object": {"const": "model"},
            "created": _COUNT,
            "owned_by": TEXT,
            "root": TEXT,
            "parent": _NULL,
            "max_model_len": _COUNT,
        }
    ),
    "Models": shape({"object": {"const": "list"}, "data": list_of(reference("Model"))}),
    "Ready": shape({"status": {"const": "ready"}, "workers": {"type": "object"}}),
}
