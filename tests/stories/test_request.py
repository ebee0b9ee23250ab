"""The way of a request through real workers: what goes in, what comes out, nothing left over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from baton.kv_transfer.memory_mover import Attempt, Fate
from baton.proto import worker_pb2
from baton.runtime.config import StepConfig
from baton.simulation.fleet.client import Client, Request
from baton.simulation.fleet.cluster import Cluster
from tests.support.virtual_time import on_virtual_time

MakeCluster = Callable[..., Cluster]


@on_virtual_time
async def test_a_prompt_is_prefilled_there_and_decoded_here(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    request = Client(cluster, "decode-0").submit(list(range(50)), max_tokens=12)
    await request.finished()
    assert request.tokens() == request.expected()
    assert request.end().end == worker_pb2.LENGTH
    assert cluster.exchange.reads > 1  # its KV came over the wire, in several READs
    await cluster.quiet()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 16, 17, 31, 32, 33, 100])
@pytest.mark.parametrize("local", [False, True])
@on_virtual_time
async def test_every_prompt_length_gives_the_same_tokens(
    make_cluster: MakeCluster, length: int, local: bool
) -> None:
    cluster = make_cluster()
    client = Client(cluster, "decode-0")
    for repeat in range(2):  # the second finds its prefix in both caches
        request = client.submit(list(range(100, 100 + length)), local=local)
        await request.finished()
        assert request.tokens() == request.expected()
        cached = request.outputs[0].cached_tokens
        assert cached == (0 if repeat == 0 else (length - 1) // 4 * 4)
    await cluster.quiet()


@on_virtual_time
async def test_choices_share_the_prompt_and_differ_in_their_draws(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster()
    request = Client(cluster, "decode-0").submit(list(range(21)), n=3, temperature=1.0, seed=9)
    await request.finished()
    outputs = [request.tokens(choice) for choice in range(3)]
    assert outputs == [request.expected(choice) for choice in range(3)]
    assert len({tuple(output) for output in outputs}) == 3
    await cluster.quiet()


@on_virtual_time
async def test_a_stop_token_ends_its_choice_alone(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    client = Client(cluster, "decode-0")
    rehearsal = client.submit(list(range(9)), n=2, temperature=1.0)
    await rehearsal.finished()
    stop = rehearsal.tokens(0)[3]
    request = client.submit(list(range(9)), n=2, temperature=1.0, stop=(stop,))
    await request.finished()
    assert request.tokens(0) == rehearsal.tokens(0)[:4]
    assert request.end(0).end == worker_pb2.STOP
    assert request.tokens(1) == rehearsal.tokens(1)
    await cluster.quiet()


@on_virtual_time
async def test_the_first_token_may_be_the_last(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    request = Client(cluster, "decode-0").submit(list(range(30)), max_tokens=1)
    await request.finished()
    assert request.tokens() == request.expected()
    await cluster.quiet()


@on_virtual_time
async def test_a_retry_continues_from_the_accepted_tokens(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(decode=2)
    whole = Client(cluster, "decode-0").submit(list(range(13)), max_tokens=10, temperature=0.8)
    await whole.finished()
    tokens = whole.tokens()
    retry = Client(cluster, "decode-1").submit(
        list(range(13)), max_tokens=10, temperature=0.8, accepted=tokens[:6]
    )
    await retry.finished()
    assert retry.tokens() == tokens[6:]
    await cluster.quiet()


@on_virtual_time
async def test_many_requests_at_once(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(prefill=2, decode=2, blocks=400)
    clients = [Client(cluster, "decode-0"), Client(cluster, "decode-1")]
    requests = [
        clients[i % 2].submit([i % 5] * (5 + i), max_tokens=3 + i % 7, local=i % 3 == 0)
        for i in range(40)
    ]
    await asyncio.gather(*(request.finished() for request in requests))
    for request in requests:
        assert request.tokens() == request.expected()
    await cluster.quiet()


@on_virtual_time
async def test_preemption_recomputes_and_changes_no_token(make_cluster: MakeCluster) -> None:
    """Nine sequences outgrow a pool that their credit let in: the youngest make room."""
    cluster = make_cluster(blocks=40, settings=None)
    client = Client(cluster, "decode-0")
    requests = [client.submit([i, i + 1, i + 2], max_tokens=60, local=True) for i in range(9)]
    await asyncio.gather(*(request.finished() for request in requests))
    for request in requests:
        assert request.tokens() == request.expected()
    assert cluster.decode["decode-0"].worker.audit()["preemptions"] > 0
    await cluster.quiet()


@on_virtual_time
async def test_waiting_grants_are_taken_back_for_what_decodes(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(blocks=40)
    cluster.exchange.decide = lambda attempt: Fate(delay_s=0.02)
    client = Client(cluster, "decode-0")
    requests = [client.submit([i] * (6 + i), max_tokens=70) for i in range(9)]
    await asyncio.gather(*(request.finished() for request in requests))
    for request in requests:
        assert request.tokens() == request.expected()
    await cluster.quiet()


@on_virtual_time
async def test_a_prompt_over_the_pool_is_refused_at_once(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(blocks=8)
    client = Client(cluster, "decode-0")
    with pytest.raises(Exception, match="needs 10 KV blocks and this worker's pool has 8"):
        client.submit(list(range(30)), max_tokens=10)
    await cluster.quiet()


@on_virtual_time
async def test_a_full_queue_refuses_and_harms_no_request(make_cluster: MakeCluster) -> None:
    from baton.runtime.config import Config, PoolConfig

    settings = Config(
        pool=PoolConfig(block_size=4),
        step=StepConfig(max_queue=2, max_sequences=1),
    )
    cluster = make_cluster(settings=settings)
    client = Client(cluster, "decode-0")
    requests = [client.submit([i] * 5) for i in range(3)]
    with pytest.raises(Exception, match="2 requests wait"):
        client.submit([9] * 5)
    await asyncio.gather(*(request.finished() for request in requests))
    for request in requests[:3]:
        assert request.tokens() == request.expected()
    await cluster.quiet()


@on_virtual_time
async def test_a_corrupt_block_changes_tokens_when_nothing_verifies(
    make_cluster: MakeCluster,
) -> None:
    """The engine depends on its KV: without checksums a flipped bit is a wrong token."""
    from baton.runtime.config import Config, HandoffConfig, PoolConfig

    def flip_one(attempt: Attempt) -> Fate:
        return Fate(corrupt=0 if attempt.number == 1 else None)

    tokens: dict[bool, list[int]] = {}
    for verify in (False, True):
        settings = Config(pool=PoolConfig(block_size=4), handoff=HandoffConfig(verify=verify))
        cluster = make_cluster(settings=settings)
        cluster.exchange.decide = flip_one
        request = Client(cluster, "decode-0").submit(list(range(40)))
        await request.finished()
        tokens[verify] = request.tokens()
        expected = request.expected()
        await cluster.quiet()
    assert tokens[True] == expected
    assert tokens[False][0] == expected[0]  # drawn where the KV was right
    assert tokens[False] != expected


@on_virtual_time
async def test_a_failed_step_fails_its_requests_and_no_other(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    client = Client(cluster, "decode-0")
    cluster.decode["decode-0"].engine.fail_steps = 1
    first = client.submit(list(range(10)))
    await first.finished()
    assert first.end().end == worker_pb2.FAILED
    assert first.end().failure.retryable
    second = client.submit(list(range(10)))
    await second.finished()
    assert second.tokens() == second.expected()
    await cluster.quiet()


@on_virtual_time
async def test_numbers_that_are_not_finite_fail_one_request(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    client = Client(cluster, "decode-0")
    cluster.decode["decode-0"].engine.break_slices = {0}
    bad = client.submit(list(range(10)), local=True, max_tokens=5)
    await bad.finished()
    assert bad.end().failure.code == "EngineError"
    good = client.submit(list(range(10)), local=True)
    await good.finished()
    assert good.outputs[0].cached_tokens == 0  # what the bad step had published is forgotten
    assert good.tokens() == good.expected()
    await cluster.quiet()


@on_virtual_time
async def test_a_deadline_ends_a_request_in_any_phase(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(step_s=0.02)
    request = Client(cluster, "decode-0").submit(list(range(40)), max_tokens=200, deadline_ms=150)
    await request.finished()
    assert request.end().failure.code == "DeadlineExceeded"
    assert request.tokens() == request.expected()[: len(request.tokens())]
    await cluster.quiet()


@pytest.mark.parametrize("step", range(24))
@pytest.mark.parametrize("local", [False, True])
@on_virtual_time
async def test_cancel_at_every_moment_leaves_nothing(
    make_cluster: MakeCluster, step: int, local: bool
) -> None:
    """Cancelled a little later each time: while queued, prefilling, fetching, decoding."""
    cluster = make_cluster(step_s=0.005)
    cluster.exchange.decide = lambda attempt: Fate(delay_s=0.004)
    client = Client(cluster, "decode-0")
    request = client.submit(list(range(60)), max_tokens=10, n=1 + step % 2, local=local)
    other = client.submit(list(range(60)), max_tokens=4)
    await asyncio.sleep(step * 0.003)
    client.cancel(request)
    for choice in range(1 + step % 2):
        tokens = request.tokens(choice)
        assert tokens == request.expected(choice)[: len(tokens)]
    if not request.ended.is_set():
        raise AssertionError("a cancelled request ends at once")
    await other.finished()
    assert other.tokens() == other.expected()
    await cluster.quiet()
    assert isinstance(request, Request)
