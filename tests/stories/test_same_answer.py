"""Real schedulers and handoffs over real engines of a small bf16 model: the same request gives
the same tokens wherever and beside whomever it runs, and memory that runs out ends one request."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.engine.cpu.dot_bf16 import supported
from baton.engine.scheduling.batch import StepBatch, StepResult
from baton.models.embedded import embedded_model
from baton.models.random_model import make_shaped_model
from baton.proto import worker_pb2
from baton.simulation.fleet.client import Client, Request
from baton.simulation.fleet.model_cluster import ModelCluster
from tests.support.decoder_probe import parts_of
from tests.support.engine_probe import Compute, replace_compute, runner_of
from tests.support.machine_speed import slowness

BLOCK = 8
CHOOSER = random.Random(3)
PROMPT = [CHOOSER.randrange(200) for _ in range(61)]


@pytest.fixture
async def made() -> AsyncIterator[list[ModelCluster]]:
    clusters: list[ModelCluster] = []
    yield clusters
    for cluster in clusters:
        await cluster.close()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of sizes that the bfloat16 kernels take, with blocks of 16."""
    return make_shaped_model(
        tmp_path_factory.mktemp("wide"),
        layers=2,
        hidden=128,
        heads=4,
        kv_heads=2,
        head_dim=64,
        ffn=192,
        vocab=4096,
        dtype="bfloat16",
        seed=5,
    )


def start(
    made: list[ModelCluster],
    *,
    folder: Path | None = None,
    blocks: int = 120,
    kv_dtype: str = "auto",
    block_size: int = BLOCK,
    **step: int,
) -> Client:
    cluster = ModelCluster(
        folder or embedded_model(), kv_dtype=kv_dtype, block_size=block_size, **step
    )
    made.append(cluster)
    cluster.add_prefill("prefill-0", 64)
    cluster.add_decode("decode-0", blocks)
    return Client(cluster, "decode-0")


def ask(client: Client, prompt: list[int] = PROMPT, local: bool = False) -> Request:
    return client.submit(prompt, max_tokens=24, temperature=1.0, seed=11, local=local)


async def tokens(request: Request) -> list[int]:
    await request.finished(60 * slowness())
    assert request.end().end == worker_pb2.LENGTH
    return request.tokens()


async def test_alone_in_a_crowd_here_and_there(made: list[ModelCluster]) -> None:
    client = start(made)
    alone = await tokens(ask(client, local=True))
    assert len(set(alone)) > 5
    assert await tokens(ask(client, local=True)) == alone  # from this worker's cache
    assert await tokens(ask(client)) == alone  # half of it in the cache, the rest sent for

    client = start(made, chunk_tokens=40)
    crowd = [ask(client, [n, *PROMPT[: 5 * n]], local=n % 2 == 0) for n in range(1, 9)]
    assert await tokens(ask(client)) == alone  # prefilled elsewhere, in other chunks
    assert await tokens(ask(client, local=True)) == alone
    for other in crowd:
        await tokens(other)
    await made[1].quiet()


async def test_so_too_by_the_kernels_of_bfloat16(made: list[ModelCluster], wide: Path) -> None:
    """In a crowd, prefilled here or there, in other chunks, preempted and computed again."""
    client = start(made, folder=wide, block_size=16)
    alone = await tokens(ask(client, local=True))
    assert len(set(alone)) > 5
    if supported():
        decoder = runner_of(made[0].engines[0]).decoder
        assert type(parts_of(decoder).attention).__name__ == "InvariantBfloatAttention"
    assert await tokens(ask(client)) == alone
    client = start(made, folder=wide, block_size=16, chunk_tokens=33, prefill_tokens=47)
    crowd = [ask(client, [n, *PROMPT[: 7 * n]], local=n % 2 == 0) for n in range(1, 9)]
    assert await tokens(ask(client)) == alone
    assert await tokens(ask(client, local=True)) == alone
    for other in crowd:
        await tokens(other)
    client = start(made, folder=wide, block_size=16, blocks=10, expected_growth_tokens=1)
    old, young = (ask(client, prompt, local=True) for prompt in ([7, *PROMPT], PROMPT))
    assert await tokens(young) == alone
    await tokens(old)
    assert made[2].decode["decode-0"].worker.audit()["preemptions"] > 0
    await made[2].quiet()


@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("fp8_e4m3", marks=pytest.mark.nightly)])
async def test_kv_in_eight_bits_sent_for_or_not(made: list[ModelCluster], kv_dtype: str) -> None:
    """What one process computes is what two do: codes and scales move with their block."""
    client = start(made, kv_dtype=kv_dtype)
    alone = await tokens(ask(client, local=True))
    assert len(set(alone)) > 5
    assert made[0].engines[0].pool.kv_dtype == f"{kv_dtype} of bfloat16"
    client = start(made, kv_dtype=kv_dtype, chunk_tokens=40)
    crowd = [ask(client, [n, *PROMPT[: 7 * n]], local=n % 2 == 0) for n in range(1, 5)]
    assert await tokens(ask(client)) == alone  # prefilled elsewhere, in other chunks
    assert await tokens(ask(client, local=True)) == alone  # from the blocks that were fetched
    for other in crowd:
        await tokens(other)
    assert made[1].exchange.reads > 0
    await made[1].quiet()


async def test_preempted_and_computed_again(made: list[ModelCluster]) -> None:
    alone = await tokens(ask(start(made), local=True))
    client = start(made, blocks=19, expected_growth_tokens=1)
    old = ask(client, [7, *PROMPT], local=True)
    young = ask(client, local=True)
    assert await tokens(young) == alone
    await tokens(old)
    assert made[1].decode["decode-0"].worker.audit()["preemptions"] > 0
    await made[1].quiet()


async def test_a_prompt_that_memory_is_too_short_for_fails_alone(
    made: list[ModelCluster],
) -> None:
    """On the decode worker no step with this prompt's tokens finds memory; the others', which
    share its steps, do."""
    client = start(made)
    expected = await tokens(ask(client, local=True))
    large = [5] * 60

    def short_of_memory(compute: Compute) -> Compute:
        def short(batch: StepBatch) -> StepResult:
            if any(list(item.tokens) == large[: len(item.tokens)] for item in batch.slices):
                raise MemoryError("no room for activations")
            return compute(batch)

        return short

    replace_compute(runner_of(made[0].decode["decode-0"].engine), short_of_memory)
    good = [ask(client, [n, *PROMPT], local=True) for n in (1, 2)]
    bad = ask(client, large, local=True)
    again = ask(client, local=True)
    await bad.finished(60 * slowness())
    assert bad.end().end == worker_pb2.FAILED
    assert bad.end().failure.code == "OutOfMemory"
    assert "no room for activations" in bad.end().failure.detail
    for request in good:
        assert len(await tokens(request)) == 24
    assert await tokens(again) == expected
    await made[0].quiet()
