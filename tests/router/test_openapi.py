"""The OpenAPI document says what is served; requests made from it are answered as it says."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic.json_schema import models_json_schema

from baton.router.http_frontend.openapi import openapi_document
from baton.router.http_frontend.routes import GENERATION_PATHS, ROUTES
from baton.router.requests.openai_schema import ChatRequest, CompletionRequest
from tests.support.json_values import JsonObject
from tests.support.router_process import FAST_ROUTER, StartRouter

CHECKS = [
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_schema_conformance,
]


def test_document_holds_all_routes_and_the_models_that_validate() -> None:
    document = openapi_document("m", "1", needs_key=False)
    served = {path.removesuffix("/{name}") for path in document["paths"]}
    assert served == set(ROUTES)
    shapes = [(ChatRequest, "validation"), (CompletionRequest, "validation")]
    _, definitions = models_json_schema(shapes)
    for name, schema in definitions["$defs"].items():
        found = document["components"]["schemas"][name]
        assert found.get("properties", {}).keys() == schema.get("properties", {}).keys()
        assert found.get("required") == schema.get("required")
    assert "security" not in document
    assert openapi_document("m", "1", needs_key=True)["security"] == [{"key": []}]


def test_documents_of_two_routers_name_their_own_models() -> None:
    first, second = (openapi_document(name, "1", needs_key=False) for name in ("one", "two"))
    for document, name in ((first, "one"), (second, "two")):
        model = document["components"]["schemas"]["TokenizeRequest"]["properties"]["model"]
        (text,) = [each for each in model.get("anyOf", [model]) if each["type"] == "string"]
        assert text["enum"] == [name]


async def test_document_needs_the_key_where_there_is_one(router: StartRouter) -> None:
    async with router(config=replace(FAST_ROUTER, api_keys=("k" * 32,)), wait=False) as running:
        assert (await running.http.get("/openapi.json")).status_code == 401
        headers = {"authorization": "Bearer " + "k" * 32}
        answer = await running.http.get("/openapi.json", headers=headers)
        assert answer.status_code == 200 and answer.json()["security"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("cases", [30, pytest.param(500, marks=pytest.mark.nightly)])
async def test_generated_requests_are_answered_as_the_document_says(
    router: StartRouter, cases: int
) -> None:
    async with router(workers=("decode-0", "prefill-0")) as running:
        statuses = await asyncio.to_thread(ask_all, running.url, cases)
    assert statuses.total() >= cases
    assert statuses[200] > cases / 10 and statuses[400] > cases / 10, statuses


def ask_all(url: str, cases: int) -> Counter[int]:
    """Make `cases` of all operations and check each answer; return the statuses. A route without
    parameters has one case. Of the others half are sent as they come."""
    statuses: Counter[int] = Counter()
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(
            max_examples=cases // 4,  # of each of the four with bodies
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(
            case=st.one_of(
                operation.as_strategy(),
                operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)
                if operation.path in GENERATION_PATHS
                else st.nothing(),
            ),
            suited=st.booleans(),
        )
        def ask(case: schemathesis.Case[Any], suited: bool) -> None:
            if isinstance(case.body, dict):
                case.body = bounded(case.body, suited)
                if case.operation.path in GENERATION_PATHS and case.body.get("max_tokens") is None:
                    case.body["max_tokens"] = 4
            if suited:
                case.headers.clear()
            answer = case.call_and_validate(checks=CHECKS, timeout=30)
            statuses[answer.status_code] += 1

        ask()
    return statuses


def bounded(body: JsonObject, suited: bool) -> JsonObject:
    """A body whose answer is short; a suited one keeps also the bounds that depend on the model
    and between fields."""
    kept = dict(body)
    for name in ("max_tokens", "max_completion_tokens"):
        if isinstance(kept.get(name), int | float):
            kept[name] = min(kept[name], 8)
    if not suited:
        return kept
    for name in ("tools", "logit_bias", "stop_token_ids", "stream_options", "top_logprobs"):
        kept.pop(name, None)
    for name in ("max_completion_tokens", "min_tokens", "chat_template_kwargs", "reasoning_effort"):
        kept.pop(name, None)
    if isinstance(kept.get("messages"), list):
        kept.pop("prompt", None)
        kept["messages"] = [
            {"role": each["role"], "content": str(each.get("content"))}
            for each in kept["messages"]
            if isinstance(each, dict) and each.get("role") in ("system", "user", "assistant")
        ] or [{"role": "user", "content": "x"}]
    for name in ("tokens", "prompt"):
        if isinstance(kept.get(name), list):
            kept[name] = [len(str(each)) % 300 for each in kept[name]] or [1]
    return {name: int(v) if v == 1 and v is not True else v for name, v in kept.items()}
