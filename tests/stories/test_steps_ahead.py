"""What happens in a step while the next one is under way already: ends, failures, preemptions.

Tokens, blocks and the end are those of a worker that has one step at a time. On virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from baton.engine.scheduling import step_pipeline
from baton.engine.scheduling.batch import StepBatch
from baton.proto import worker_pb2
from baton.runtime import metrics
from baton.simulation.fleet.client import Client, Request
from baton.simulation.fleet.cluster import Cluster
from baton.simulation.fleet.hash_engine import HashEngine
from tests.support.metric_values import metric_value
from tests.support.virtual_time import on_virtual_time

MakeCluster = Callable[..., Cluster]

STEP_S = 0.004
PROMPT = list(range(9))


@pytest.fixture(autouse=True)
def always_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step is planned at once, however long the one that runs takes."""
    monkeypatch.setattr(step_pipeline, "LEAD_S", 60.0)


def engine_of(cluster: Cluster) -> HashEngine:
    return cluster.decode["decode-0"].engine


def used(cluster: Cluster) -> int:
    return cluster.decode["decode-0"].pool.counts().used


async def two_under_way(cluster: Cluster, request: Request, tokens: int = 3) -> None:
    """Until the request has so many tokens, and two steps compute on it."""
    async with asyncio.timeout(5):
        while len(request.tokens()) < tokens or len(engine_of(cluster).under_way) < 2:
            await asyncio.sleep(STEP_S / 10)


async def until(condition: Callable[[], bool], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0)  # what lasts for one pass of the loop is seen, too


def recorded(engine: HashEngine) -> list[StepBatch]:
    """All steps from now on."""
    submit, batches = engine.submit, list[StepBatch]()

    def recording(batch: StepBatch) -> object:
        batches.append(batch)
        return submit(batch)

    engine.submit = recording
    return batches


@on_virtual_time
async def test_a_token_is_fed_to_the_next_step_before_the_host_has_it(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(step_s=STEP_S)
    batches = recorded(engine_of(cluster))
    request = Client(cluster, "decode-0").submit(PROMPT, local=True, max_tokens=12)
    await request.finished()
    assert request.tokens() == request.expected()
    feeds = [piece.feed for batch in batches for piece in batch.slices]
    assert feeds.count(0) >= 10  # of eleven decode steps
    await cluster.quiet()


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8])
@on_virtual_time
async def test_nothing_is_computed_beyond_max_tokens(
    make_cluster: MakeCluster, max_tokens: int
) -> None:
    cluster = make_cluster(step_s=STEP_S)
    batches = recorded(engine_of(cluster))
    request = Client(cluster, "decode-0").submit(PROMPT, local=True, max_tokens=max_tokens)
    await request.finished()
    assert request.tokens() == request.expected()
    assert request.end().end == worker_pb2.LENGTH
    decoded = [piece for batch in batches for piece in batch.slices if piece.start >= len(PROMPT)]
    assert len(decoded) == max_tokens - 1
    await cluster.quiet()


@on_virtual_time
async def test_a_stop_token_drops_the_running_step_and_frees_its_block(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(step_s=STEP_S)
    client = Client(cluster, "decode-0")
    rehearsal = client.submit(PROMPT, local=True, max_tokens=16)
    other = client.submit([7] * 5, local=True, max_tokens=40)
    await rehearsal.finished()
    pool, engine = cluster.decode["decode-0"].pool, engine_of(cluster)
    for index in range(2, 8):  # also where the next token would need a block of its own
        stop = rehearsal.tokens()[index]
        request = client.submit(PROMPT, local=True, max_tokens=16, stop=(stop,))
        await request.finished()
        assert request.tokens() == rehearsal.tokens()[: index + 1]
        assert request.end().end == worker_pb2.STOP
        position = len(PROMPT) + index  # of the stop token, which a step computes in vain
        slices = [piece for batch in engine.under_way for piece in batch.slices]
        written = next(piece.blocks[-1] for piece in slices if piece.start == position)
        assert pool.writable(written)  # still the request's own
        await until(lambda block=written: not pool.writable(block), 1)
    await other.finished()
    assert other.tokens() == other.expected()
    await cluster.quiet()


@on_virtual_time
async def test_output_tokens_are_counted_once_each(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(step_s=STEP_S)
    client = Client(cluster, "decode-0")
    stop = client.submit(PROMPT, local=True, max_tokens=6)
    await stop.finished()
    before = metric_value(metrics.TOKENS.labels("output"))
    requests = [
        client.submit(PROMPT, local=True, max_tokens=20, stop=(stop.tokens()[4],)),
        client.submit([5] * 7, max_tokens=9, n=2, temperature=1.0),
        client.submit([6] * 3, local=True, max_tokens=1),
    ]
    await asyncio.gather(*(request.finished() for request in requests))
    await cluster.quiet()
    delivered = sum(o.HasField("token") for request in requests for o in request.outputs)
    assert delivered == 5 + 18 + 1
    assert metric_value(metrics.TOKENS.labels("output")) - before == delivered


@on_virtual_time
async def test_a_cancel_with_two_steps_running_ends_with_them(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(step_s=0.02)
    client = Client(cluster, "decode-0")
    request = client.submit(PROMPT, local=True, max_tokens=400)
    await two_under_way(cluster, request)
    batches, had = recorded(engine_of(cluster)), len(request.outputs)
    client.cancel(request)
    assert request.end().end == worker_pb2.CANCELLED and len(request.outputs) == had + 1
    assert used(cluster) > 0  # both steps still write there
    await until(lambda: used(cluster) == 0, 2 * 0.02 + 0.1)
    assert batches == [] and not engine_of(cluster).under_way
    assert len(request.outputs) == had + 1
    await cluster.quiet()


@pytest.mark.parametrize("tokens", range(1, 6))
@on_virtual_time
async def test_a_failed_step_ends_its_requests_and_no_others(
    make_cluster: MakeCluster, tokens: int
) -> None:
    cluster = make_cluster(step_s=STEP_S)
    client, engine = Client(cluster, "decode-0"), engine_of(cluster)
    bad = client.submit(PROMPT, local=True, max_tokens=400)
    await two_under_way(cluster, bad, tokens)
    good = client.submit([3] * 6, local=True)
    await until(lambda: [len(batch.slices) for batch in engine.under_way] == [1, 2], 2)
    engine.fail_steps = 1  # the one that runs: the newcomer is in the next
    await asyncio.gather(bad.finished(), good.finished())
    assert bad.end().failure.code == "EngineError"
    assert bad.tokens() == bad.expected()[: len(bad.tokens())]
    assert good.tokens() == good.expected()
    await cluster.quiet()


@on_virtual_time
async def test_the_step_after_one_without_memory_for_a_slice_continues(
    make_cluster: MakeCluster,
) -> None:
    """Memory is short for everything for one step, while the next one is queued."""
    cluster = make_cluster(step_s=STEP_S)
    client, engine = Client(cluster, "decode-0"), engine_of(cluster)
    request = client.submit(PROMPT, local=True, max_tokens=400)
    await two_under_way(cluster, request)
    shortages = metric_value(metrics.MEMORY_SHORTAGES)
    engine.memory_tokens = 0
    await request.finished()
    engine.memory_tokens = 100
    assert request.end().failure.code == "OutOfMemory"
    assert metric_value(metrics.MEMORY_SHORTAGES) > shortages
    after = client.submit(PROMPT, local=True)
    await after.finished()
    assert after.tokens() == after.expected()
    await cluster.quiet()


@pytest.mark.parametrize("memory_tokens", [4, 5, 8, 12])
@on_virtual_time
async def test_a_prompt_whose_chunks_do_not_fit_uses_smaller_ones(
    make_cluster: MakeCluster, memory_tokens: int
) -> None:
    cluster = make_cluster(step_s=STEP_S)
    client = Client(cluster, "decode-0")
    engine_of(cluster).memory_tokens = memory_tokens
    cluster.prefill["prefill-0"].engine.memory_tokens = memory_tokens
    prompts = [[n, *range(60)] for n in range(4)]
    before = metric_value(metrics.TOKENS.labels("prompt"))
    requests = [client.submit(prompt, local=bool(prompt[0] % 2)) for prompt in prompts]
    await asyncio.gather(*(request.finished() for request in requests))
    for request in requests:
        assert request.end().end == worker_pb2.LENGTH
        assert request.tokens() == request.expected()
    assert cluster.exchange.reads > 0
    await cluster.quiet()
    assert metric_value(metrics.TOKENS.labels("prompt")) - before == sum(map(len, prompts))


@on_virtual_time
async def test_a_prompt_of_which_not_one_block_fits_fails_alone(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(step_s=STEP_S)
    client = Client(cluster, "decode-0")
    engine_of(cluster).memory_tokens = 3
    bad = client.submit(list(range(40)), local=True)
    good = client.submit([1, 2, 3], local=True)
    await asyncio.gather(bad.finished(), good.finished())
    assert bad.end().failure.code == "OutOfMemory" and bad.end().failure.retryable
    assert good.tokens() == good.expected()
    await cluster.quiet()


@pytest.mark.parametrize("blocks", [24, 31, 40])
@on_virtual_time
async def test_preemption_waits_for_the_running_step(
    make_cluster: MakeCluster, blocks: int
) -> None:
    cluster = make_cluster(blocks=blocks, step_s=0.001)
    client = Client(cluster, "decode-0")
    requests = [client.submit([i, i + 1, i + 2], max_tokens=60, local=True) for i in range(9)]
    await asyncio.gather(*(request.finished() for request in requests))
    for request in requests:
        assert request.tokens() == request.expected()
    assert cluster.decode["decode-0"].worker.audit()["preemptions"] > 0
    await cluster.quiet()


@on_virtual_time
async def test_chunks_of_a_prompt_follow_each_other_without_a_gap(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(step_s=STEP_S)
    engine = cluster.prefill["prefill-0"].engine
    queued: list[int] = []
    submit = engine.submit

    def counting(batch: StepBatch) -> object:
        queued.append(len(engine.under_way))
        return submit(batch)

    engine.submit = counting
    request = Client(cluster, "decode-0").submit(list(range(100)), max_tokens=4)
    await request.finished()
    assert request.tokens() == request.expected()
    assert len(queued) == 7 and queued[1:] == [1] * 6  # all but the first behind another
    await cluster.quiet()


@on_virtual_time
async def test_a_reader_that_leaves_between_chunks_frees_their_blocks(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(step_s=0.01)
    node = cluster.prefill["prefill-0"]
    client = Client(cluster, "decode-0")
    request = client.submit(list(range(200)), max_tokens=4)
    await until(lambda: len(node.engine.under_way) == 2 and node.engine.steps > 1, 5)
    client.cancel(request)
    await until(lambda: node.pool.counts().available == node.pool.total, 5)
    assert not node.engine.under_way and node.engine.steps < 13
    await cluster.quiet()
