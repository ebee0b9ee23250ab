"""Disaggregated or not, the tokens are the same: 200 mixed requests through real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(420)

REQUESTS = 200
CONCURRENCY = 32


@pytest.fixture(scope="module")
def load(make_load: Callable[..., Any]) -> Any:
    return make_load(REQUESTS, seed=7)


@pytest.fixture(scope="module")
def expected(load: Any, alone: Any) -> Any:
    answers = asyncio.run(load.run(alone.url, concurrency=8))
    assert alone.total("baton_handoffs_total", outcome="completed") == 0
    return answers


async def test_200_mixed_requests_give_the_tokens_of_one_process(
    make_cluster: Callable[..., Any], load: Any, expected: Any, compare: Callable[..., list[str]]
) -> None:
    cluster = make_cluster("router.placement=disaggregated").start(1, 2)
    answers = await load.run(cluster.url, CONCURRENCY)
    found = compare(answers, expected)
    assert not found, f"{len(found)} choices differ:\n" + "\n".join(found[:5])
    completed = cluster.total("baton_handoffs_total", outcome="completed")
    # a request that ends with its first token needs no KV: its handoff is cut short
    short = cluster.total("baton_handoffs_total", outcome="cancelled")
    assert completed + short == REQUESTS and completed > REQUESTS / 2
    assert cluster.total("baton_handoffs_total", outcome="failed") == 0
    assert cluster.total("baton_local_prefills_total", reason="placed") == 0
    assert cluster.total("baton_local_prefills_total", reason="no_candidate") == 0
    assert all(cluster.metric(f"decode-{n}", "baton_handoffs_total", outcome="completed") > 20
               for n in range(2))  # both had their share  # fmt: skip
    assert {reason for answer in answers for c in answer.values() for reason in c["finish"]} >= {
        "stop",
        "length",
    }
    cluster.quiet(within_s=1.0)


@pytest.mark.parametrize("verify", [True, pytest.param(False, marks=pytest.mark.nightly)])
async def test_corrupted_blocks_change_tokens_unless_they_are_verified(
    make_cluster: Callable[..., Any],
    load: Any,
    expected: Any,
    compare: Callable[..., list[str]],
    corrupting: tuple[str, ...],
    verify: bool,
) -> None:
    """The comparison above can fail: its model depends on every block of KV."""
    cluster = make_cluster("router.placement=disaggregated", f"handoff.verify={verify}")
    cluster.start(1, 1, command=corrupting)
    few = len(load.bodies) // 5
    answers = await load.run(cluster.url, CONCURRENCY, first=few)
    found = compare(answers, expected[:few])
    if verify:
        assert not found, "\n".join(found[:5])
        assert cluster.total("baton_checksum_failures_total") > 0
    else:
        assert len(found) >= 3
    cluster.quiet(within_s=1.0)
