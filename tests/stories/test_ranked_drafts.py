"""Prompts computed and decoded over unlike numbers of ranks beside a draft model: the tokens are
those of plain decoding, acceptance is that of one process, and a lost rank costs no answer."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import torch

from baton.engine.ranks.loading import RankRunner
from baton.models.embedded import embedded_draft, embedded_model
from baton.runtime.errors import DeviceLost
from baton.simulation.fleet.client import Client
from benchmarks.fleets.fixed_speculators import FixedDraft
from benchmarks.fleets.speculating_cluster import SpeculatingCluster
from benchmarks.inputs.speculation_workloads import chats
from benchmarks.speculation import Served, TinyTexts, cluster_of, serve
from tests.support.engine_probe import runner_of
from tests.support.waiting import eventually

# `make test` has their parts: tests/engine/test_rank_drafts.py, tests/e2e/test_ranks.py.
pytestmark = pytest.mark.nightly

RULES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "n": 2, "seed": 7},
    {"temperature": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
)
NOTICED_S = 3.0  # from the end of a rank to the end of its worker
HOW: dict[str, Any] = {"dtype": "float32", "threads": 1}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def asked() -> list[dict[str, Any]]:
    """One request for each rule and way of its prompt, by handoff or local."""
    texts = TinyTexts()
    return [
        texts.ask(prompt, local=local, max_tokens=32, **rules)
        for prompt, rules in zip(chats(2, len(RULES)), RULES, strict=True)
        for local in (False, True)
    ]


@asynccontextmanager
async def drafting(prefill: int, decode: int) -> AsyncIterator[SpeculatingCluster]:
    """Workers of so many ranks, all with the shipped draft model."""
    how = {**HOW, "ranks": (prefill, decode), "draft": embedded_draft()}
    async with cluster_of(embedded_model(), partial(FixedDraft, 4), **how) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def plain(asked: list[dict[str, Any]]) -> list[list[int]]:
    async def answers() -> list[list[int]]:
        async with cluster_of(embedded_model(), lambda: None, **HOW) as cluster:
            return (await serve(cluster, asked, at_once=1)).answers

    return asyncio.run(answers())


@pytest.fixture(scope="module")
def one_process(asked: list[dict[str, Any]]) -> Served:
    async def served() -> Served:
        async with drafting(1, 1) as cluster:
            return await serve(cluster, asked, at_once=1)

    return asyncio.run(served())


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(1, 2), (2, 1), (2, 2)],
)
async def test_answers_and_acceptance_equal_those_of_one_process(
    asked: list[dict[str, Any]],
    plain: list[list[int]],
    one_process: Served,
    prefill: int,
    decode: int,
) -> None:
    async with drafting(prefill, decode) as cluster:
        found = await serve(cluster, asked, at_once=1)
        await cluster.quiet()
    assert found.answers == one_process.answers == plain
    assert found.accepted_share == one_process.accepted_share > 0.3


async def test_a_rank_that_dies_under_speculation_costs_no_answer(
    asked: list[dict[str, Any]], plain: list[list[int]]
) -> None:
    single = [ask for ask in asked if ask.get("n", 1) == 1]
    wanted = [answer for answer, ask in zip(plain, _choices(asked), strict=True) if ask in single]
    async with drafting(1, 2) as cluster:
        cluster.add_decode("decode-1", cluster.blocks)
        first, second = Client(cluster, "decode-0"), Client(cluster, "decode-1")
        requests = [first.submit(**ask) for ask in single]
        node = cluster.decode["decode-0"]
        await eventually(
            lambda: any(o.accepted_proposal for each in requests for o in each.outputs)
        )
        runner = runner_of(node.engine)
        assert isinstance(runner, RankRunner)
        os.kill(runner.group.process_ids[0], signal.SIGKILL)
        with pytest.raises(DeviceLost, match="rank 1"):
            await asyncio.wait_for(node.task, NOTICED_S)
        answers = []
        for ask, request in zip(single, requests, strict=True):
            tokens = request.tokens()
            if len(tokens) < ask["max_tokens"] and tokens[-1:] != [ask["stop"][0]]:
                rest = second.submit(**ask, accepted=tokens)
                await rest.finished(60)
                tokens += rest.tokens()
            answers.append(tokens)
        assert answers == wanted
        del cluster.decode["decode-0"]
        await cluster.quiet(within_s=2 * cluster.config.handoff.lease_s)


def _choices(asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The request of each answer."""
    return [ask for ask in asked for _ in range(ask.get("n", 1))]
