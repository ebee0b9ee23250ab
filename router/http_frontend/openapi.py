"""The HTTP API as an OpenAPI document, made from the models that validate requests.

pydantic describes the requests, from `openai_schema.py`, so the document cannot promise a field
that is refused. The answers are described here. Knows no router. State: what
pydantic said.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from baton.router.http_frontend.routes import CHAT_PATH, COMPLETION_PATH, EXPLAIN
from baton.router.requests.deadline import HEADER
from baton.router.requests.openai_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from baton.router.requests.schema_body import Body

OPENAPI_PATH = "/openapi.json"
Schema = dict[str, Any]
_BODIES: dict[str, type[Body]] = {
    CHAT_PATH: ChatRequest,
    COMPLETION_PATH: CompletionRequest,
    CHAT_PATH + EXPLAIN: ChatRequest,
    COMPLETION_PATH + EXPLAIN: CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_TEXT: Schema = {"type": "string"}
_EVENT: Schema = {  # of a stream
    "type": "object",
    "properties": {"data": {"type": "string", "description": "a chunk as JSON, or [DONE]"}},
    "required": ["data"],
}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NULL: Schema = {"type": "null"}
_ABOUT = (
    "Fields that are not named here are refused by name, unless they change nothing: a null, or a "
    "value of OpenAI's or vLLM's APIs that has no effect on the answer. Requests that do not fit "
    "the model's context, vocabulary or chat template are refused with 400 too."
)
_ERRORS = {
    "400": "a bad field or body; `param` names the field",
    "401": "no API key, or a wrong one",
    "403": "a host name that is not allowed, or a web page from another host",
    "404": "another model, or no such route",
    "405": "another method",
    "408": "the body came too slowly",
    "413": "the body is too large",
    "429": "too many bytes of bodies, from this key or from all clients",
    "500": "an internal error; the router's log has the reason",
    "503": "overloaded, no worker, or stopping; `Retry-After` says when to retry",
    "504": "the deadline has passed",
}


def openapi_document(model: str, version: str, needs_key: bool) -> Schema:
    """Return the document of a router that serves `model`."""
    bodies, definitions = deepcopy(_requests())
    components = {**definitions, **_ANSWERS}
    for shape in _BODIES.values():
        found = components[shape.__name__]["properties"]["model"]
        for schema in found.get("anyOf", [found]):
            if schema["type"] == "string":
                schema["enum"] = [model]  # the only one that is served
    paths = {
        path: {"post": _operation(path, components, bodies[shape])}
        for path, shape in _BODIES.items()
    }
    for path, (about, answer, statuses) in _READABLE.items():
        paths[path] = {"get": _reading(path, about, answer, statuses)}
    document: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version, "description": _ABOUT},
        "paths": paths,
        "components": {"schemas": _without_titles(components)},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


@cache
def _requests() -> tuple[dict[type[Body], Schema], Schema]:
    """Return pydantic's description of each request, and the definitions that they refer to: the
    same for every router of a process."""
    bodies = tuple(dict.fromkeys(_BODIES.values()))
    found, definitions = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    return {body: found[body, "validation"] for body in bodies}, definitions["$defs"]


def _operation(path: str, components: Schema, body: Schema) -> Schema:
    about, answer = _POSTED[path]
    content: Schema = {"application/json": {"schema": answer}}
    if path in (CHAT_PATH, COMPLETION_PATH):
        content["text/event-stream"] = {"schema": _EVENT}
    seconds = {"type": "string", "pattern": r"^[1-9][0-9]{0,2}(\.[0-9]{1,3})?$"}
    return {
        "operationId": path.removeprefix("/v1").strip("/").replace("/", "_"),
        "summary": about,
        "parameters": [
            {
                "name": HEADER,
                "in": "header",
                "description": "the time limit of the request in seconds, such as 2.5",
                "schema": seconds,
            }
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": about, "content": content}, **_errors(_ERRORS)},
    }


def _reading(path: str, about: str, answer: Schema, statuses: tuple[str, ...]) -> Schema:
    kind = "application/json" if answer is not _TEXT else "text/plain"
    operation: Schema = {
        "operationId": path.removeprefix("/v1").strip("/").replace("/", "_").rstrip("}"),
        "summary": about,
        "responses": {
            "200": {"description": about, "content": {kind: {"schema": answer}}},
            **_errors(("400", "401", "403", "405", "500", "503", *statuses)),
        },
    }
    if "{name}" in path:
        operation["operationId"] = "model"
        operation["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": _TEXT}
        ]
    return operation


def _errors(statuses: Any) -> Schema:
    schema = {"$ref": "#/components/schemas/Error"}
    return {
        status: {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": schema}},
        }
        for status in statuses
    }


def _object(required: Schema, optional: Schema | None = None) -> Schema:
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": [*required]}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _either(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _without_titles(value: Any) -> Any:
    """Remove the titles, which in pydantic's schemas repeat the fields' names."""
    if isinstance(value, list):
        return [_without_titles(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_titles(entry)
        for key, entry in value.items()
        if not (key == "title" and isinstance(entry, str))
    }


_FINISH = _either({"enum": ["stop", "length", "tool_calls"]}, _NULL)
_CALL = _object(
    {
        "id": _TEXT,
        "type": {"const": "function"},
        "function": _object({"name": _TEXT, "arguments": _TEXT}),
    }
)
_USAGE = _object(
    {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT},
    {
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
        "completion_tokens_details": _object(
            {"accepted_prediction_tokens": _COUNT, "rejected_prediction_tokens": _COUNT}
        ),
    },
)
_HEAD: Schema = {"id": _TEXT, "created": _COUNT, "model": _TEXT}
_MESSAGE = _object(
    {"role": {"const": "assistant"}, "content": _either(_TEXT, _NULL)},
    {"tool_calls": _list(_CALL)},
)
_ANY: Schema = {}
_ANSWERS: Schema = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": _TEXT,
                    "type": _TEXT,
                    "param": _either(_TEXT, _NULL),
                    "code": _either(_TEXT, _NULL),
                }
            )
        }
    ),
    "ChatCompletion": _object(
        {
            **_HEAD,
            "object": {"const": "chat.completion"},
            "choices": _list(
                _object({"index": _COUNT, "message": _MESSAGE, "finish_reason": _FINISH})
            ),
            "usage": _USAGE,
        }
    ),
    "Completion": _object(
        {
            **_HEAD,
            "object": {"const": "text_completion"},
            "choices": _list(_object({"index": _COUNT, "text": _TEXT, "finish_reason": _FINISH})),
            "usage": _USAGE,
        }
    ),
    "Tokens": _object({"count": _COUNT, "max_model_len": _COUNT, "tokens": _list(_COUNT)}),
    "Text": _object({"prompt": _TEXT}),
    "Model": _object(
        {
            "id": _TEXT,
            "object": {"const": "model"},
            "created": _COUNT,
            "owned_by": _TEXT,
            "max_model_len": _COUNT,
        }
    ),
    "Models": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))}),
    "Ready": _object({"status": {"const": "ready"}, "workers": {"type": "object"}}),
}
_EXPLANATION = _object({"prompts": {"type": "array", "items": {"type": "object"}}})
_TRACES = _object({"traces": {"type": "array", "items": {"type": "object"}}})
_POSTED: dict[str, tuple[str, Schema]] = {
    CHAT_PATH: ("the model's answer to a chat", _ref("ChatCompletion")),
    COMPLETION_PATH: ("the model's continuation of a prompt", _ref("Completion")),
    CHAT_PATH + EXPLAIN: ("where a chat would be computed, and why", _EXPLANATION),
    COMPLETION_PATH + EXPLAIN: ("where a prompt would be computed, and why", _EXPLANATION),
    "/tokenize": ("the token ids of a prompt or a chat", _ref("Tokens")),
    "/detokenize": ("the text of token ids", _ref("Text")),
}
_READABLE: dict[str, tuple[str, Schema, tuple[str, ...]]] = {
    "/v1/models": ("the served model", _ref("Models"), ()),
    "/v1/models/{name}": ("one model", _ref("Model"), ("404",)),
    "/tokenizer_info": ("special tokens, chat template and context", {"type": "object"}, ()),
    "/livez": ("the process answers", _object({"status": {"const": "alive"}}), ()),
    "/health": ("requests can be served", _ref("Ready"), ()),
    "/readyz": ("requests can be served", _ref("Ready"), ()),
    "/metrics": ("Prometheus' metrics", _TEXT, ()),
    "/trace/{request_id}": ("where the time of a request went", {"type": "object"}, ("404",)),
    "/traces": ("the slowest requests or the newest", _TRACES, ("400",)),
    "/version": ("the router's version", _object({"version": _TEXT}), ()),
    OPENAPI_PATH: ("this document", {"type": "object"}, ()),
}
