"""A conversation through real processes: its answers are READ from the decode worker over NIXL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.timeout(420)

TURNS = 3
ANSWER_TOKENS = 60
BLOCK_TOKENS = 16
FIRST = [40 + number % 200 for number in range(300)]  # token ids
NEW = [300, 301, 302, 303, 304]
SHOWN_S = 2.0  # within which a router knows what a worker has cached


async def talk(url: str) -> list[list[int]]:
    """Return the prompts and answers of all turns, in their order."""
    prompt, found = FIRST, []
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for _ in range(TURNS):
            body = {
                "model": "small",
                "prompt": prompt,
                "max_tokens": ANSWER_TOKENS,
                "ignore_eos": True,
                "temperature": 0.9,
                "seed": 5,
                "return_token_ids": True,
            }
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            found += [prompt, choice["token_ids"]]
            prompt = [*prompt, *choice["token_ids"], *NEW]
            await asyncio.sleep(SHOWN_S)
    return found


@pytest.mark.nightly
async def test_later_turns_read_what_the_decode_worker_has(
    make_cluster: Callable[..., Any],
) -> None:
    """The answers equal those of a fleet that computes the history again."""
    settings = "router.placement=disaggregated", "worker.deterministic=true"
    again = make_cluster(*settings, "router.read_cached=false").start(1, 1)
    expected = await talk(again.url)
    assert again.total("baton_cached_read_blocks_total") == 0
    history = (TURNS - 1) * ANSWER_TOKENS
    new = len(FIRST) + (TURNS - 1) * len(NEW)
    assert computed(again) >= new + history
    again.quiet(within_s=3.0)

    cluster = make_cluster(*settings).start(1, 1)
    assert await talk(cluster.url) == expected
    read = cluster.metric("prefill-0", "baton_cached_read_blocks_total")
    turns = int(cluster.metric("prefill-0", "baton_cached_reads_total", outcome="complete"))
    assert TURNS - 2 <= turns < TURNS  # a slow machine's first contact takes too long for one
    answers = turns * (ANSWER_TOKENS // BLOCK_TOKENS)
    assert answers - TURNS < read <= answers + TURNS
    assert cluster.metric("prefill-0", "baton_cached_read_bytes_total") > 0
    computed_answers = (TURNS - 1 - turns) * ANSWER_TOKENS
    assert computed(cluster) <= new + computed_answers + TURNS * BLOCK_TOKENS
    cluster.quiet(within_s=3.0)


def computed(cluster: Any) -> float:
    return float(cluster.metric("prefill-0", "baton_tokens_total", kind="prompt"))
