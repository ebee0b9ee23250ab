"""What tests of several folders share: a real OTLP collector in this process, and a fair watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from baton.runtime.silence import Silence


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """`all` in order of arrival; `spans` the last one of each name."""

    def __init__(self) -> None:
        self.all: list[Span] = []
        self.services: set[str] = set()

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
            for scope in resource.scope_spans:
                self.all += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    """The collector, and the address that it listens on."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait(10)


@asynccontextmanager
async def watch() -> AsyncIterator[Callable[[], float]]:
    silence = Silence(float("inf"))

    async def keep() -> None:
        while True:
            await silence.sleep(0.01)

    keeping = asyncio.create_task(keep())
    try:
        yield silence.so_far_s
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@pytest.fixture
def fair_watch() -> Callable[[], AbstractAsyncContextManager[Callable[[], float]]]:
    """`async with fair_watch() as so_far_s`: the seconds in which this process had its turn. What
    its sleeps are late by, on a machine that others use too, does not count."""
    return watch
