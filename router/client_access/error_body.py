"""Errors as clients see them, by HTTP and by gRPC: message, type, field and code.

Knows the error tree and no transport. Internal errors show no detail to a client.
"""

from __future__ import annotations

import math
from typing import Any

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
    "HostNotAllowed": "host_not_allowed",
    "TooLarge": "body_too_large",
    "Unauthenticated": "invalid_api_key",
    "Overloaded": "overloaded",
    "RateLimited": "rate_limit_exceeded",
    "DeadlineExceeded": "deadline_exceeded",
    "Cancelled": "cancelled",
    "Unavailable": "unavailable",
    "WorkerLost": "worker_lost",
}
_HIDDEN = "an internal error: search the server's log for this answer's x-request-id"


def error_body(error: BatonError) -> dict[str, Any]:
    """Return the OpenAI body of an error."""
    code = _CODES.get(error.code, "internal_error" if error.http_status == 500 else "unavailable")
    if isinstance(error, NotFound) and error.field == "model":
        code = "model_not_found"
    hidden = error.http_status == 500 or isinstance(error, ConfigError)
    return {
        "error": {
            "message": _HIDDEN if hidden else str(error),
            "type": _error_type(error),
            "param": error.field if isinstance(error, InvalidRequest) else None,
            "code": code,
        }
    }


def retry_after_s(error: BatonError) -> int:
    """Return after how many whole seconds the same request may succeed; 0 if that is not known."""
    if isinstance(error, Overloaded):
        return max(1, math.ceil(error.retry_after_s))
    return 1 if error.http_status == 503 else 0


def _error_type(error: BatonError) -> str:
    if isinstance(error, Unauthenticated):
        return "authentication_error"
    if isinstance(error, InvalidRequest):
        return "invalid_request_error"
    if isinstance(error, RateLimited):
        return "rate_limit_error"
    return "server_error"
