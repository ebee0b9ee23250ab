"""Rare moments, each once: what a cancel, a quarantine or a strange peer must not leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from baton.decode_worker import handoffs
from baton.engine.scheduling.batch import StepResult
from baton.kv_transfer.granter import GranterLink
from baton.kv_transfer.memory_mover import Attempt, Fate
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime.errors import DeviceLost, Draining, Unavailable
from baton.simulation.fleet.client import Client
from baton.simulation.fleet.cluster import Cluster
from baton.simulation.virtual.virtual_steps import VirtualStep
from tests.support.virtual_time import on_virtual_time

MakeCluster = Callable[..., Cluster]


@on_virtual_time
async def test_a_request_cancelled_before_its_handoff_leaves_nothing(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster()
    client = Client(cluster, "decode-0")
    client.cancel(client.submit(list(range(50))))  # its task has not run a single line
    await cluster.quiet()


@on_virtual_time
async def test_blocks_that_leave_quarantine_let_a_waiting_request_in(
    make_cluster: MakeCluster,
) -> None:
    """Nothing else happens on this worker: the landing alone must wake its loop."""
    cluster = make_cluster(blocks=14)
    cluster.exchange.decide = lambda attempt: Fate(stuck=attempt.number == 1)
    client = Client(cluster, "decode-0")
    first = client.submit(list(range(40)), max_tokens=1)
    async with asyncio.timeout(5):
        while not cluster.exchange.stuck:
            await asyncio.sleep(0.005)
    client.cancel(first)
    async with asyncio.timeout(5):
        while not cluster.decode["decode-0"].pool.counts().quarantined:
            await asyncio.sleep(0.005)
    second = client.submit(list(range(100, 146)), max_tokens=4, local=True)
    await asyncio.sleep(0.05)
    assert second.outputs == []
    cluster.exchange.release_stuck()
    await second.finished(5)
    assert second.tokens() == second.expected()
    await cluster.quiet()


@on_virtual_time
async def test_a_granter_that_turns_busy_amid_a_read_harms_no_block(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The READ's blocks are in quarantine, so the next try needs others in their place."""
    monkeypatch.setattr(handoffs, "BUSY_PAUSE_S", 0.01)
    cluster = make_cluster()
    cluster.exchange.decide = lambda attempt: Fate(stuck=attempt.number == 1)
    worker = cluster.prefill["prefill-0"].worker
    serve = worker.grants.serve

    async def offer_and_refuse(link: GranterLink) -> None:
        opening = (await link.receive()).open
        assert len(opening.tokens) == 50
        offer = handoff_pb2.Offer(first=0, blocks=range(6))
        busy = worker_pb2.Failure(code="Overloaded", detail="after all")
        await link.send(handoff_pb2.GranterMessage(opened=handoff_pb2.Opened(lease_ms=400)))
        await link.send(handoff_pb2.GranterMessage(offer=offer))
        await link.send(handoff_pb2.GranterMessage(failed=busy))
        worker.grants.serve = serve

    worker.grants.serve = offer_and_refuse
    seen: list[tuple[int, ...]] = []

    def remember(attempt: Attempt) -> Fate:
        seen.append(attempt.local)
        return Fate(stuck=attempt.number == 1)

    cluster.exchange.decide = remember
    request = Client(cluster, "decode-0").submit(list(range(50)))
    await request.finished()
    assert request.tokens() == request.expected()
    assert cluster.exchange.release_stuck() == 1
    assert len(seen) > 2 and all(block >= 0 for local in seen for block in local)
    assert not set(seen[0]) & {block for local in seen[2:] for block in local}
    await cluster.quiet()


@on_virtual_time
async def test_an_unforeseen_error_ends_one_request_and_no_worker(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster()
    node = cluster.decode["decode-0"]
    client = Client(cluster, "decode-0")

    def surprise(*_: object) -> None:
        raise KeyError("surprise")

    with monkeypatch.context() as patched:
        patched.setattr(node.mover, "peer", surprise)
        bad = client.submit(list(range(20)))
        await bad.finished()
    assert bad.end().failure.retryable and "KeyError" in bad.end().failure.detail
    good = client.submit(list(range(20)))
    await good.finished()
    assert good.tokens() == good.expected() and not node.task.done()
    await cluster.quiet()


@on_virtual_time
async def test_an_id_in_use_is_refused_and_the_first_request_goes_on(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(step_s=0.002)
    client = Client(cluster, "decode-0")
    first = client.submit(list(range(20)))
    with pytest.raises(Unavailable, match="has this id"):
        cluster.decode["decode-0"].worker.submit(first.submit, lambda output: None)
    await first.finished()
    assert first.tokens() == first.expected()
    await cluster.quiet()


@on_virtual_time
async def test_a_stopping_worker_sends_its_readers_elsewhere(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(prefill=2, step_s=0.01)
    request = Client(cluster, "decode-0").submit(list(range(100)))
    await asyncio.sleep(0.015)
    node = cluster.prefill["prefill-0"]
    node.worker.draining.set()
    node.task.cancel()
    await request.finished(1)
    assert request.tokens() == request.expected()
    with pytest.raises(Draining, match="stopping"):
        node.worker.admit(handoff_pb2.OpenHandoff())
    cluster.decode["decode-0"].worker.draining.set()
    with pytest.raises(Unavailable, match="stopping"):
        Client(cluster, "decode-0").submit([1])


@on_virtual_time
async def test_a_hung_device_ends_its_worker_and_all_its_requests(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its step still writes is unknown: no block of that pool may be used again."""
    cluster = make_cluster()
    node = cluster.decode["decode-0"]
    client = Client(cluster, "decode-0")

    def silence(_: object) -> VirtualStep:
        never: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        never.set_exception(DeviceLost("the device gave no result"))
        return VirtualStep(never)

    monkeypatch.setattr(node.engine, "submit", silence)
    requests = [client.submit(list(range(20)), local=True), client.submit(list(range(9)), n=2)]
    await asyncio.gather(*(request.finished() for request in requests))
    assert all(o.failure.retryable for r in requests for o in r.outputs if o.end)
    with pytest.raises(DeviceLost):
        await asyncio.wait_for(node.task, 5)
    del cluster.decode["decode-0"]
    await cluster.quiet()
