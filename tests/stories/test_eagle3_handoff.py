"""Prompts computed by one worker and decoded by another beside an EAGLE-3 head: the tokens are
those of plain decoding, and acceptance is that of one worker."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest
import torch

from baton.decode_worker.speculator import Speculator
from benchmarks.fleets.fixed_speculators import FixedDraft
from benchmarks.fleets.speculating_cluster import SpeculatingCluster
from benchmarks.speculation import Served, after_a_kill, cluster_of, serve
from tests.support.eagle3_heads import TrainedPair, train_pair

RULES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "n": 3},
    {"temperature": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
)
STOP = (198,)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TrainedPair:
    torch.set_num_threads(1)
    return train_pair(tmp_path_factory.mktemp("pair"))


def beside_head(pair: TrainedPair) -> AbstractAsyncContextManager[SpeculatingCluster]:
    make: Callable[[], Speculator] = partial(FixedDraft, 4, "eagle3")
    options = {"dtype": "float32", "backend": "torch", "draft_kind": "eagle3"}
    return cluster_of(pair.target, make, draft=pair.head, **options)


def asks(
    pair: TrainedPair, *, local: bool, rules: tuple[dict[str, Any], ...]
) -> list[dict[str, Any]]:
    """One request for each rule, of the prompts in turn."""
    fields = {"max_tokens": 24, "stop": STOP, "local": local}
    prompts = itertools.cycle(pair.prompts)
    return [
        {"prompt": prompt, **fields, **rule} for prompt, rule in zip(prompts, rules, strict=False)
    ]


async def plain_answers(pair: TrainedPair, asked: list[dict[str, Any]]) -> Served:
    async with cluster_of(pair.target, lambda: None, dtype="float32", backend="torch") as cluster:
        return await serve(cluster, asked, at_once=len(asked))


async def test_answers_equal_those_of_plain_decoding(pair: TrainedPair) -> None:
    asked = [ask for local in (True, False) for ask in asks(pair, local=local, rules=RULES)]
    plain = await plain_answers(pair, asked)
    async with beside_head(pair) as cluster:
        found = await serve(cluster, asked, at_once=len(asked))
    assert found.answers == plain.answers
    assert found.accepted_share > 0.1


@pytest.mark.nightly
async def test_answers_go_on_after_their_worker_was_killed(pair: TrainedPair) -> None:
    asked = asks(pair, local=False, rules=RULES[:2] * 3)
    plain = await plain_answers(pair, asked)
    async with beside_head(pair) as cluster:
        assert await after_a_kill(cluster, asked) == plain.answers


async def test_acceptance_by_handoff_is_that_of_one_worker(pair: TrainedPair) -> None:
    shares = []
    for local in (True, False):
        async with beside_head(pair) as cluster:
            found = await serve(cluster, asks(pair, local=local, rules=({}, {})), at_once=1)
        shares.append(found.accepted_share)
    assert shares[0] == shares[1] > 0.3
