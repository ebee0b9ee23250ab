"""OpenTelemetry spans named after the design's phases, and their context across processes.

A context is passed by hand, as a value: nothing here is ambient, so it crosses tasks, links
and handoffs alike (`inject` into a message's map, `extract` at the other end). Without an
endpoint no span is made and contexts pass through unchanged. The process owns the exporter:
`setup` at its start, `shutdown` at its end; export never waits on the serving path, spans
that a dead collector does not take are dropped by a bounded queue.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Attribute = str | bool | int | float

REQUEST = "request"  # the root: a request's whole life in the router
VALIDATE, COMPILE = "validate_grammar", "compile_grammar"  # of constrained requests alone
PHASES: Final = ("queue", "prefill", "chunk", "handoff", "fetch", "decode")
QUEUE, PREFILL, CHUNK, HANDOFF, FETCH, DECODE = PHASES

QUEUE_SPANS = 8192  # waiting to be exported; newer ones are dropped
_EXPORT_TIMEOUT_S = 5.0
_PROPAGATOR = TraceContextTextMapPropagator()


class _State:
    """The exporter that `setup` made; one per process."""

    provider: TracerProvider | None = None
    exporter: OTLPSpanExporter | None = None
    tracer: trace.Tracer | None = None


def setup(service: str, endpoint: str = "", queue_spans: int = QUEUE_SPANS) -> None:
    """Export spans as `service` to an OTLP gRPC endpoint ("host:port" or "http://host:port";
    "https://" for TLS), at most `queue_spans` waiting for it. Empty: no spans. A second call ends
    the first exporter."""
    shutdown()
    if not endpoint:
        return
    exporter = OTLPSpanExporter(
        endpoint=endpoint,
        insecure=not endpoint.startswith("https://"),
        timeout=_EXPORT_TIMEOUT_S,
    )
    provider = TracerProvider(
        resource=Resource({"service.name": f"baton-{service}"}), shutdown_on_exit=False
    )
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=queue_spans,
            schedule_delay_millis=1000,
            export_timeout_millis=_EXPORT_TIMEOUT_S * 1000,
        )
    )
    _State.provider, _State.exporter = provider, exporter
    _State.tracer = provider.get_tracer("baton")


def shutdown(timeout_s: float = 2.0) -> None:
    """Send what is queued, and stop exporting; after `timeout_s` the rest is dropped."""
    provider, exporter = _State.provider, _State.exporter
    _State.provider = _State.exporter = _State.tracer = None
    if provider is None or exporter is None:
        return
    # the provider would retry each queued batch at a dead collector; closing the exporter
    # under it ends that
    limit = threading.Timer(timeout_s, exporter.shutdown)
    limit.daemon = True
    limit.start()
    try:
        provider.shutdown()
    finally:
        limit.cancel()


def exporting() -> bool:
    return _State.tracer is not None


@contextmanager
def span(name: str, parent: Context | None = None, **attributes: Attribute) -> Iterator[Context]:
    """A span around a block; yields the context for its children. No parent: a new trace.
    An exception that leaves the block marks the span as failed and goes on."""
    if _State.tracer is None:
        yield parent if parent is not None else Context()
        return
    made = _State.tracer.start_span(
        name, context=parent if parent is not None else Context(), attributes=_named(attributes)
    )
    try:
        yield trace.set_span_in_context(made, parent if parent is not None else Context())
    except BaseException as error:
        made.set_status(trace.StatusCode.ERROR, type(error).__name__)
        raise
    finally:
        made.end()


def record(
    name: str,
    start_s: float,
    end_s: float,
    parent: Context | None = None,
    **attributes: Attribute,
) -> Context:
    """A span for a phase that is over; times in seconds of `time.time()`. Returns the context
    for its children."""
    above = parent if parent is not None else Context()
    if _State.tracer is None:
        return above
    made = _State.tracer.start_span(
        name, context=above, attributes=_named(attributes), start_time=int(start_s * 1e9)
    )
    made.end(end_time=int(max(start_s, end_s) * 1e9))
    return trace.set_span_in_context(made, above)


def annotate(context: Context, **attributes: Attribute) -> None:
    """Add attributes to the open span of a context; after its end they are ignored."""
    current = trace.get_current_span(context)
    if current.is_recording():
        current.set_attributes(_named(attributes))


def inject(context: Context) -> dict[str, str]:
    """A context as W3C headers (`traceparent`, `tracestate`), empty if it has no trace."""
    carrier: dict[str, str] = {}
    if not context:
        return carrier
    _PROPAGATOR.inject(carrier, context)
    return carrier


def extract(carrier: Mapping[str, str]) -> Context:
    """The context that a peer or a client sent; malformed headers give an empty context."""
    return _PROPAGATOR.extract(dict(carrier), Context()) if carrier else Context()


def trace_id(context: Context) -> str:
    """32 hex digits for logs and error messages; empty if the context has no trace."""
    found = trace.get_current_span(context).get_span_context()
    return f"{found.trace_id:032x}" if found.is_valid else ""


def _named(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {f"baton.{name}": value for name, value in attributes.items()}
