"""Counts the requests for an answer that are refused, by the error that the client got."""

from __future__ import annotations

from baton.runtime import metrics
from baton.runtime.errors import (
    BatonError,
    Cancelled,
    ContextExceeded,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    NotFound,
    Overloaded,
    RateLimited,
    TooLarge,
    Unavailable,
)

_REASONS: tuple[tuple[type[BatonError], str], ...] = (  # a class before its parent
    (ContextExceeded, "context_exceeded"),
    (NotFound, "not_found"),
    (TooLarge, "body_too_large"),
    (InvalidRequest, "invalid"),
    (RateLimited, "rate_limited"),
    (Overloaded, "overloaded"),
    (DeadlineExceeded, "deadline"),
    (Draining, "draining"),
    (Unavailable, "unavailable"),
    (Cancelled, "client_left"),
)


def count_refusal(error: BatonError) -> None:
    """Count a request that ends before any token, and the reason."""
    metrics.REQUESTS.labels("refused").inc()
    metrics.REFUSALS.labels(refusal_reason(error)).inc()


def refusal_reason(error: BatonError) -> str:
    """Return the label of `baton_refusals_total` for an error."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "internal")
