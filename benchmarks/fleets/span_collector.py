"""An OTLP collector in this process: the spans that workers export, kept for a benchmark.

Knows no benchmark. gRPC's threads put spans in, one other thread takes them out.
"""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue


@dataclass(frozen=True, slots=True)
class Span:
    """Times in seconds of `time.time()`; attributes without their `baton.`."""

    service: str
    name: str
    start_s: float
    end_s: float
    received: dict[str, Any]


class SpanCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on `endpoint` from its making to `close`."""

    def __init__(self) -> None:
        self._spans: dict[str, list[Span]] = defaultdict(list)
        self._server = grpc.server(ThreadPoolExecutor(1))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            service = str(_received(resource.resource.attributes).get("service.name", ""))
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                self._spans[span.trace_id.hex()].append(
                    Span(
                        service,
                        span.name,
                        span.start_time_unix_nano / 1e9,
                        span.end_time_unix_nano / 1e9,
                        _received(span.attributes),
                    )
                )
        return trace_service_pb2.ExportTraceServiceResponse()

    def find(self, trace_id: str, name: str, timeout_s: float, **received: Any) -> Span:
        """A trace's span with these attributes; waits for it. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while True:
            for span in list(self._spans[trace_id]):
                if span.name == name and received.items() <= span.received.items():
                    return span
            if time.monotonic() > deadline:
                raise TimeoutError(f"no span {name} {received} of trace {trace_id}")
            time.sleep(0.05)  # spans come to other threads, in batches

    def close(self) -> None:
        self._server.stop(None).wait(5)


def _received(attributes: Any) -> dict[str, Any]:
    return {a.key.removeprefix("baton."): _value(a) for a in attributes}


def _value(attribute: KeyValue) -> Any:
    kind = attribute.value.WhichOneof("value")
    return getattr(attribute.value, kind) if kind else None
