"""Errors as OpenAI bodies with true status codes: the one place where HTTP learns of them.

Knows the error tree and nothing of what failed. Internal errors show no detail to a client.
"""

from __future__ import annotations

import math
from typing import Any

import orjson
from starlette.responses import Response

from baton.runtime.errors import (
    BatonError,
    ConfigError,
    InvalidRequest,
    NotFound,
    Overloaded,
    RateLimited,
    Unauthenticated,
)

_CODES = {
    "InvalidRequest": "invalid_value",
    "ContextExceeded": "context_length_exceeded",
    "NotFound": "not_found",
    "MethodNotAllowed": "method_not_allowed",
    "OtherName": "other_name",
    "TooLarge": "body_too_large",
    "Unauthenticated": "invalid_api_key",
    "Overloaded": "overloaded",
    "RateLimited": "rate_limit_exceeded",
    "DeadlineExceeded": "deadline_exceeded",
    "Cancelled": "cancelled",
    "Unavailable": "unavailable",
    "WorkerLost": "worker_lost",
}
_HIDDEN = "an error inside the server: its log says more, under this answer's x-request-id"


def error_body(error: BatonError) -> dict[str, Any]:
    code = _CODES.get(error.code, "internal_error" if error.http_status == 500 else "unavailable")
    if isinstance(error, NotFound) and error.field == "model":
        code = "model_not_found"
    hidden = error.http_status == 500 or isinstance(error, ConfigError)
    return {
        "error": {
            "message": _HIDDEN if hidden else str(error),
            "type": _kind(error),
            "param": error.field if isinstance(error, InvalidRequest) else None,
            "code": code,
        }
    }


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


def retry_after_s(error: BatonError) -> int:
    """Whole seconds after which the same request may succeed; 0 where that is not known."""
    if isinstance(error, Overloaded):
        return max(1, math.ceil(error.retry_after_s))
    return 1 if error.http_status == 503 else 0


def _kind(error: BatonError) -> str:
    if isinstance(error, Unauthenticated):
        return "authentication_error"
    if isinstance(error, InvalidRequest):
        return "invalid_request_error"
    if isinstance(error, RateLimited):
        return "rate_limit_error"
    return "server_error"
