"""What a worker of either role tells of itself: hello_back, load and audit; and how it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from baton.decode_worker import credit_queue
from baton.decode_worker import worker as decode_worker
from baton.decode_worker.step_plan import StepPlan
from baton.engine.scheduling.batch import StepBatch
from baton.engine.scheduling.blocks import Hold
from baton.kv_transfer.memory_mover import Fate
from baton.proto import worker_pb2
from baton.runtime.config import Config, HandoffConfig, PoolConfig, StepConfig
from baton.runtime.errors import Draining, EngineError, InvalidRequest, Unavailable
from baton.simulation.fleet.client import Client
from baton.simulation.fleet.cluster import MAX_CONTEXT, VOCAB, Cluster, MemoryPeers
from baton.simulation.virtual.virtual_steps import VirtualStep
from tests.support.virtual_time import at_the_end, on_virtual_time
from tests.support.worker_parts import decode_scheduler

MakeCluster = Callable[[], Cluster]

HELLO = worker_pb2.RouterHello(
    router_id="router",
    boot_id=b"r" * 16,
    resume=[worker_pb2.Resume(request_id="unknown", attempt=1)],
)


@pytest.fixture
def make_cluster() -> MakeCluster:
    def make() -> Cluster:
        made = Cluster(
            Config(
                pool=PoolConfig(block_size=4),
                step=StepConfig(prefill_tokens=32, chunk_tokens=16, local_prefill_tokens=8),
                handoff=HandoffConfig(lease_s=1.0),
            )
        )
        at_the_end(made.close)
        made.add_prefill("prefill-0", 32)
        made.add_decode("decode-0", 48)
        return made

    return make


@pytest.mark.parametrize(("role", "blocks"), [("prefill", 32), ("decode", 48)])
@on_virtual_time
async def test_a_hello_names_the_worker_and_what_is_lost(
    make_cluster: MakeCluster, role: str, blocks: int
) -> None:
    cluster = make_cluster()
    worker = (cluster.prefill | cluster.decode)[f"{role}-0"].worker
    hello_back, session = worker.attach(HELLO)
    assert (hello_back.worker_id, hello_back.boot_id, hello_back.role) == (
        f"{role}-0",
        worker.boot_id,
        role,
    )
    assert (hello_back.total_blocks, hello_back.block_size) == (blocks, 4)
    assert (hello_back.vocab_size, hello_back.max_context) == (VOCAB, MAX_CONTEXT)
    assert (hello_back.model_fingerprint, hello_back.kv_dtype) == ("hash-engine", "uint8")
    assert list(hello_back.unknown_requests) == ["unknown"]
    session.detach()


@on_virtual_time
async def test_a_prefill_worker_accepts_no_request_of_a_router(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster()
    worker = cluster.prefill["prefill-0"].worker
    _, session = worker.attach(HELLO)
    session.receive(worker_pb2.RouterMessage(submit=worker_pb2.Submit(request_id="a", prompt=[1])))
    outputs = asyncio.ensure_future(session.outputs())
    await asyncio.sleep(0.02)
    assert not outputs.done() and worker.audit()["waiting"] == 0
    outputs.cancel()
    await asyncio.wait({outputs})
    session.detach()


@on_virtual_time
async def test_both_roles_name_degraded_peers_to_routers_and_operators(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill worker reads cached blocks, so it has degraded peers too."""
    slow = worker_pb2.DegradedPeer(worker_id="decode-1", boot_id=b"b" * 16, gb_per_s=0.123456)
    monkeypatch.setattr(MemoryPeers, "degraded", lambda self: [slow])
    entry = {"worker_id": "decode-1", "boot_id": (b"b" * 16).hex(), "gb_per_s": 0.1235}
    for node in make_cluster().nodes():
        assert node.worker.audit()["degraded_peers"] == [entry]
        assert list(node.worker.load().degraded_peers) == [slow]


@on_virtual_time
async def test_load_and_audit_follow_a_request_to_its_end(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster()
    node = cluster.decode["decode-0"]
    idle = node.worker.load()
    assert (idle.running, idle.waiting, idle.fetching, idle.queued_tokens) == (0, 0, 0, 0)
    assert idle.free_blocks == idle.total_blocks == 48 and not idle.draining
    request = Client(cluster, "decode-0").submit(list(range(40)))
    fetching = node.worker.load()  # admitted within the submit
    assert (fetching.fetching, fetching.free_blocks) == (1, 38)
    assert (fetching.open_requests, fetching.active_requests, fetching.completed_requests) == (
        1,
        1,
        0,
    )
    audit = node.worker.audit()
    assert (audit["requests"], audit["blocks"]["leased"]) == (1, 10)
    await request.finished()
    await cluster.quiet()
    after = node.worker.audit()
    assert (after["requests"], after["running"], after["open_handoffs"]) == (0, 0, 0)
    assert (after["worker_id"], after["role"]) == ("decode-0", "decode")
    over = node.worker.load()
    assert (
        over.free_blocks,
        over.open_requests,
        over.active_requests,
        over.completed_requests,
    ) == (48, 0, 0, 1)
    prefill = cluster.prefill["prefill-0"].worker
    assert prefill.load().free_blocks == 32 and prefill.load().fetching == 0


@on_virtual_time
async def test_handoffs_wake_no_worker_without_work(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster()
    worker, planned = cluster.decode["decode-0"].worker, list[StepPlan]()
    scheduler = decode_scheduler(worker)
    plan = scheduler.plan

    def watched(tokens_per_s: float) -> StepPlan:
        planned.append(plan(tokens_per_s))
        return planned[-1]

    monkeypatch.setattr(decode_worker, "IDLE_POLL_S", 60.0)
    worker.loop.wake.set()
    await asyncio.sleep(0.02)  # by now it waits, and will for a minute
    cluster.exchange.decide = lambda attempt: Fate(stuck=True)
    monkeypatch.setattr(scheduler, "plan", watched)
    request = Client(cluster, "decode-0").submit(list(range(10)))
    for _ in range(1000):
        await asyncio.sleep(0.01)
        if request.tokens():
            break
    assert request.tokens() and cluster.exchange.stuck  # the first token is here, no block is
    assert planned == []
    cluster.exchange.release_stuck()
    await request.finished()
    assert planned


@on_virtual_time
async def test_a_worker_that_stops_says_so_and_refuses(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    decode, prefill = cluster.decode["decode-0"].worker, cluster.prefill["prefill-0"].worker
    decode.draining.set()
    prefill.draining.set()
    assert decode.load().draining and prefill.load().draining
    with pytest.raises(Unavailable, match="stopping"):
        Client(cluster, "decode-0").submit([1, 2, 3])
    with pytest.raises(Draining, match="stopping"):
        prefill.admit(None)
    assert decode.audit()["requests"] == 0


@on_virtual_time
async def test_a_refused_request_leaves_nothing_and_its_id_free(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    worker = cluster.decode["decode-0"].worker
    client = Client(cluster, "decode-0")
    with pytest.raises(InvalidRequest):
        client.submit([VOCAB])
    with pytest.raises(InvalidRequest):
        client.submit(list(range(48 * 4 + 1)))  # over the pool
    assert worker.audit()["requests"] == 0
    again = Client(cluster, "decode-0").submit([1, 2, 3])  # the first one's id
    await again.finished()
    assert again.tokens() == again.expected()


@on_virtual_time
async def test_another_attempts_cancel_ends_nothing(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    request = Client(cluster, "decode-0").submit(list(range(20)))
    worker = cluster.decode["decode-0"].worker
    worker.cancel(request.submit.request_id, 2)
    worker.cancel("unknown", 1)
    await request.finished()
    assert request.end().end == worker_pb2.LENGTH


@on_virtual_time
async def test_a_cancelled_choice_stops_and_the_other_continues(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster()
    client = Client(cluster, "decode-0")
    worker = cluster.decode["decode-0"].worker
    request = client.submit(list(range(20)), max_tokens=40, n=2)
    async with asyncio.timeout(20):
        while not request.tokens(1):
            await asyncio.sleep(0)
    worker.cancel(request.submit.request_id, 1, [1])
    said = request.tokens(1)
    assert request.end(1).end == worker_pb2.CANCELLED and len(said) < 40
    await request.finished()
    assert request.end(0).end == worker_pb2.LENGTH
    assert request.tokens(0) == request.expected(0)
    assert request.tokens(1) == said == request.expected(1)[: len(said)]
    await cluster.quiet()
    assert worker.audit()["requests"] == 0


@on_virtual_time
async def test_steps_that_fail_leave_a_worker_whose_books_balance(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster()
    node = cluster.decode["decode-0"]
    node.engine.fail_steps = 1
    client = Client(cluster, "decode-0")
    failed = client.submit(list(range(20)), local=True, n=2)
    await failed.finished()
    assert [failed.end(c).failure.code for c in (0, 1)] == [EngineError("").code] * 2
    await cluster.quiet()
    following = client.submit(list(range(20)), local=True, n=2)
    await following.finished()
    assert following.tokens(1) == following.expected(1)


@on_virtual_time
async def test_a_waiting_request_is_admitted_in_the_step_another_ends() -> None:
    step = StepConfig(max_sequences=2, local_prefill_tokens=8)
    cluster = Cluster(Config(pool=PoolConfig(block_size=4), step=step), step_s=lambda batch: 0.06)
    node = cluster.add_decode("decode-0", 48)
    client = Client(cluster, "decode-0")
    long = client.submit([1] * 3, local=True, max_tokens=12)
    short = client.submit([2] * 3, local=True, max_tokens=5)
    waiting = client.submit([3] * 3, local=True, max_tokens=1)
    await short.finished()
    assert node.worker.audit()["waiting"] == 0 and not long.ended.is_set()
    await asyncio.gather(long.finished(), waiting.finished())
    await cluster.quiet()
    await cluster.close()


@on_virtual_time
async def test_the_copies_of_a_step_that_was_refused_are_never_made(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their blocks are another's by then."""
    cluster = make_cluster()
    node, client = cluster.decode["decode-0"], Client(cluster, "decode-0")
    submit, refused = node.engine.submit, list[StepBatch]()

    def refusing(batch: StepBatch) -> VirtualStep:
        if len(batch.slices) == 2:  # the first step of both choices
            refused.append(batch)
            raise EngineError("256 steps are already queued")
        return submit(batch)

    monkeypatch.setattr(node.engine, "submit", refusing)
    request = client.submit(list(range(6)), n=2, local=True)
    await request.finished()
    assert request.end().failure.code == "EngineError"
    ((_, target),) = refused[0].copies
    await cluster.quiet()
    mark = node.array[target] = node.array[target] ^ 255
    await submit(StepBatch(())).result()
    assert (node.array[target] == mark).all()


@pytest.mark.parametrize("role", ["prefill", "decode"])
@on_virtual_time
async def test_a_worker_with_a_hung_device_reports_the_overdue_time(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    cluster = make_cluster()
    monkeypatch.setattr("baton.engine.scheduling.step_pipeline.UNMEASURED_LIMIT_S", 0.2)
    client = Client(cluster, "decode-0")
    await client.submit(list(range(40)), max_tokens=8).finished()
    node = (cluster.prefill | cluster.decode)[f"{role}-0"]
    assert node.worker.load().overdue_ms == 0
    node.engine.stall()
    request = client.submit(list(range(100, 140)), max_tokens=8)
    async with asyncio.timeout(20):
        while node.worker.load().overdue_ms < 300:
            await asyncio.sleep(0.02)
    assert not request.ended.is_set()
    node.engine.go_on()
    await request.finished()
    assert request.tokens() == request.expected()
    assert node.worker.load().overdue_ms == 0


@on_virtual_time
async def test_a_request_too_large_beside_a_quarantine_is_returned(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its deadline may be an hour away, and another worker may have room."""
    cluster = make_cluster()
    monkeypatch.setattr(credit_queue, "QUARANTINE_WAIT_S", 0.1)
    monkeypatch.setattr("baton.decode_worker.worker.IDLE_POLL_S", 0.02)
    node, client = cluster.decode["decode-0"], Client(cluster, "decode-0")
    quarantined = node.pool.allocate(40, Hold.QUARANTINED)
    large, small = client.submit(list(range(40))), client.submit(list(range(9)))
    await asyncio.gather(large.finished(), small.finished())
    failure = large.end().failure
    assert (failure.code, failure.retryable, large.tokens()) == ("Overloaded", True, [])
    assert small.tokens() == small.expected()
    assert node.worker.audit()["waiting"] == 0
    node.pool.release(quarantined, Hold.QUARANTINED)
    await cluster.quiet()


@on_virtual_time
async def test_a_deadline_ends_a_handoff_on_both_workers(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster()
    prefill = cluster.prefill["prefill-0"]
    prefill.engine.stall()
    request = Client(cluster, "decode-0").submit(list(range(60)), deadline_ms=100)
    await asyncio.sleep(0.05)
    assert prefill.worker.audit()["open_handoffs"] == 1
    await request.finished()
    assert request.end().failure.code == "DeadlineExceeded" and not request.tokens()
    await asyncio.sleep(0.1)  # for the prefill worker to hear of it
    prefill.engine.go_on()  # the steps under way end; of the rest nothing is computed
    await cluster.quiet(1.0)
    assert prefill.engine.steps <= 2
