"""Which handoffs are failed in a trace: not one that its first token has made superfluous."""

from __future__ import annotations

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from baton.proto import worker_pb2
from baton.runtime.config import Config, PoolConfig, StepConfig
from baton.runtime.telemetry import tracing
from baton.simulation.fleet.client import Client
from baton.simulation.fleet.cluster import Cluster
from tests.support.span_values import span_values
from tests.support.trace_collector import ListeningCollector
from tests.support.virtual_time import on_virtual_time
from tests.support.waiting import eventually

TRACE = {"traceparent": f"00-{7:032x}-00f067aa0ba902b7-01"}


@pytest.mark.parametrize("cancelled", [False, True])
@on_virtual_time
async def test_only_a_handoff_cut_short_is_failed_in_its_trace(
    collector: ListeningCollector, cancelled: bool
) -> None:
    servicer, endpoint = collector
    tracing.setup("decode-0", endpoint)
    step = StepConfig(chunk_tokens=16)
    cluster = Cluster(
        Config(pool=PoolConfig(block_size=4), step=step), lambda _: 0.05 if cancelled else 0.0
    )
    try:
        cluster.add_prefill("prefill-0", 64)
        client = Client(cluster, cluster.add_decode("decode-0", 64).worker.worker_id)
        request = client.submit(list(range(40)), max_tokens=1, trace=TRACE)
        if cancelled:
            await eventually(lambda: cluster.prefill["prefill-0"].worker.load().queued_tokens)
            client.cancel(request)
        await request.finished()
        await cluster.quiet()
    finally:
        await cluster.close()
        tracing.shutdown(10.0)
    assert request.end().end == (worker_pb2.CANCELLED if cancelled else worker_pb2.LENGTH)
    (handoff,) = [span for span in servicer.all if span.name == "handoff"]
    if cancelled:
        assert handoff.status.code == Status.STATUS_CODE_ERROR
        assert span_values(handoff)["error.type"] == "CancelledError"
    else:
        assert handoff.status.code == Status.STATUS_CODE_UNSET
        assert "error.type" not in span_values(handoff)
