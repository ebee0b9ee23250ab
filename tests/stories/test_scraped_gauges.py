"""The gauges of both kinds of worker while requests wait, are computed and are handed over."""

from __future__ import annotations

import asyncio

import pytest

from baton.kv_transfer.memory_mover import Fate
from baton.runtime import metrics
from baton.runtime.config import Config, HandoffConfig, PoolConfig, StepConfig
from baton.runtime.exposition import standard_names
from baton.simulation.fleet.client import Client
from baton.simulation.fleet.cluster import Cluster
from tests.support.virtual_time import at_the_end, on_virtual_time

STEP_S = 0.05


def value(name: str, **labels: str) -> float:
    found = metrics.REGISTRY.get_sample_value(name, labels)
    assert found is not None, name
    return found


def fleet() -> Cluster:
    step = StepConfig(prefill_tokens=16, chunk_tokens=16, max_prompts=1)
    config = Config(pool=PoolConfig(block_size=4), step=step, handoff=HandoffConfig(lease_s=1.0))
    made = Cluster(config, step_s=lambda batch: STEP_S)
    at_the_end(made.close)
    made.add_prefill("prefill-0", 128)
    made.add_decode("decode-0", 128)
    return made


@on_virtual_time
async def test_a_prefill_worker_shows_its_queue_and_chunks() -> None:
    cluster = fleet()
    client, worker = Client(cluster, "decode-0"), cluster.prefill["prefill-0"].worker
    long = client.submit([1] * 160, max_tokens=1)
    short = client.submit([2] * 40, max_tokens=1)
    await asyncio.sleep(3 * STEP_S)
    worker.publish_gauges()
    assert value("baton_running_requests") == 1 and value("baton_waiting_requests") == 1
    left = value("baton_queued_tokens")
    assert 40 < left < 200  # the waiting prompt, and the chunks that are left of the other
    assert value("baton_open_handoffs", state="reading") == 1
    assert value("baton_open_handoffs", state="waiting") == 1
    assert value("baton_oldest_handoff_seconds", state="waiting") > STEP_S
    await long.finished()
    await short.finished()
    await asyncio.sleep(1.0)
    worker.publish_gauges()
    assert value("baton_queued_tokens") == 0 and value("baton_open_handoffs", state="reading") == 0
    assert value("baton_oldest_handoff_seconds", state="reading") == 0


@on_virtual_time
async def test_a_decode_worker_shows_credit_and_handoffs() -> None:
    cluster = fleet()
    client, worker = Client(cluster, "decode-0"), cluster.decode["decode-0"].worker
    queried = value("baton_prefix_queried_tokens_total")
    read_s, read = value("baton_read_seconds_total"), value("baton_handoff_bytes_total")
    request = client.submit([1] * 80, max_tokens=30)
    await asyncio.sleep(3.5 * STEP_S)
    worker.publish_gauges()
    assert value("baton_open_handoffs", state="reading") == 1
    assert value("baton_promised_blocks") > 0 and value("baton_running_requests") == 1
    await request.finished()
    assert value("baton_handoff_bytes_total") > read
    assert value("baton_read_seconds_total") > read_s
    assert value("baton_prefix_queried_tokens_total") == queried + 2 * 80  # by both workers


@on_virtual_time
async def test_a_handoffs_age_begins_with_its_last_offer() -> None:
    """A prompt that waited long, or is long, is not stuck."""
    cluster = fleet()
    client, workers = Client(cluster, "decode-0"), (cluster.prefill, cluster.decode)
    request = client.submit([1] * 160, max_tokens=1)  # ten chunks
    await asyncio.sleep(6.5 * STEP_S)
    for nodes in workers:
        (node,) = nodes.values()
        node.worker.publish_gauges()
        assert value("baton_open_handoffs", state="reading") == 1
        assert 0 < value("baton_oldest_handoff_seconds", state="reading") < 1.5 * STEP_S
    await request.finished()


HELD = [1] * 40


async def with_reader() -> Cluster:
    """A fleet whose first two workers hold a prompt; all new ones go to a second prefill worker."""
    cluster = fleet()
    await Client(cluster, "decode-0").submit(HELD, max_tokens=2).finished()
    await cluster.quiet()
    cluster.add_prefill("prefill-1", 128)
    reader = cluster.candidates()[1:]
    cluster.candidates = lambda: reader
    return cluster


@pytest.mark.parametrize("source", ["prefill-0", "decode-0"])
@on_virtual_time
async def test_both_roles_show_grants_of_cached_blocks(source: str) -> None:
    cluster = await with_reader()
    cluster.exchange.decide = lambda attempt: Fate(delay_s=3 * STEP_S)
    request = Client(cluster, "decode-0").submit(
        [*HELD, 9], max_tokens=2, source=cluster.source(source, 10)
    )
    await asyncio.sleep(2 * STEP_S)
    node = {**cluster.prefill, **cluster.decode}[source]
    node.worker.publish_gauges()
    own = int(source == "decode-0")  # its own handoff waits for the prompt
    assert value("baton_open_handoffs", state="reading") == 1
    assert value("baton_open_handoffs", state="waiting") == own
    assert value("baton_oldest_handoff_seconds", state="reading") > STEP_S
    await request.finished()


@pytest.mark.parametrize("source", ["prefill-1", "decode-0"])
@on_virtual_time
async def test_both_roles_show_checksums_that_they_owe(source: str) -> None:
    """A prefill worker those of a prompt, a decode worker those of cached blocks."""
    cluster = await with_reader()
    mover = {**cluster.prefill, **cluster.decode}[source].mover
    worker = {**cluster.prefill, **cluster.decode}[source].worker
    mover.stick_checksums()
    request = Client(cluster, "decode-0").submit(
        [*HELD, 9], max_tokens=2, source=cluster.source("decode-0", 10)
    )
    await asyncio.sleep(5 * STEP_S)
    worker.publish_gauges()
    assert value("baton_oldest_checksum_seconds") > STEP_S
    mover.release_checksums()
    await request.finished()
    await cluster.quiet()
    worker.publish_gauges()
    assert value("baton_oldest_checksum_seconds") == 0


@on_virtual_time
async def test_a_prefill_worker_promises_no_blocks() -> None:
    """Its process may have been a decode worker's."""
    cluster = fleet()
    client = Client(cluster, "decode-0")
    request = client.submit([1] * 80, max_tokens=30)
    await asyncio.sleep(2 * STEP_S)
    cluster.decode["decode-0"].worker.publish_gauges()
    assert value("baton_promised_blocks") > 0
    cluster.prefill["prefill-0"].worker.publish_gauges()
    assert value("baton_promised_blocks") == 0
    await request.finished()


@on_virtual_time
async def test_a_worker_has_the_known_names_of_its_pool() -> None:
    cluster = fleet()
    client, worker = Client(cluster, "decode-0"), cluster.decode["decode-0"].worker
    standard_names.publish_worker("tiny", 4)
    labels = {"model_name": "tiny", "engine": "0"}
    request = client.submit([1] * 80, max_tokens=60)
    await asyncio.sleep(10 * STEP_S)
    worker.publish_gauges()
    used = value("baton_pool_blocks", state="used")
    assert 0 < used < 128
    assert value("vllm:kv_cache_usage_perc", **labels) == used / 128
    assert value("vllm:num_requests_running", **labels) == 1
    assert value("vllm:prefix_cache_queries_total", **labels) > 0
    info = {"block_size": "4", "num_gpu_blocks": "128"}
    assert value("vllm:cache_config_info", **labels, **info) == 1
    await request.finished()
