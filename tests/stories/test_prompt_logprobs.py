"""Log-probabilities of prompts over real schedulers, handoffs and engines: the same numbers
wherever the prompt is computed, all of them whatever is cached, and once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.engine.scheduling.batch import Scoring, Slice, StepBatch
from baton.models.embedded import embedded_model
from baton.proto import worker_pb2
from baton.simulation.fleet.client import Client, Request
from baton.simulation.fleet.model_cluster import ModelCluster
from tests.support.machine_speed import slowness

PROMPT = [7 + 3 * n % 190 for n in range(131)]
TOP = 2
LIMIT_S = 60 * slowness()


@pytest.fixture
async def cluster() -> AsyncIterator[ModelCluster]:
    made = ModelCluster(embedded_model(), block_size=8)
    made.add_prefill("prefill-0", 64)
    made.add_decode("decode-0", 120)
    yield made
    await made.close()


async def scores(client: Client, **asked: Any) -> list[worker_pb2.PromptLogprobs]:
    """Those of all outputs that have some."""
    request = client.submit(PROMPT, **{"max_tokens": 3, "prompt_logprobs": TOP, **asked})
    await request.finished(LIMIT_S)
    return reported(request)


def reported(request: Request) -> list[worker_pb2.PromptLogprobs]:
    carriers = [o for o in request.outputs if o.HasField("prompt_logprobs")]
    assert all((o.index, o.choice) == (0, 0) for o in carriers)
    return [output.prompt_logprobs for output in carriers]


async def test_the_same_numbers_wherever_the_prompt_is_computed(cluster: ModelCluster) -> None:
    client = Client(cluster, "decode-0")
    plain = client.submit(PROMPT, max_tokens=3)
    await plain.finished(LIMIT_S)
    assert reported(plain) == []
    found = []
    for local in (True, False):
        for choices in (1, 3):  # the second time the prompt is cached, on both workers
            found += await scores(client, local=local, n=choices)
    assert len(found) == 4 and all(each == found[0] for each in found)
    assert len(found[0].logprobs) == len(found[0].ranks) == len(PROMPT) - 1
    engine = cluster.engines[0]
    targets = Scoring(PROMPT[1:], TOP)
    slice_ = Slice(PROMPT, 0, tuple(range(40, 57)), scoring=targets)
    wanted = (await engine.submit(StepBatch((slice_,))).result()).scores[0]
    assert list(found[0].ranks) == wanted.ranks
    assert list(found[0].logprobs) == pytest.approx(wanted.logprobs, rel=1e-6)
    assert list(found[0].top_tokens) == wanted.top_tokens


@pytest.mark.nightly
async def test_nothing_is_scored_again_after_the_first_token(cluster: ModelCluster) -> None:
    """A request that goes on elsewhere has its prompt's numbers already."""
    client = Client(cluster, "decode-0")
    request = client.submit(PROMPT, max_tokens=5, prompt_logprobs=TOP, accepted=[9, 9])
    await request.finished(LIMIT_S)
    assert reported(request) == []


async def test_preempted_prompt_is_scored_from_its_start() -> None:
    """Under a pool that is too small for all, prompts lose their blocks half computed."""
    cluster = ModelCluster(embedded_model(), block_size=8)
    cluster.add_prefill("prefill-0", 24)
    cluster.add_decode("decode-0", 40)
    try:
        client = Client(cluster, "decode-0")
        requests = [
            client.submit([*PROMPT[n:], *PROMPT[:n]], max_tokens=40, prompt_logprobs=0, local=n > 1)
            for n in range(4)
        ]
        for request in requests:
            await request.finished(2 * LIMIT_S)
            (found,) = reported(request)
            assert len(found.logprobs) == len(PROMPT) - 1
        assert cluster.decode["decode-0"].worker.audit()["preemptions"] > 0
    finally:
        await cluster.close()


async def test_one_token_has_no_numbers_and_still_an_answer(cluster: ModelCluster) -> None:
    client = Client(cluster, "decode-0")
    for local in (True, False):
        request = client.submit([5], max_tokens=2, prompt_logprobs=TOP, local=local)
        await request.finished(LIMIT_S)
        (found,) = reported(request)
        assert not found.logprobs and len(request.tokens()) == 2


async def test_prompt_is_scored_by_the_next_candidate(cluster: ModelCluster) -> None:
    """The first prefill worker dies with the prompt: the numbers come once, from the second."""
    cluster.add_prefill("prefill-1", 64)
    client = Client(cluster, "decode-0")
    wanted = await scores(client)
    request = client.submit(PROMPT, max_tokens=3, prompt_logprobs=TOP)
    await cluster.kill_prefill("prefill-0")
    await request.finished(LIMIT_S)
    assert reported(request) == wanted
