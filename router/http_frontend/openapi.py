"""The HTTP API as an OpenAPI document, made from the models that validate requests.

pydantic describes the requests, from `openai_schema.py`, so the document cannot promise a field
that is refused; answer_schemas.py describes the answers. Knows no router. State: what pydantic
said.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from baton.router.http_frontend.answer_schemas import (
    COMPONENTS,
    TEXT,
    Schema,
    list_of,
    reference,
    shape,
)
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
_BODIES: dict[str, type[Body]] = {
    CHAT_PATH: ChatRequest,
    COMPLETION_PATH: CompletionRequest,
    CHAT_PATH + EXPLAIN: ChatRequest,
    COMPLETION_PATH + EXPLAIN: CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_CHUNKS = {CHAT_PATH: "ChatCompletionChunk", COMPLETION_PATH: "CompletionChunk"}
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
    components = {**definitions, **COMPONENTS}
    for body in _BODIES.values():
        found = components[body.__name__]["properties"]["model"]
        for schema in found.get("anyOf", [found]):
            if schema["type"] == "string":
                schema["enum"] = [model]  # the only one that is served
    paths = {
        path: {"post": _operation(path, components, bodies[body])} for path, body in _BODIES.items()
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
    if path in _CHUNKS:
        content["text/event-stream"] = {"schema": _event(_CHUNKS[path])}
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


def _event(chunk: str) -> Schema:
    """Return the schema of a stream's event: this component as JSON, an error as JSON, after which
    the stream ends, or its end."""
    body = {
        **TEXT,
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [reference(chunk), reference("Error")]},
    }
    return shape({"data": {"anyOf": [{"const": "[DONE]"}, body]}})


def _reading(path: str, about: str, answer: Schema, statuses: tuple[str, ...]) -> Schema:
    kind = "application/json" if answer is not TEXT else "text/plain"
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
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": TEXT}]
    return operation


def _errors(statuses: Any) -> Schema:
    schema = reference("Error")
    return {
        status: {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": schema}},
        }
        for status in statuses
    }


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


_EXPLANATION = shape({"prompts": list_of({"type": "object"})})
_TRACES = shape({"traces": list_of({"type": "object"})})
_POSTED: dict[str, tuple[str, Schema]] = {
    CHAT_PATH: ("the model's answer to a chat", reference("ChatCompletion")),
    COMPLETION_PATH: ("the model's continuation of a prompt", reference("Completion")),
    CHAT_PATH + EXPLAIN: ("where a chat would be computed, and why", _EXPLANATION),
    COMPLETION_PATH + EXPLAIN: ("where a prompt would be computed, and why", _EXPLANATION),
    "/tokenize": ("the token ids of a prompt or a chat", reference("Tokens")),
    "/detokenize": ("the text of token ids", reference("Text")),
}
_READABLE: dict[str, tuple[str, Schema, tuple[str, ...]]] = {
    "/v1/models": ("the served model", reference("Models"), ()),
    "/v1/models/{name}": ("one model", reference("Model"), ("404",)),
    "/tokenizer_info": ("special tokens, chat template and context", {"type": "object"}, ()),
    "/livez": ("the process answers", shape({"status": {"const": "alive"}}), ()),
    "/health": ("requests can be served", reference("Ready"), ()),
    "/readyz": ("requests can be served", reference("Ready"), ()),
    "/metrics": ("Prometheus' metrics", TEXT, ()),
    "/trace/{request_id}": ("where the time of a request went", {"type": "object"}, ("404",)),
    "/traces": ("the slowest requests or the newest", _TRACES, ("400",)),
    "/version": ("the router's version", shape({"version": TEXT}), ()),
    OPENAPI_PATH: ("this document", {"type": "object"}, ()),
}
