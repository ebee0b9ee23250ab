"""The server metrics of OpenTelemetry's conventions for generative AI, by Prometheus' naming.

`gen_ai.server.request.duration`, `.time_to_first_token` and `.time_per_output_token`, with the
attributes and the bucket bounds that the conventions give. Each is observed once a request.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import Histogram

from baton.runtime.metric_factory import REGISTRY

PROVIDER = "baton"
_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
DURATION = Histogram(
    "gen_ai_server_request_duration_seconds",
    "From a request's arrival to its end; error_type is empty if it finished.",
    (*_LABELS, "error_type"),
    registry=REGISTRY,
    buckets=(
        0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
    ),
)  # fmt: skip
TIME_TO_FIRST_TOKEN = Histogram(
    "gen_ai_server_time_to_first_token_seconds",
    "From a request's arrival to its first token, of those that finished.",
    _LABELS,
    registry=REGISTRY,
    buckets=(
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    ),
)  # fmt: skip
TIME_PER_OUTPUT_TOKEN = Histogram(
    "gen_ai_server_time_per_output_token_seconds",
    "Mean time of an output token after the first, of requests that finished.",
    _LABELS,
    registry=REGISTRY,
    buckets=(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times of an ended request in seconds; None where it had no first, or no second token."""

    duration_s: float
    first_token_s: float | None = None
    per_token_s: float | None = None


def operation_name(*, chat: bool) -> str:
    """Return the conventions' name for what a request asks for."""
    return "chat" if chat else "text_completion"


def record(operation: str, model: str, times: RequestTimes, error_type: str | None = None) -> None:
    """Observe an ended request. `operation` is `chat` or `text_completion`; `error_type` names the
    class of its error, and is None if it finished."""
    labels = (operation, PROVIDER, model)
    DURATION.labels(*labels, error_type or "").observe(times.duration_s)  # a label has a value
    if error_type is not None:
        return
    if times.first_token_s is not None:
        TIME_TO_FIRST_TOKEN.labels(*labels).observe(times.first_token_s)
    if times.per_token_s is not None:
        TIME_PER_OUTPUT_TOKEN.labels(*labels).observe(times.per_token_s)
