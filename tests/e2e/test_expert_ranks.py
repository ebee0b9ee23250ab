"""A mixture of experts in one fleet of workers that divide its experts in unlike ways."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest

from baton.models.embedded import embedded_model
from chaos.cluster import Cluster, Site
from tests.support.machine_speed import slowness

pytestmark = [pytest.mark.timeout(420), pytest.mark.nightly]

SPLITS = {  # name -> worker.tp, worker.ep
    "prefill-0": (2, 2),
    "prefill-1": (1, 1),
    "decode-0": (2, 1),
    "decode-1": (2, 2),
}
ASKED = 10
ANSWER_TOKENS = 40


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mixtral with the embedded model's tokenizer."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(11)
    config = MixtralConfig(
        vocab_size=3712,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=2048,
        initializer_range=0.25,
        sliding_window=None,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    MixtralForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_model() / name, folder)
    return folder


def site(name: str) -> Site:
    tp, ep = SPLITS.get(name, (1, 1))
    return Site(settings=(f"worker.tp={tp}", f"worker.ep={ep}"))


@pytest.fixture(scope="module")
def expected(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[list[int]]]:
    """The answers of one worker that computes all in one process."""
    alone = Cluster(tmp_path_factory.mktemp("alone"), model=mixture)
    try:
        alone.start(0, 1)
        yield asyncio.run(answers(alone.url))
    finally:
        alone.close()


@pytest.fixture(scope="module")
def fleet(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = ("router.placement=disaggregated", "handoff.lease_s=1.0")
    cluster = Cluster(tmp_path_factory.mktemp("experts"), settings, site, mixture)
    try:
        yield cluster.start(2, 2)
    finally:
        cluster.close()
        print(cluster.logs())


async def answers(url: str, salt: str = "") -> list[list[int]]:
    """Return the tokens of the same greedy requests, asked at once."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def one(number: int) -> list[int]:
            body = {
                "model": "small",
                "prompt": [40 + (7 * number + at) % 900 for at in range(20 + 17 * number)],
                "max_tokens": ANSWER_TOKENS,
                "ignore_eos": True,
                "temperature": 0,
                "return_token_ids": True,
            }
            answer = await client.post(
                "/v1/completions", json=body | {"cache_salt": salt} if salt else body
            )
            assert answer.status_code == 200, answer.text
            tokens: list[int] = answer.json()["choices"][0]["token_ids"]
            return tokens

        return list(await asyncio.gather(*(one(number) for number in range(ASKED))))


async def test_workers_of_unlike_groups_exchange_kv(
    fleet: Cluster, expected: list[list[int]]
) -> None:
    assert await answers(fleet.url) == expected
    assert all(fleet.metric(name, "baton_tokens_total", kind="output") for name in decoders(fleet))
    assert all(
        fleet.metric(name, "baton_tokens_total", kind="prompt")
        for name in ("prefill-0", "prefill-1")
    )
    fleet.quiet(within_s=5.0)


def rank_of(fleet: Cluster, worker: str) -> int:
    """Return the process id of a worker's rank 1."""
    command = ["pgrep", "-P", str(fleet.pid(worker)), "-f", "rank_process"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(found.stdout.split()[0])


def decoders(fleet: Cluster) -> list[str]:
    return [name for name in fleet.workers() if name.startswith("decode")]


async def test_a_lost_rank_with_experts_costs_no_answer(
    fleet: Cluster, expected: list[list[int]], until: Callable[..., Awaitable[None]]
) -> None:
    asking = asyncio.create_task(answers(fleet.url, salt="a rank is lost"))
    await until(lambda: fleet.audit("decode-1")["running"] >= 1)
    os.kill(rank_of(fleet, "decode-1"), signal.SIGKILL)
    await until(lambda: not fleet.alive("decode-1"), within_s=5.0 * slowness())
    assert await asking == expected
