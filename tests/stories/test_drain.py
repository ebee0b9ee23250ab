"""A worker that drains: it takes nothing new, ends what it has, and what it hands back goes on
elsewhere with the same tokens. Nothing is left on it. On virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from opentelemetry.context import Context

from baton.kv_transfer.memory_mover import Fate
from baton.proto import worker_pb2
from baton.runtime.errors import Draining
from baton.runtime.grammar.grammar_compiler import GrammarCompiler
from baton.runtime.grammar.grammar_text import choice_grammar
from baton.runtime.grammar.matcher import CompiledGrammar
from baton.simulation.fleet.client import Client, Request
from baton.simulation.fleet.cluster import Cluster
from tests.support.grammar_scene import END, small_vocabulary, text_of
from tests.support.virtual_time import on_virtual_time

MakeCluster = Callable[..., Cluster]
STEP_S = 0.01


async def until(happens: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not happens():
            await asyncio.sleep(0.002)


def tokens(request: Request) -> int:
    return len([output for output in request.outputs if output.HasField("token")])


@on_virtual_time
async def test_a_decode_worker_that_drains_finishes_what_it_has(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(step_s=STEP_S)
    node, client = cluster.decode["decode-0"], Client(cluster, "decode-0")
    running = client.submit(list(range(30)), max_tokens=20)
    fetching = client.submit(list(range(100, 160)), max_tokens=5, n=2)
    await until(lambda: tokens(running) > 2)
    draining = asyncio.create_task(node.worker.drain(30.0))
    await asyncio.sleep(0)
    with pytest.raises(Draining):
        client.submit([1, 2, 3])
    client.requests.pop()
    assert node.worker.load().draining and node.worker.audit()["draining"]
    await asyncio.wait_for(draining, 10)
    assert [running.tokens(), fetching.tokens(1)] == [running.expected(), fetching.expected(1)]
    await cluster.quiet()


@on_virtual_time
async def test_requests_without_time_to_finish_migrate(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(decode=2, step_s=STEP_S)
    node = cluster.decode["decode-0"]
    request = Client(cluster, "decode-0").submit(list(range(30)), max_tokens=40)
    whole = request.expected()
    await until(lambda: tokens(request) > 2)
    await node.worker.drain(0.03)
    assert not request.ended.is_set()
    node.task.cancel()
    await request.finished(1)
    end = request.end()
    assert (end.end, end.failure.code, end.failure.retryable) == (
        worker_pb2.FAILED,
        "Draining",
        True,
    )
    begun = request.tokens()
    assert begun == whole[: len(begun)]
    rest = Client(cluster, "decode-1").submit(list(range(30)), max_tokens=40, accepted=begun)
    await rest.finished()
    assert begun + rest.tokens() == whole
    del cluster.decode["decode-0"]
    await cluster.quiet()


@on_virtual_time
async def test_an_idle_worker_has_drained_at_once(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    async with asyncio.timeout(1):
        await cluster.decode["decode-0"].worker.drain(60.0)
        await cluster.prefill["prefill-0"].worker.drain(60.0)


@on_virtual_time
async def test_a_prefill_worker_waits_until_its_blocks_are_read(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(step_s=STEP_S)
    node, client = cluster.prefill["prefill-0"], Client(cluster, "decode-0")
    request = client.submit(list(range(100)), max_tokens=3)
    await until(lambda: node.pool.counts().pinned > 0)
    draining = asyncio.create_task(node.worker.drain(30.0))
    await asyncio.sleep(0)
    assert not draining.done()
    late = client.submit(list(range(200, 240)), max_tokens=3)  # refused: its router's to place
    await asyncio.wait_for(draining, 10)
    counts = node.pool.counts()
    assert (counts.pinned, counts.used, node.worker.audit()["open_handoffs"]) == (0, 0, 0)
    await asyncio.gather(request.finished(), late.finished())
    assert request.tokens() == request.expected()
    assert (late.tokens(), late.end().failure.code) == ([], "StalePlacement")
    await cluster.quiet()


@on_virtual_time
async def test_a_prefill_worker_outlives_the_lease_of_a_lost_reader(
    make_cluster: MakeCluster,
) -> None:
    """The reader's stream breaks in the middle of a READ: only the lease's end unpins."""
    cluster = make_cluster()
    cluster.exchange.decide = lambda attempt: Fate(stuck=True)
    node = cluster.prefill["prefill-0"]
    Client(cluster, "decode-0").submit(list(range(50)))
    await until(lambda: node.pool.counts().pinned > 0 and bool(cluster.exchange.stuck))
    for link, _ in cluster.open_links:
        await link.close()
    loop = asyncio.get_running_loop()
    began = loop.time()
    await node.worker.drain(30.0)
    waited = loop.time() - began
    assert 0.05 < waited < 2 * cluster.config.handoff.lease_s
    assert node.pool.counts().pinned == 0
    cluster.exchange.decide = lambda attempt: Fate()
    cluster.exchange.release_stuck()
    await cluster.quiet()


@on_virtual_time
async def test_a_prompt_unfinished_by_a_drain_is_prefilled_by_another(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(prefill=2, step_s=0.05)
    node = cluster.prefill["prefill-0"]
    request = Client(cluster, "decode-0").submit(list(range(200)), max_tokens=3)
    await until(lambda: node.engine.steps > 0)
    await node.worker.drain(0.02)
    node.task.cancel()
    await request.finished(5)
    assert request.tokens() == request.expected()
    assert cluster.prefill["prefill-1"].engine.steps > 0
    assert node.pool.counts().pinned == 0 and node.worker.audit()["open_handoffs"] == 0
    del cluster.prefill["prefill-0"]  # a step that no task awaits may still write to its blocks
    await cluster.quiet()


@on_virtual_time
async def test_a_prompt_whose_grammar_compiles_goes_elsewhere(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not in the queue yet as its prefill worker ends."""
    cluster = make_cluster(prefill=0, decode=0, step_s=STEP_S)
    cluster.vocabulary = small_vocabulary()
    node, _ = (cluster.add_prefill(f"prefill-{number}", 64) for number in range(2))
    cluster.add_decode("decode-0", 64)
    compiled, compiling = GrammarCompiler.compiled, list[GrammarCompiler]()

    async def endless_at_the_first(
        self: GrammarCompiler, message: worker_pb2.Grammar, trace: Context | None = None
    ) -> CompiledGrammar:
        compiling.append(self)
        if len(compiling) == 2:  # the decode worker's is the first
            await asyncio.Event().wait()
        return await compiled(self, message, trace)

    monkeypatch.setattr(GrammarCompiler, "compiled", endless_at_the_first)
    grammar = worker_pb2.Grammar(text=choice_grammar(["yes"]), vocabulary=cluster.vocabulary.digest)
    client = Client(cluster, "decode-0")
    request = client.submit(list(range(30)), grammar=grammar, stop=(END,))
    await until(lambda: len(compiling) == 2)
    await node.worker.drain(0.02)
    node.task.cancel()
    await request.finished(1)
    assert text_of(request.tokens()) == "yes" and not request.asked[-1].failed_boot_ids
    await cluster.quiet()
