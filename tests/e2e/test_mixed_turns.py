"""Conversations through real processes, whose history is READ beside ranks, speculation and
grammars: each answer is that of a worker that computes all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chaos.cluster import Cluster, Site
from tests.support.conversation import talk
from tests.support.json_values import JsonObject

pytestmark = [pytest.mark.timeout(600), pytest.mark.nightly]

TURNS = 4
ANSWER_TOKENS = 400  # of fewer, the history takes as little time to compute as to read
LONG: JsonObject = {"max_tokens": ANSWER_TOKENS}
BLOCK_TOKENS = 16
SETTINGS = ("router.placement=disaggregated", "handoff.lease_s=1.0")
PATTERN = "[a-z ]{3200}"


@contextmanager
def fleet(
    folder: Path, prefill: int, decode: int, *settings: str, ranks: dict[str, int] | None = None
) -> Iterator[Cluster]:
    def site(name: str) -> Site:
        return Site(settings=(f"worker.tp={(ranks or {}).get(name.split('-')[0], 1)}",))

    cluster = Cluster(folder, (*SETTINGS, *settings), site)
    try:
        yield cluster.start(prefill, decode)
    finally:
        cluster.close()
        print(cluster.logs())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """The answers of a worker that computes all by itself, by the kind of request."""
    alone = Cluster(tmp_path_factory.mktemp("alone"), ("router.read_cached=false",))
    try:
        alone.start(0, 1)
        return {
            "plain": asyncio.run(talk(alone.url, TURNS, **LONG)),
            "grammar": asyncio.run(talk(alone.url, TURNS, **GRAMMAR, **LONG)),
        }
    finally:
        alone.close()


GRAMMAR = {"structured_outputs": {"regex": PATTERN}}
FLEETS: dict[str, tuple[dict[str, int], tuple[str, ...], JsonObject]] = {
    "ranks of the reader": ({"prefill": 2}, ("worker.speculate=ngram",), {}),
    "ranks of the granter": ({"decode": 2}, (), GRAMMAR),
    "all": ({"prefill": 2, "decode": 2}, ("worker.speculate=ngram",), GRAMMAR),
}


@pytest.mark.parametrize("beside", FLEETS)
async def test_later_turns_are_read_beside(
    beside: str, expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    ranks, settings, fields = FLEETS[beside]
    with fleet(tmp_path, 1, 1, *settings, ranks=ranks) as cluster:
        answers = await talk(cluster.url, TURNS, **fields, **LONG)
        assert answers == expected["grammar" if fields else "plain"]
        assert reads(cluster) >= TURNS - 2  # a first contact may come too late for the first
        assert read_blocks(cluster) >= (TURNS - 2) * (ANSWER_TOKENS // BLOCK_TOKENS - 1)
        cluster.quiet(within_s=5.0)


def reads(cluster: Cluster) -> float:
    """Return how many READs of cached blocks the living workers have completed."""
    return sum(
        cluster.metric(name, "baton_cached_reads_total", outcome="complete")
        for name in cluster.records()
    )


def read_blocks(cluster: Cluster) -> float:
    names = cluster.records()
    return sum(cluster.metric(name, "baton_cached_read_blocks_total") for name in names)
