"""What a worker says of itself is true within two seconds: idle or busy, of device, pool, mover.
Load is no illness. On virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.decode_worker.worker import DecodeWorker
from baton.engine.scheduling.blocks import Hold
from baton.prefill_worker.worker import PrefillWorker
from baton.proto import worker_pb2
from baton.runtime import metrics
from baton.runtime.links import LINK_PROTOCOL_VERSION, Link, memory_link
from baton.runtime.worker.router_links import serve_link
from baton.simulation.fleet.client import Client
from baton.simulation.fleet.cluster import Cluster, Node
from tests.support.metric_values import metric_sum
from tests.support.virtual_time import on_virtual_time

MakeCluster = Callable[..., Cluster]
RED_WITHIN_S = 2.0
ROLES = pytest.mark.parametrize("role", ["prefill", "decode"])


def node_of(cluster: Cluster, role: str) -> Node[Any]:
    return (cluster.prefill | cluster.decode)[f"{role}-0"]


@asynccontextmanager
async def probing(worker: PrefillWorker | DecodeWorker) -> AsyncIterator[None]:
    """As a worker's process does."""
    task = asyncio.create_task(worker.health.watch())
    try:
        yield
    finally:
        task.cancel()


async def turns(worker: PrefillWorker | DecodeWorker, *, red: bool) -> float:
    """Seconds until the worker's word changes."""
    clock = asyncio.get_running_loop().time
    began = clock()
    async with asyncio.timeout(20):
        while bool(worker.health.not_ready_reason()) is not red:
            await asyncio.sleep(0.01)
    return clock() - began


@pytest.mark.parametrize(
    ("role", "step_s"), [("prefill", 0.002), ("decode", 0.002), ("decode", 0.08)]
)
@on_virtual_time
async def test_an_idle_worker_with_a_hung_device_turns_red_and_green(
    make_cluster: MakeCluster, role: str, step_s: float
) -> None:
    cluster = make_cluster(step_s=step_s)
    node = node_of(cluster, role)
    async with probing(node.worker):
        async with asyncio.timeout(5):
            while node.engine.steps < 2:  # by then it is known how long a probe takes
                await asyncio.sleep(0.01)
        assert node.worker.health.not_ready_reason() is None
        assert node.worker.load().not_ready_reason == ""
        node.engine.stall()
        assert await turns(node.worker, red=True) < RED_WITHIN_S
        assert "overdue" in node.worker.load().not_ready_reason
        node.engine.go_on()
        assert await turns(node.worker, red=False) < RED_WITHIN_S
    await cluster.quiet()


@pytest.mark.parametrize("step_s", [0.002, 0.3, 0.6])
@on_virtual_time
async def test_a_busy_worker_whose_device_hangs_is_red_without_a_probe(
    make_cluster: MakeCluster, step_s: float
) -> None:
    cluster = make_cluster(step_s=step_s)
    node = cluster.decode["decode-0"]
    request = Client(cluster, "decode-0").submit(list(range(20)), max_tokens=20, local=True)
    async with asyncio.timeout(10):
        while len(request.outputs) < 8:
            await asyncio.sleep(0.002)
    node.engine.stall()
    assert await turns(node.worker, red=True) < RED_WITHIN_S
    node.engine.go_on()
    await request.finished()
    assert request.tokens() == request.expected() and node.worker.health.not_ready_reason() is None


async def reported(link: Link[worker_pb2.RouterMessage, worker_pb2.WorkerMessage]) -> float:
    """Seconds until a load says that the worker is not ready."""
    clock = asyncio.get_running_loop().time
    began = clock()
    async with asyncio.timeout(20):
        while not (await link.receive()).load.not_ready_reason:
            pass
    return clock() - began


@ROLES
@on_virtual_time
async def test_its_router_hears_in_the_same_moment(make_cluster: MakeCluster, role: str) -> None:
    """Not with the next heartbeat."""
    cluster = make_cluster(step_s=0.002)
    node = node_of(cluster, role)
    near, far = memory_link()
    link = serve_link(far, node.worker, heartbeat_s=0.5, silence_s=60.0, hang_s=1.5)
    serving = asyncio.create_task(link)
    await near.send(
        worker_pb2.RouterMessage(
            hello=worker_pb2.RouterHello(router_id="r", protocol_version=LINK_PROTOCOL_VERSION)
        )
    )
    async with probing(node.worker):
        await asyncio.sleep(1.2)
        node.engine.stall()
        red_s, told_s = await asyncio.gather(turns(node.worker, red=True), reported(near))
        assert abs(told_s - red_s) < 0.02
        node.engine.go_on()
    await near.close()
    await serving
    await cluster.quiet()


@ROLES
@on_virtual_time
async def test_steps_that_fail_are_red_until_one_ends_well(
    make_cluster: MakeCluster, role: str
) -> None:
    cluster = make_cluster()
    node = node_of(cluster, role)
    async with probing(node.worker):
        node.engine.fail_steps = 3
        assert await turns(node.worker, red=True) < RED_WITHIN_S
        assert "the simulated device failed" in (node.worker.health.not_ready_reason() or "")
        await turns(node.worker, red=False)
    assert node.engine.fail_steps == 0
    await cluster.quiet()


@on_virtual_time
async def test_non_finite_numbers_are_red_if_a_probe_has_them(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster()
    node = cluster.decode["decode-0"]
    node.engine.break_slices = {0}
    node.worker.health.request_probe()
    await turns(node.worker, red=True)
    node.worker.health.request_probe()
    await turns(node.worker, red=False)


@ROLES
@on_virtual_time
async def test_quarantine_of_all_and_a_dead_mover_are_red(
    make_cluster: MakeCluster, role: str
) -> None:
    cluster = make_cluster(blocks=8, prefill_blocks=8)
    node = node_of(cluster, role)
    blocks = node.pool.allocate(8, Hold.QUARANTINED)
    assert "quarantine" in (node.worker.health.not_ready_reason() or "")
    node.pool.release(blocks, Hold.QUARANTINED)
    assert node.worker.health.not_ready_reason() is None
    node.mover.failure = "a thread has died"
    assert node.worker.load().not_ready_reason == "a thread has died"


@on_virtual_time
async def test_a_worker_with_more_than_it_can_do_is_not_red(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(blocks=24, step_s=0.002)
    node, client = cluster.decode["decode-0"], Client(cluster, "decode-0")
    async with probing(node.worker):
        requests = [client.submit([n] * 30, max_tokens=20, local=True) for n in range(12)]
        while not all(request.ended.is_set() for request in requests):
            assert node.worker.health.not_ready_reason() is None
            await asyncio.sleep(0.01)
    assert all(request.tokens() == request.expected() for request in requests)
    await cluster.quiet()


@ROLES
@on_virtual_time
async def test_a_request_that_comes_in_a_probe_is_served_as_ever(
    make_cluster: MakeCluster, role: str
) -> None:
    cluster = make_cluster(step_s=0.02)
    node, client = node_of(cluster, role), Client(cluster, "decode-0")
    steps = metrics.STEP_SEQUENCES
    before = metric_sum(steps)
    for _ in range(3):
        node.worker.health.request_probe()
    async with asyncio.timeout(5):
        while not node.engine.under_way:
            await asyncio.sleep(0.001)
    assert node.pool.counts().used == 1
    requests = [client.submit(list(range(30)), n=2), client.submit([7] * 9, local=True)]
    await asyncio.gather(*(request.finished() for request in requests))
    assert [requests[0].tokens(1), requests[1].tokens()] == [
        requests[0].expected(1),
        requests[1].expected(),
    ]
    assert metric_sum(steps) > before
    await cluster.quiet()


@on_virtual_time
async def test_a_probe_is_no_work_of_the_workers(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    node = cluster.decode["decode-0"]
    steps = metrics.STEP_SEQUENCES
    before = metric_sum(steps)
    for count in range(1, 4):
        node.worker.health.request_probe()
        async with asyncio.timeout(5):
            while node.engine.steps < count:
                await asyncio.sleep(0.002)
    await cluster.quiet()
    assert metric_sum(steps) == before and node.worker.load().step_ms == 0
    assert node.pool.counts().cached == 0
