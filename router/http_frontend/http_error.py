"""Errors as HTTP answers: the true status code, the OpenAI body and the headers that go with it."""

from __future__ import annotations

import orjson
from starlette.responses import Response

from baton.router.client_access.error_body import error_body, retry_after_s
from baton.runtime.errors import BatonError, InvalidRequest, Unauthenticated


class MethodNotAllowed(InvalidRequest):
    http_status = 405


class HostNotAllowed(InvalidRequest):
    http_status = 403
    grpc_code = "PERMISSION_DENIED"


def error_response(error: BatonError) -> Response:
    headers = {}
    wait_s = retry_after_s(error)
    if wait_s:
        headers["retry-after"] = str(wait_s)
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return Response(
        orjson.dumps(error_body(error)),
        status_code=error.http_status,
        headers=headers,
        media_type="application/json",
    )
