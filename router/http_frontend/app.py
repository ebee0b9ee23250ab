"""The HTTP routes: OpenAI's, the tokenizer's, and those for operators.

Each route parses and validates; `http_responder.py` runs the request. State lives in the parts
that are given to `build_app`, which is called once per router.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from baton.router.answers.prompt_batch import PromptBatch
from baton.router.answers.request_handler import Arrival, ClientGone, RequestHandler
from baton.router.client_access.router import Router
from baton.router.fleet.explain import explained
from baton.router.http_frontend.client_connection import while_connected
from baton.router.http_frontend.http_error import MethodNotAllowed, error_response
from baton.router.http_frontend.http_responder import HttpResponder
from baton.router.http_frontend.openai_answer import (
    ChatRenderer,
    CompletionRenderer,
    Renderer,
    ResponseHead,
)
from baton.router.http_frontend.openapi import OPENAPI_PATH, openapi_document
from baton.router.http_frontend.request_body import read_body
from baton.router.http_frontend.routes import (
    CHAT_PATH,
    COMPLETION_PATH,
    EXPLAIN,
    GENERATION_PATHS,
    no_route,
)
from baton.router.http_frontend.trace_routes import add_traces
from baton.router.requests.body_budget import HeldBody
from baton.router.requests.deadline import HEADER, deadline_of
from baton.router.requests.openai_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from baton.router.requests.prompt_limits import check_alternatives
from baton.router.requests.refusals import count_refusal
from baton.router.requests.request_trace import Mark, RequestTrace, unmarked
from baton.router.requests.schema_body import Body
from baton.router.requests.validated_request import ValidatedRequest
from baton.runtime import logs, metrics
from baton.runtime.errors import BatonError, Cancelled, InvalidRequest
from baton.runtime.telemetry import tracing

T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=Body)
_Route = TypeVar("_Route", bound=Callable[..., Any])

log = logs.get(__name__)


def build_app(router: Router, *, operator: bool = False) -> FastAPI:
    """Return the application of a router. That of an `operator` reads the traces of all keys."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_errors(app)
    _add_generation(app, router)
    _add_explanation(app, router)
    _add_tokenizer(app, router)
    _add_operation(app, router)
    add_traces(app, router, operator=operator)
    _add_openapi(app, router)
    return app


def _add_generation(app: FastAPI, router: Router) -> None:
    @app.post(CHAT_PATH)
    async def chat(request: Request) -> Response:
        arrival, trace = _arrival(router, request), _trace(request)
        held = router.receiving(arrival.deadline_s, request.state.tenant, generates=True)
        async with held as body:
            asked = await _read(router, request, body, ChatRequest, trace.mark)
            work = router.validator.chat(asked, router.fleet.limits(), trace.mark)
            validated = await _while_connected(request, work)
        trace.mark("validate")
        metrics.TOKENIZE_SECONDS.observe(time.perf_counter() - arrival.at_s)
        heading = _heading(router, "chatcmpl", request, validated)
        renderer = ChatRenderer(
            heading,
            router.tokenizer.token_bytes,
            validated.logprobs,
            tools=validated.calling is not None,
        )
        return _answer(router, request, [validated], renderer, arrival, trace)

    @app.post(COMPLETION_PATH)
    async def complete(request: Request) -> Response:
        arrival, trace = _arrival(router, request), _trace(request)
        held = router.receiving(arrival.deadline_s, request.state.tenant, generates=True)
        async with held as body:
            asked = await _read(router, request, body, CompletionRequest, trace.mark)
            limits = router.fleet.limits()
            work = router.validator.completions(asked, limits, mark=trace.mark)
            validated = await _while_connected(request, work)
        trace.mark("validate")
        metrics.TOKENIZE_SECONDS.observe(time.perf_counter() - arrival.at_s)
        heading = _heading(router, "cmpl", request, validated[0])
        renderer = CompletionRenderer(heading, router.tokenizer.token_bytes, validated[0].logprobs)
        return _answer(router, request, validated, renderer, arrival, trace)

    @_readable(app, "/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [_model_body(router)]})

    @_readable(app, "/v1/models/{name:path}")
    async def model(name: str) -> Response:
        router.validator.check_model(name)
        return _json(_model_body(router))


def _add_explanation(app: FastAPI, router: Router) -> None:
    """Answer how a request would be placed now, and place nothing. No part of a prompt is kept."""

    @app.post(CHAT_PATH + EXPLAIN)
    async def explain_chat(request: Request) -> Response:
        async with router.receiving(_deadline(router, request), request.state.tenant) as body:
            asked = await _read(router, request, body, ChatRequest)
            work = router.validator.chat(asked, router.fleet.limits())
            validated = await _while_connected(request, work)
        return await _explained(router, request, [validated])

    @app.post(COMPLETION_PATH + EXPLAIN)
    async def explain_completion(request: Request) -> Response:
        async with router.receiving(_deadline(router, request), request.state.tenant) as body:
            asked = await _read(router, request, body, CompletionRequest)
            work = router.validator.completions(asked, router.fleet.limits())
            validated = await _while_connected(request, work)
        return await _explained(router, request, validated)


async def _explained(
    router: Router, request: Request, validated: Sequence[ValidatedRequest]
) -> Response:
    """Each prompt is compared with all workers in a turn of its own."""

    def explain(each: ValidatedRequest) -> dict[str, object]:
        own = router.of_tenant(each, request.state.tenant)
        return explained(router.serving.dispatcher.explain(own))

    turns = router.validator.turns
    return _json({"prompts": [await turns.run(0, explain, each) for each in validated]})


def _readable(app: FastAPI, path: str) -> Callable[[_Route], _Route]:
    """Register a route for GET, and for HEAD, which some load balancers use for health checks."""
    return app.api_route(path, methods=["GET", "HEAD"])


def _add_tokenizer(app: FastAPI, router: Router) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        limits = router.fleet.limits()
        async with router.receiving(_deadline(router, request), request.state.tenant) as body:
            asked = await _read(router, request, body, TokenizeRequest)
            tokens = await _while_connected(request, router.validator.tokens(asked, limits))
        return _json({"count": len(tokens), "max_model_len": limits.max_context, "tokens": tokens})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        async with router.receiving(_deadline(router, request), request.state.tenant) as body:
            asked = await _read(router, request, body, DetokenizeRequest)
            work = router.validator.text(asked, router.fleet.limits())
            text = await _while_connected(request, work)
        return _json({"prompt": text})

    @_readable(app, "/tokenizer_info")
    async def tokenizer_info() -> Response:
        return _json(router.tokenizer_info)


def _add_operation(app: FastAPI, router: Router) -> None:
    @_readable(app, "/livez")
    async def live() -> Response:
        return _json({"status": "alive"})

    @_readable(app, "/health")
    @_readable(app, "/readyz")
    async def ready() -> Response:
        return _json({"status": "ready", "workers": router.check_ready()})

    @_readable(app, "/metrics")
    async def scrape() -> Response:
        router.publish_gauges()
        return Response(metrics.render(), media_type=metrics.CONTENT_TYPE)

    @_readable(app, "/version")
    async def get_version() -> Response:
        return _json({"version": _version()})


def _add_openapi(app: FastAPI, router: Router) -> None:
    document = orjson.dumps(
        openapi_document(router.model, _version(), bool(router.config.api_keys))
    )

    @_readable(app, OPENAPI_PATH)
    async def openapi() -> Response:
        return Response(document, media_type="application/json")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(BatonError)
    async def baton_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, BatonError)
        if request.url.path in GENERATION_PATHS:
            count_refusal(error)
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path[:200]
        if error.status_code == 404:
            return error_response(no_route(path))
        if error.status_code == 405:
            headers = error.headers or {}
            use = headers.get("Allow", "another method")
            refusal = MethodNotAllowed(f"{request.method} is not allowed on {path}: use {use}")
            response = error_response(refusal)
            response.headers.update(headers)
            return response
        return error_response(InvalidRequest(str(error.detail)))

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: Exception) -> Response:
        return error_response(InvalidRequest(str(error)))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("internal error raised", path=request.url.path[:200], error=logs.fault_of(error))
        return error_response(BatonError("unexpected"))


async def _read(
    router: Router,
    request: Request,
    held: HeldBody,
    shape: type[BodyT],
    mark: Mark = unmarked,
) -> BodyT:
    admission = router.serving.admission
    body = await read_body(request, router.config.max_body_bytes, held, admission)
    mark("receive")
    parsed = await router.validator.parsed(body, shape)
    mark("parse")
    return parsed


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what the work on a prompt returns. Raises Cancelled once its client disconnects: what
    a client has left takes neither a tokenizer's thread nor a worker."""
    try:
        return await while_connected(request.receive, work)
    except ClientGone as error:
        raise Cancelled("the client disconnected while its prompt was read") from error


def _arrival(router: Router, request: Request) -> Arrival:
    at_s, deadline_s = time.perf_counter(), _deadline(router, request)
    sent = {name: request.headers.get(name, "") for name in tracing.HEADERS}
    return Arrival(at_s, deadline_s, tracing.extract(sent))


def _trace(request: Request) -> RequestTrace:
    return RequestTrace(getattr(request.state, "begun_s", None), request.state.tenant)


def _answer(
    router: Router,
    request: Request,
    validated: Sequence[ValidatedRequest],
    renderer: Renderer,
    arrival: Arrival,
    trace: RequestTrace,
) -> Response:
    check_alternatives(validated)
    router.serving.admission.check_number(len(validated), "prompt")
    request_id, tenant = request.state.request_id, request.state.tenant
    members = []
    for index, each in enumerate(validated):
        metrics.PROMPT_TOKENS.observe(len(each.prompt))
        name = request_id if len(validated) == 1 else f"{request_id}-{index}"
        own = router.of_tenant(each, tenant)
        own_trace = trace if len(validated) == 1 else trace.member()
        members.append(RequestHandler(router.serving, own, name, arrival, own_trace))
    handler = members[0] if len(members) == 1 else PromptBatch(members)
    return HttpResponder(handler, validated[0], renderer, request_id)


def _deadline(router: Router, request: Request) -> float:
    given = request.headers.getlist(HEADER)
    return deadline_of(given, asyncio.get_running_loop().time(), router.config.request_s)


def _heading(
    router: Router, kind: str, request: Request, validated: ValidatedRequest
) -> ResponseHead:
    answer_id = f"{kind}-{request.state.request_id.removeprefix('req-')}"
    return ResponseHead(
        answer_id=answer_id,
        created_s=int(time.time()),
        model=router.model,
        include_usage=validated.include_usage,
        token_ids=validated.token_ids,
    )


def _model_body(router: Router) -> dict[str, object]:
    return {
        "id": router.model,
        "object": "model",
        "created": router.started_s,
        "owned_by": "baton",
        "root": router.model,
        "parent": None,
        "max_model_len": router.fleet.limits().max_context,
    }


def _json(body: object) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


def _version() -> str:
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return "unknown"
