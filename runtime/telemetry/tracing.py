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
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Attribute = str | bool | int | float | tuple[str, ...]

REQUEST = "request"  # the root: a request's whole life in the router
VALIDATE, COMPILE = "validate_grammar", "compile_grammar"  # of constrained requests alone
# The spans of workers; the router adds those of the phases that no worker exports.
PHASES: Final = (
    "credit_wait",
    "prefill_queue",
    "prefill",
    "chunk",
    "offer",
    "handoff",
    "fetch",
    "decode",
)
CREDIT_WAIT, PREFILL_QUEUE, PREFILL, CHUNK, OFFER, HANDOFF, FETCH, DECODE = PHASES

HEADERS: Final = ("traceparent", "tracestate")
RESPONSE_HEADER: Final = "traceresponse"  # of W3C Trace Context, level 2
ERROR_TYPE: Final = "error.type"  # of OpenTelemetry's conventions
QUEUE_SPANS = 8192  # waiting to be exported; newer ones are dropped
_EXPORT_TIMEOUT_S = 5.0
_PROPAGATOR = TraceContextTextMapPropagator()


class _State:
    """The exporter that `setup` made; one per process."""

    provider: TracerProvider | None = None
    processor: BatchSpanProcessor | None = None
    exporter: OTLPSpanExporter | None = None
    tracer: trace.Tracer | None = None


def setup(
    service: str,
    endpoint: str = "",
    queue_spans: int = QUEUE_SPANS,
    ratio: float = 1.0,
    of_process: Mapping[str, Attribute] | None = None,
) -> None:
    """Export spans as `service` to an OTLP gRPC endpoint ("host:port" or "http://host:port";
    "https://" for TLS), at most `queue_spans` waiting for it. Empty: no spans. `ratio` is the share
    of traces that begin here and are sampled; others follow their parent. `of_process` are resource
    attributes, on all spans of this process. A second call ends the first exporter."""
    shutdown()
    if not endpoint:
        return
    exporter = OTLPSpanExporter(
        endpoint=endpoint,
        insecure=not endpoint.startswith("https://"),
        timeout=_EXPORT_TIMEOUT_S,
    )
    provider = TracerProvider(
        resource=Resource({"service.name": f"baton-{service}", **_named(of_process or {})}),
        sampler=ParentBased(TraceIdRatioBased(ratio)),
        shutdown_on_exit=False,
    )
    processor = BatchSpanProcessor(
        exporter,
        max_queue_size=queue_spans,
        schedule_delay_millis=1000,
        export_timeout_millis=_EXPORT_TIMEOUT_S * 1000,
    )
    provider.add_span_processor(processor)
    _State.provider, _State.exporter, _State.processor = provider, exporter, processor
    _State.tracer = provider.get_tracer("baton")


def shutdown(timeout_s: float = 2.0) -> None:
    """Send what is queued, and stop exporting; after `timeout_s` the rest is dropped."""
    provider, exporter = _State.provider, _State.exporter
    _State.provider = _State.exporter = _State.tracer = _State.processor = None
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
def span(
    name: str,
    parent: Context | None = None,
    start_s: float | None = None,
    *,
    served: bool = False,
    **attributes: Attribute,
) -> Iterator[Context]:
    """A span around a block; yields the context for its children. No parent: a new trace.
    `start_s`: an earlier begin, in seconds of `time.time()`. `served`: it is a client's call, so
    its kind is SERVER. An exception that leaves the block marks the span as failed, with the
    exception's class as `error.type`, and goes on."""
    if _State.tracer is None:
        yield parent if parent is not None else Context()
        return
    made = _State.tracer.start_span(
        name,
        context=parent if parent is not None else Context(),
        attributes=_named(attributes),
        start_time=None if start_s is None else int(start_s * 1e9),
        kind=trace.SpanKind.SERVER if served else trace.SpanKind.INTERNAL,
    )
    try:
        yield trace.set_span_in_context(made, parent if parent is not None else Context())
    except BaseException as error:  # a cancelled phase failed too
        made.set_status(trace.StatusCode.ERROR, type(error).__name__)
        made.set_attribute(ERROR_TYPE, type(error).__name__)
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


def is_sampled(context: Context) -> bool:
    """Return whether spans of this trace are exported."""
    return trace.get_current_span(context).get_span_context().trace_flags.sampled


def export_root(
    name: str,
    times: tuple[float, float],
    own: Context,
    parent: Context,
    standard: Mapping[str, Attribute],
    **attributes: Attribute,
) -> Context:
    """Export a client's call that was not sampled at its begin, under its own ids: its span from
    and to these `times`. Returns its context, in which children are exported too. The names of
    `standard` stay as they are; with an `error.type` among them it has failed."""
    ids = trace.get_current_span(own).get_span_context()
    if _State.provider is None or _State.processor is None or not ids.is_valid:
        return own
    above = trace.get_current_span(parent).get_span_context()
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    kept = trace.SpanContext(ids.trace_id, ids.span_id, False, flags, ids.trace_state)
    _State.processor.on_end(
        ReadableSpan(
            name,
            context=kept,
            parent=above if above.is_valid else None,
            resource=_State.provider.resource,
            attributes={**_named(attributes), **standard},
            kind=trace.SpanKind.SERVER,
            status=_status(standard),
            start_time=int(times[0] * 1e9),
            end_time=int(max(times) * 1e9),
        )
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(kept))


def annotate(
    context: Context, standard: Mapping[str, Attribute] | None = None, **attributes: Attribute
) -> None:
    """Add attributes to the open span of a context; after its end they are ignored. The names of
    `standard` are those of OpenTelemetry's conventions, and stay as they are."""
    current = trace.get_current_span(context)
    if current.is_recording():
        current.set_attributes({**_named(attributes), **(standard or {})})


def gb_per_s(count_bytes: int, seconds: float) -> float:
    """Return gigabytes a second, as spans have them; 0 where no time passed."""
    return round(count_bytes / 1e9 / seconds, 4) if seconds > 0 else 0.0


def inject(context: Context) -> dict[str, str]:
    """A context as W3C headers (`traceparent`, `tracestate`), empty if it has no trace."""
    carrier: dict[str, str] = {}
    if not context:
        return carrier
    _PROPAGATOR.inject(carrier, context)
    return carrier


def response_value(context: Context) -> str | None:
    """Return the value of RESPONSE_HEADER for a client; None if the context has no trace."""
    return inject(context).get("traceparent") if exporting() else None


def extract(carrier: Mapping[str, str]) -> Context:
    """The context that a peer or a client sent; malformed headers give an empty context."""
    return _PROPAGATOR.extract(dict(carrier), Context()) if carrier else Context()


def trace_id(context: Context) -> str | None:
    """32 hex digits for logs and error messages; None if the context has no trace."""
    found = trace.get_current_span(context).get_span_context()
    return f"{found.trace_id:032x}" if found.is_valid else None


def _status(standard: Mapping[str, Attribute]) -> trace.Status:
    if ERROR_TYPE not in standard:
        return trace.Status()
    return trace.Status(trace.StatusCode.ERROR, str(standard[ERROR_TYPE]))


def _named(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {f"baton.{name}": value for name, value in attributes.items()}
