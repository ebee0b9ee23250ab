"""Prompts computed on a decode worker: their spans are in the request's trace, and are counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from baton.proto import worker_pb2
from baton.runtime import handoff_metrics, metrics
from baton.runtime.config import Config, PoolConfig, StepConfig
from baton.runtime.telemetry import tracing
from baton.simulation.fleet.client import Client
from baton.simulation.fleet.cluster import Cluster
from tests.support.metric_values import metric_value
from tests.support.span_values import span_values
from tests.support.trace_collector import ListeningCollector
from tests.support.virtual_time import on_virtual_time

SpansOf = Callable[[str], list[Span]]
REASONS = ("placed", "no_candidate", "recompute")


def trace_of(number: int) -> dict[str, str]:
    return {"traceparent": f"00-{number:032x}-00f067aa0ba902b7-01"}


def counted() -> dict[str, float]:
    found = {"preemptions": metric_value(metrics.PREEMPTIONS.labels("running"))}
    found |= {kind: metric_value(metrics.TOKENS.labels(kind)) for kind in ("prompt", "recomputed")}
    found["queried"] = metric_value(metrics.PREFIX_QUERIED_TOKENS)
    found["cached"] = metric_value(metrics.PREFIX_CACHED_TOKENS)
    for reason in REASONS:
        found[reason] = metric_value(handoff_metrics.LOCAL_PREFILLS.labels(reason))
    return found


def since(before: dict[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in counted().items()}


@pytest.fixture
def spans(collector: ListeningCollector) -> Iterator[SpansOf]:
    """Ends the exporter and gives the spans of that name, in order of their start."""
    servicer, endpoint = collector
    tracing.setup("decode-0", endpoint)

    def named(name: str) -> list[Span]:
        tracing.shutdown(10.0)
        found = [span for span in servicer.all if span.name == name]
        return sorted(found, key=lambda span: span.start_time_unix_nano)

    yield named
    tracing.shutdown()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """A decode worker with few blocks, alone."""
    step = StepConfig(local_prefill_tokens=8, expected_growth_tokens=8)
    made = Cluster(Config(pool=PoolConfig(block_size=4), step=step))
    made.add_decode("decode-0", 40)
    yield made
    await made.close()


@pytest.mark.parametrize("reason", ["placed", "no_candidate"])
async def test_a_prompt_computed_here_has_a_prefill_workers_spans(
    cluster: Cluster, spans: SpansOf, reason: str
) -> None:
    before = counted()
    client = Client(cluster, "decode-0")
    request = client.submit(list(range(20)), local=reason == "placed", trace=trace_of(7))
    await request.finished()
    await cluster.quiet()
    assert request.tokens() == request.expected()

    chunks, (prefill,) = spans("chunk"), spans("prefill")
    reported = [span_values(chunk) for chunk in chunks]
    assert reported == [
        {"start": start, "end": min(start + 8, 20), "local": reason, "critical": True}
        for start in (0, 8, 16)
    ]
    assert span_values(prefill) == {"cached_tokens": 0, "local": reason}
    for span in [*chunks, prefill]:
        assert span.trace_id.hex() == f"{7:032x}"
        assert span.parent_span_id.hex() == "00f067aa0ba902b7"
        assert prefill.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= prefill.end_time_unix_nano
    (decode,) = spans("decode")
    assert prefill.end_time_unix_nano - decode.start_time_unix_nano < 50e6
    news = since(before)
    assert news[reason] == 1 and sum(news[other] for other in REASONS) == 1
    assert (news["prompt"], news["recomputed"], news["preemptions"]) == (20, 0, 0)


async def test_cached_tokens_are_reported_and_not_counted(cluster: Cluster, spans: SpansOf) -> None:
    client = Client(cluster, "decode-0")
    await client.submit(list(range(20)), local=True, max_tokens=1).finished()
    before = counted()
    await client.submit(list(range(20)), local=True, max_tokens=1, trace=trace_of(7)).finished()
    await cluster.quiet()
    (prefill,) = [span for span in spans("prefill") if span.trace_id.hex() == f"{7:032x}"]
    assert span_values(prefill)["cached_tokens"] == 16
    assert since(before)["prompt"] == 4


async def test_recomputed_tokens_are_reported_and_counted_apart(
    cluster: Cluster, spans: SpansOf
) -> None:
    """Nine sequences outgrow a pool that their credit let in: the youngest make room."""
    before = counted()
    client = Client(cluster, "decode-0")
    requests = [
        client.submit([i, i + 1, i + 2], max_tokens=60, local=True, trace=trace_of(i + 1))
        for i in range(9)
    ]
    await asyncio.gather(*(request.finished() for request in requests))
    await cluster.quiet()
    news = since(before)
    preempted = cluster.decode["decode-0"].worker.audit()["preemptions"]
    assert news["preemptions"] == preempted > 0
    assert news["prompt"] == 9 * 3  # once each, however often they were computed
    assert (news["queried"], len(spans("credit_wait"))) == (9 * 3, 9)
    chunks = [span_values(chunk) for chunk in spans("chunk")]
    again = [reported for reported in chunks if reported["local"] != "placed"]
    assert {reported["local"] for reported in again} == {"recompute"}
    assert news["recomputed"] == sum(reported["end"] - reported["start"] for reported in again) > 0
    prefills = spans("prefill")
    assert sum(span_values(span)["local"] == "recompute" for span in prefills) == news["recompute"]
    assert {span.trace_id for span in prefills} == {
        bytes.fromhex(f"{number + 1:032x}") for number in range(9)
    }
    assert all(request.end().end == worker_pb2.LENGTH for request in requests)


@on_virtual_time
async def test_own_blocks_of_a_preempted_prompt_are_not_reported() -> None:
    """It is preempted between two of its chunks, and finds those before in the cache."""
    step = StepConfig(local_prefill_tokens=4, expected_growth_tokens=1, waiting_share=1.0)
    cluster = Cluster(Config(pool=PoolConfig(block_size=4), step=step), lambda batch: 0.01)
    worker, client = cluster.add_decode("decode-0", 12).worker, Client(cluster, "decode-0")
    before = counted()
    old = client.submit([1] * 8, max_tokens=16, local=True)
    async with asyncio.timeout(5):
        while len(old.tokens()) < 7:
            await asyncio.sleep(0.001)
    young = client.submit([2] * 28, max_tokens=1, local=True)
    await asyncio.gather(old.finished(), young.finished())
    await cluster.quiet()
    assert worker.audit()["preemptions"] == 1 and young.tokens() == young.expected()
    news = since(before)
    assert (news["prompt"], news["recompute"], news["recomputed"]) == (36, 1, 0)
    assert (news["queried"], news["cached"], young.outputs[0].cached_tokens) == (36, 0, 0)
    await cluster.close()
