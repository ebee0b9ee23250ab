"""Workers of one and two ranks in one fleet, with a draft model and without: the same tokens, and
a rank that dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chaos.cluster import Cluster, Place

pytestmark = pytest.mark.timeout(300)

RANKS = {"prefill-0": 2, "prefill-1": 1, "decode-0": 1, "decode-1": 2}


def place(name: str) -> Place:
    return Place(settings=(f"worker.tp={RANKS.get(name, 1)}",))


@pytest.fixture(scope="module")
def load(make_load: Callable[..., Any]) -> Any:
    return make_load(24, seed=31)


@pytest.fixture(scope="module", params=["draft", pytest.param("off", marks=pytest.mark.nightly)])
def speculate(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, speculate: str) -> Iterator[Cluster]:
    settings = (
        "router.placement=disaggregated",
        "handoff.lease_s=1.0",
        f"worker.speculate={speculate}",
    )
    cluster = Cluster(tmp_path_factory.mktemp("ranks"), settings, place)
    try:
        yield cluster.start(2, 2)
    finally:
        cluster.close()
        print(cluster.logs())


def ranks_of(cluster: Cluster, name: str) -> list[int]:
    """Process ids of a worker's ranks, the leader aside."""
    found = subprocess.run(
        ["pgrep", "-P", str(cluster.pid(name)), "-f", "rank_process"],
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(pid) for pid in found.stdout.split()]


async def test_unlike_numbers_of_ranks_exchange_kv(
    fleet: Cluster, load: Any, expected: Any, compare: Callable[..., list[str]], speculate: str
) -> None:
    assert not compare(await load.run(fleet.url, concurrency=6), expected)
    accepted = fleet.total("baton_accepted_tokens_total", proposer="draft")
    assert (accepted > 0) == (speculate == "draft")
    fleet.quiet(within_s=5.0)


async def test_a_rank_that_dies_costs_no_answer(
    fleet: Cluster, load: Any, expected: Any, compare: Callable[..., list[str]], until: Any
) -> None:
    asking = asyncio.create_task(load.run(fleet.url, concurrency=8, salt="a rank dies"))
    await until(lambda: fleet.audit("decode-1")["running"] >= 1)
    os.kill(ranks_of(fleet, "decode-1")[0], signal.SIGKILL)
    await until(lambda: not fleet.alive("decode-1"), within_s=5.0)
    assert not compare(await asking, expected)
