"""A conversation through real processes: its answers are READ from the decode worker over NIXL."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from chaos.cluster import Cluster
from tests.support.conversation import ANSWER_TOKENS, FIRST, NEW, talk

pytestmark = pytest.mark.timeout(420)

TURNS = 3
BLOCK_TOKENS = 16
SAMPLED = {"temperature": 0.9, "seed": 5}


@pytest.mark.nightly
async def test_later_turns_read_what_the_decode_worker_has(
    make_cluster: Callable[..., Cluster],
) -> None:
    """The answers equal those of a fleet that computes the history again."""
    settings = "router.placement=disaggregated", "worker.deterministic=true"
    again = make_cluster(*settings, "router.read_cached=false").start(1, 1)
    expected = await talk(again.url, TURNS, **SAMPLED)
    assert again.total("baton_cached_read_blocks_total") == 0
    history = (TURNS - 1) * ANSWER_TOKENS
    new = len(FIRST) + (TURNS - 1) * len(NEW)
    assert computed(again) >= new + history
    again.quiet(within_s=3.0)

    cluster = make_cluster(*settings).start(1, 1)
    assert await talk(cluster.url, TURNS, **SAMPLED) == expected
    read = cluster.metric("prefill-0", "baton_cached_read_blocks_total")
    turns = int(cluster.metric("prefill-0", "baton_cached_reads_total", outcome="complete"))
    assert TURNS - 2 <= turns < TURNS  # a slow machine's first contact takes too long for one
    answers = turns * (ANSWER_TOKENS // BLOCK_TOKENS)
    assert answers - TURNS < read <= answers + TURNS
    assert cluster.metric("prefill-0", "baton_cached_read_bytes_total") > 0
    computed_answers = (TURNS - 1 - turns) * ANSWER_TOKENS
    assert computed(cluster) <= new + computed_answers + TURNS * BLOCK_TOKENS
    cluster.quiet(within_s=3.0)


def computed(cluster: Cluster) -> float:
    return float(cluster.metric("prefill-0", "baton_tokens_total", kind="prompt"))
