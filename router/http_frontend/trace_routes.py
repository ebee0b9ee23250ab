"""The routes for traces: one request's, the slowest, the latest. JSON, without any text.

With API keys a key sees the requests that were made with it, and no others; the operator's key, on
the admin port, sees those of all.
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from baton.router.client_access.router import Router
from baton.runtime.errors import InvalidRequest, NotFound

MAX_LISTED = 1000
DEFAULT_LISTED = 20
TRACE_PATH, TRACES_PATH = "/trace/{request_id}", "/traces"
_JSON = "application/json"


def add_traces(app: FastAPI, router: Router, *, operator: bool) -> None:
    traces = router.serving.traces

    def reader(request: Request) -> bytes | None:
        return None if operator else request.state.tenant

    @app.get(TRACE_PATH)
    async def one(request: Request, request_id: str) -> Response:
        found = traces.get(request_id, reader(request))
        if found is None:
            raise NotFound(
                f"no request {request_id[:80]!r} is among those of this key that have ended of "
                "late: give the X-Request-Id of an answer, to the router that gave it",
                "request_id",
            )
        return Response(found, media_type=_JSON)

    @app.get(TRACES_PATH)
    async def several(request: Request) -> Response:
        given = request.query_params
        tenant = reader(request)
        if "slow" in given:
            found = traces.slowest(_count(given["slow"], "slow"), tenant)
        else:
            count = given.get("latest", str(DEFAULT_LISTED))
            found = traces.latest(_count(count, "latest"), tenant)
        return Response(b'{"traces":[' + b",".join(found) + b"]}", media_type=_JSON)


def _count(text: str, field: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MAX_LISTED):
        raise InvalidRequest(f"{field} is {text[:20]!r}: give 1 to {MAX_LISTED}", field)
    return int(text)
