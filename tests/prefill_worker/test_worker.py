"""The prefill worker's loop: which prompt is let in when, and what is reported of the chunks of a
step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from baton.engine.scheduling.blocks import Hold
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime import handoff_metrics, metrics
from baton.runtime.config import Config, HandoffConfig, PoolConfig, StepConfig
from baton.runtime.telemetry import tracing
from baton.simulation.fleet.client import Client
from baton.simulation.fleet.cluster import Cluster
from tests.support.metric_values import metric_value
from tests.support.virtual_time import at_the_end, on_virtual_time

MakeCluster = Callable[..., Cluster]

STEP_S = 0.06


@pytest.fixture
def make_cluster() -> MakeCluster:
    def make(prefill_blocks: int = 128) -> Cluster:
        step = StepConfig(prefill_tokens=16, chunk_tokens=16, max_prompts=2)
        handoff = HandoffConfig(lease_s=1.0)
        made = Cluster(
            Config(pool=PoolConfig(block_size=4), step=step, handoff=handoff),
            step_s=lambda batch: STEP_S,
        )
        at_the_end(made.close)
        made.add_prefill("prefill-0", prefill_blocks)
        made.add_decode("decode-0", 128)
        return made

    return make


def prompt_tokens() -> float:
    counter = metrics.TOKENS.labels("prompt")
    return metric_value(counter)


@on_virtual_time
async def test_a_waiting_prompt_is_admitted_in_the_step_another_ends(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster()
    node, client = cluster.prefill["prefill-0"], Client(cluster, "decode-0")
    long = client.submit([1] * 240, max_tokens=1)
    async with asyncio.timeout(5):
        while node.engine.steps < 3:  # by then it is known how long a step takes
            await asyncio.sleep(0.005)
    short = client.submit([2] * 3, max_tokens=1)
    waiting = client.submit([3] * 3, max_tokens=1)
    await asyncio.sleep(0.01)
    assert node.worker.audit()["waiting"] == 1
    await short.finished()
    assert node.worker.audit()["waiting"] == 0 and not long.ended.is_set()
    await asyncio.gather(long.finished(), waiting.finished())
    await cluster.quiet()


@on_virtual_time
async def test_a_chunk_that_was_cut_and_recomputed_counts_once(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster()
    spans: list[tuple[int, int]] = []

    def recording(name: str, *times: object, **attributes: Any) -> None:
        if name == tracing.CHUNK:
            spans.append((attributes["start"], attributes["end"]))

    monkeypatch.setattr(tracing, "record", recording)
    cluster.prefill["prefill-0"].engine.memory_tokens = 8
    before = prompt_tokens()
    request = Client(cluster, "decode-0").submit(list(range(40)), max_tokens=1)
    await request.finished()
    await cluster.quiet()
    assert request.tokens() == request.expected()
    assert spans == [(first, first + 8) for first in range(0, 40, 8)]
    assert prompt_tokens() - before == 40


@on_virtual_time
async def test_a_lease_left_unclosed_is_counted_when_it_ends(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster()
    boot_id = cluster.prefill["prefill-0"].worker.boot_id
    ended: Any = [handoff_metrics.LEASES_EXPIRED, handoff_metrics.HANDOFFS.labels("expired")]
    before = [metric_value(counter) for counter in ended]
    link = cluster.handoff_stream(boot_id)
    opening = handoff_pb2.OpenHandoff(
        handoff_id=b"h" * 16,
        granter_boot_id=boot_id,
        reader_boot_id=b"r" * 16,
        request_id="request-0",
        attempt=1,
        tokens=range(8),
        prompt_tokens=8,
        sampling=worker_pb2.Sampling(top_p=1.0, repetition_penalty=1.0),
        choices=[0],
        lease_ms=100,
    )
    await link.send(handoff_pb2.ReaderMessage(open=opening))
    await link.receive()
    await link.close()  # and never a word of closing the handoff
    await cluster.quiet()
    assert [metric_value(counter) for counter in ended] == [value + 1 for value in before]


@on_virtual_time
async def test_the_end_of_a_grant_admits_the_prompt_that_waits(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(prefill_blocks=16)
    worker = cluster.prefill["prefill-0"].worker
    client = Client(cluster, "decode-0")
    await client.submit([1] * 41, max_tokens=1).finished()
    await cluster.quiet()
    link = cluster.handoff_stream(worker.boot_id)
    opening = handoff_pb2.OpenHandoff(
        handoff_id=b"h" * 16,
        granter_boot_id=worker.boot_id,
        reader_boot_id=b"r" * 16,
        request_id="request-0",
        attempt=1,
        tokens=[1] * 40,
        lease_ms=100,
        cached_only=True,
    )
    await link.send(handoff_pb2.ReaderMessage(open=opening))
    await asyncio.sleep(0.01)
    waiting = client.submit([2] * 41, max_tokens=1)
    await asyncio.sleep(0.01)
    assert worker.audit()["waiting"] == 1 and worker.audit()["blocks"]["pinned"] == 10
    await link.close()  # its lease ends soon
    async with asyncio.timeout(5):
        await waiting.finished()
    await cluster.quiet()


@on_virtual_time
async def test_next_candidate_is_asked_beside_a_large_quarantine(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster()
    first, second = cluster.prefill["prefill-0"], cluster.add_prefill("prefill-1", 128)
    quarantined = first.pool.allocate(120, Hold.QUARANTINED)
    client = Client(cluster, "decode-0")
    large, small = client.submit([1] * 40, max_tokens=1), client.submit([2] * 3, max_tokens=1)
    await asyncio.gather(large.finished(within_s=1.0), small.finished(within_s=1.0))
    assert large.tokens() == large.expected() and small.tokens() == small.expected()
    assert (first.engine.steps, second.engine.steps) == (1, 3)  # 3 of 16 tokens at most
    first.pool.release(quarantined, Hold.QUARANTINED)
    await cluster.quiet()
