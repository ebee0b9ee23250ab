"""What goes wrong between a prefill and a decode worker, and what the client sees: nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from baton.kv_transfer.memory_mover import Attempt, Fate
from baton.proto import worker_pb2
from baton.runtime import handoff_metrics
from baton.simulation.fleet.client import Client
from baton.simulation.fleet.cluster import Cluster
from tests.support.metric_values import metric_value
from tests.support.virtual_time import on_virtual_time

MakeCluster = Callable[..., Cluster]


def fates(**by_number: Fate) -> Callable[[Attempt], Fate]:
    """The fate of the n-th READ, given as r1=..., r2=...; the others land."""
    return lambda attempt: by_number.get(f"r{attempt.number}", Fate())


def wrong_and_read_again() -> tuple[float, float]:
    return (
        metric_value(handoff_metrics.CHECKSUM_FAILURES),
        metric_value(handoff_metrics.REREAD_BLOCKS),
    )


@pytest.mark.parametrize("moment_ms", range(0, 60, 4))
@on_virtual_time
async def test_a_killed_prefill_worker_is_replaced_by_another(
    make_cluster: MakeCluster, moment_ms: int
) -> None:
    cluster = make_cluster(prefill=2, step_s=0.005)
    cluster.exchange.decide = lambda attempt: Fate(delay_s=0.01)
    request = Client(cluster, "decode-0").submit(list(range(70)), n=2, temperature=1.0)
    await asyncio.sleep(moment_ms / 1000)
    await cluster.kill_prefill("prefill-0")
    await request.finished()
    assert [request.tokens(c) for c in (0, 1)] == [request.expected(c) for c in (0, 1)]
    await cluster.quiet()


@pytest.mark.parametrize("moment_ms", range(0, 60, 4))
@on_virtual_time
async def test_with_no_prefill_worker_left_the_decode_worker_prefills(
    make_cluster: MakeCluster, moment_ms: int
) -> None:
    cluster = make_cluster(step_s=0.005)
    cluster.exchange.decide = lambda attempt: Fate(delay_s=0.01)
    request = Client(cluster, "decode-0").submit(list(range(70)), n=2, temperature=1.0)
    await asyncio.sleep(moment_ms / 1000)
    await cluster.kill_prefill("prefill-0")
    await request.finished()
    assert [request.tokens(c) for c in (0, 1)] == [request.expected(c) for c in (0, 1)]
    await cluster.quiet()


@on_virtual_time
async def test_a_stuck_read_quarantines_its_blocks_until_it_lands(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(prefill=2)
    cluster.exchange.decide = fates(r2=Fate(stuck=True))
    request = Client(cluster, "decode-0").submit(list(range(50)))
    await request.finished()
    assert request.tokens() == request.expected()
    assert cluster.decode["decode-0"].pool.counts().quarantined > 0
    assert cluster.exchange.release_stuck() == 1
    await cluster.quiet()


@on_virtual_time
async def test_a_late_read_harms_no_request(make_cluster: MakeCluster) -> None:
    """The blocks of an abandoned READ are not used while it may still land."""
    cluster = make_cluster(prefill=1, blocks=64)
    cluster.exchange.decide = fates(r1=Fate(stuck=True))
    client = Client(cluster, "decode-0")
    first = client.submit(list(range(50)), max_tokens=30)
    await first.finished()  # after the READ's deadline it was prefilled locally
    others = [client.submit([i] * 40, local=True, max_tokens=10) for i in range(6)]
    await asyncio.sleep(0.01)
    cluster.exchange.release_stuck()
    await asyncio.gather(*(other.finished() for other in others))
    for request in (first, *others):
        assert request.tokens() == request.expected()
    await cluster.quiet()


@on_virtual_time
async def test_requests_on_a_shared_slow_link_do_not_count_as_stuck(
    make_cluster: MakeCluster,
) -> None:
    """The link needs three times as long as a READ may stand still. None is given up for that:
    no block is quarantined, nothing is prefilled here, and no prefill worker is accused."""
    cluster = make_cluster(prefill=2)
    timeout_s, clock = cluster.config.handoff.read_timeout_s, asyncio.get_running_loop().time
    block_bytes = cluster.decode["decode-0"].array.shape[1]
    cluster.exchange.bytes_per_s = 8 * 13 * block_bytes / (3 * timeout_s)
    failed = metric_value(handoff_metrics.HANDOFFS.labels("failed"))
    client, begun = Client(cluster, "decode-0"), clock()
    requests = [client.submit([i] * 50, max_tokens=2) for i in range(8)]
    await asyncio.gather(*(request.finished() for request in requests))
    assert clock() - begun > 2.5 * timeout_s
    assert metric_value(handoff_metrics.HANDOFFS.labels("failed")) == failed
    for request in requests:
        assert request.tokens() == request.expected()
        assert not any(word.failed for word in request.asked)
    await cluster.quiet()


@on_virtual_time
async def test_a_flipped_bit_is_read_again(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.exchange.decide = fates(r1=Fate(corrupt=1))
    request = Client(cluster, "decode-0").submit(list(range(50)))
    await request.finished()
    assert request.tokens() == request.expected()
    await cluster.quiet()


@on_virtual_time
async def test_a_pool_that_is_always_wrong_is_left_for_another(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefill=2)
    bad = cluster.prefill["prefill-0"].worker.boot_id
    cluster.exchange.decide = lambda a: Fate(corrupt=0 if a.granter == bad else None)
    before = wrong_and_read_again()
    request = Client(cluster, "decode-0").submit(list(range(50)))
    await request.finished()
    assert request.tokens() == request.expected()
    wrong, again = (now - then for now, then in zip(wrong_and_read_again(), before, strict=True))
    assert wrong > again > 0  # counted though that handoff failed, both times that they were read
    await cluster.quiet()


@on_virtual_time
async def test_a_silent_stream_ends_with_the_lease_on_both_sides(
    make_cluster: MakeCluster,
) -> None:
    """The granter stops as under SIGSTOP: no answer, no error. The reader goes elsewhere."""
    cluster = make_cluster(prefill=1)
    node = cluster.prefill["prefill-0"]

    async def deaf(_: object) -> None:
        await asyncio.sleep(30)

    node.worker.grants.serve = deaf
    request = Client(cluster, "decode-0").submit(list(range(50)))
    await request.finished()
    assert request.tokens() == request.expected()
    await cluster.quiet()


@on_virtual_time
async def test_a_reader_that_vanishes_leaves_no_pin_after_the_lease(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster()
    cluster.exchange.decide = lambda attempt: Fate(stuck=True)
    client = Client(cluster, "decode-0")
    client.submit(list(range(50)))
    await asyncio.sleep(0.05)
    assert cluster.prefill["prefill-0"].pool.counts().pinned > 0
    for link, _ in cluster.open_links:
        await link.close()
    async with asyncio.timeout(2):
        while cluster.prefill["prefill-0"].pool.counts().pinned:
            await asyncio.sleep(0.01)
    cluster.exchange.release_stuck()
    await cluster.quiet()


@on_virtual_time
async def test_a_busy_prefill_fleet_is_waited_for(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefill_blocks=16, step_s=0.002)
    client = Client(cluster, "decode-0")
    requests = [client.submit([i] * 50, max_tokens=4) for i in range(8)]
    await asyncio.gather(*(request.finished() for request in requests))
    for request in requests:
        assert request.tokens() == request.expected()
        assert request.end().end == worker_pb2.LENGTH
    assert cluster.exchange.reads >= 8 * 5  # all came over the wire
    await cluster.quiet()


@on_virtual_time
async def test_a_prompt_over_the_prefill_pool_is_computed_locally(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(prefill_blocks=8)
    request = Client(cluster, "decode-0").submit(list(range(50)))
    await request.finished()
    assert request.tokens() == request.expected()
    await cluster.quiet()


@on_virtual_time
async def test_a_device_error_at_the_prefill_worker_is_survived(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefill=2)
    cluster.prefill["prefill-0"].engine.fail_steps = 1
    request = Client(cluster, "decode-0").submit(list(range(50)))
    await request.finished()
    assert request.tokens() == request.expected()
    await cluster.quiet()


@on_virtual_time
async def test_sums_may_come_before_during_or_after_the_own_ones(
    make_cluster: MakeCluster,
) -> None:
    for checksum_s in (0.0, 0.001, 0.003, 0.01):
        cluster = make_cluster(step_s=0.002)
        cluster.exchange.checksum_s = checksum_s
        cluster.exchange.decide = lambda attempt: Fate(delay_s=0.002 * (attempt.number % 3))
        request = Client(cluster, "decode-0").submit(list(range(90)))
        await request.finished()
        assert request.tokens() == request.expected()
        assert cluster.decode["decode-0"].worker.load().running == 0
        await cluster.quiet()
