"""A collector of spans by OTLP, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """`all` in order of arrival; `spans` the last one of each name. `services`: the names of the
    processes; `numbers`: what they say of themselves beside."""

    def __init__(self) -> None:
        self.all: list[Span] = []
        self.services: set[str] = set()
        self.numbers: dict[str, int] = {}

    @property
    def spans(self) -> dict[str, Span]:
        return {span.name: span for span in list(self.all)}

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for attribute in resource.resource.attributes:
                if attribute.key == "service.name":
                    self.services.add(attribute.value.string_value)
                else:
                    self.numbers[attribute.key] = attribute.value.int_value
            for scope in resource.scope_spans:
                self.all += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()


ListeningCollector = tuple[Collector, str]  # and the address that it listens on


@contextmanager
def collecting() -> Iterator[ListeningCollector]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait(10)
