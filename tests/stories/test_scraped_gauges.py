"""The gauges of both kinds of worker while requests wait, are computed and are handed over."""

from __future__ import annotations

import asyncio

from baton.runtime import metrics
from baton.runtime.config import Config, HandoffConfig, PoolConfig, StepConfig
from baton.runtime.exposition import standard_names
from baton.simulation.fleet.client import Client
from baton.simulation.fleet.cluster import Cluster
from baton.simulation.virtual.virtual_time import at_the_end, on_virtual_time

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
    assert value("baton_read_seconds_total") >= read_s
    assert value("baton_prefix_queried_tokens_total") >= queried + 80


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
