"""Workers of one and two ranks in one fleet, with a draft model and without: the same tokens, also
while they change roles, drain, or lose a rank."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from chaos.cluster import Cluster, Site
from tests.support.machine_speed import slowness, timers
from tests.support.request_load import Choices, RequestLoad

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

RANKS = {"prefill-0": 2, "prefill-1": 1, "decode-0": 1, "decode-1": 2}


def site(name: str) -> Site:
    return Site(settings=(f"worker.tp={RANKS.get(name, 1)}",))


@pytest.fixture(scope="module")
def load(make_load: Callable[..., RequestLoad]) -> RequestLoad:
    return make_load(14, seed=31)


@pytest.fixture(scope="module", params=["draft", "off"])
def speculate(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory, speculate: str, patient: tuple[str, ...]
) -> Iterator[Cluster]:
    settings = (
        "router.placement=disaggregated",
        *timers(lease_s=1.0),
        f"worker.speculate={speculate}",
    )
    cluster = Cluster(tmp_path_factory.mktemp("ranks"), settings, site)
    try:
        yield cluster.start(2, 2, command=patient)
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


def lives(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


async def test_unlike_numbers_of_ranks_exchange_kv(
    fleet: Cluster,
    load: RequestLoad,
    expected: list[Choices],
    compare: Callable[..., list[str]],
    speculate: str,
) -> None:
    assert not compare(await load.run(fleet.url, concurrency=6), expected)
    accepted = fleet.total("baton_accepted_tokens_total", proposer="draft")
    assert (accepted > 0) == (speculate == "draft")
    assert {name: fleet.metric(name, "baton_ranks") for name in RANKS} == RANKS
    fleet.quiet(within_s=5.0)


async def test_ranks_that_change_their_role_cost_no_answer(
    fleet: Cluster,
    load: RequestLoad,
    expected: list[Choices],
    compare: Callable[..., list[str]],
    until: Callable[..., Awaitable[None]],
) -> None:
    """The ranks are the same processes in both roles."""
    before = ranks_of(fleet, "decode-1")
    for role in ("prefill", "decode"):
        asking = asyncio.create_task(load.run(fleet.url, concurrency=8, salt=role))
        await until(lambda: fleet.audit("decode-0")["running"] >= 1)
        await asyncio.to_thread(fleet.change_role, "decode-1", role)
        assert not compare(await asking, expected)
        assert ranks_of(fleet, "decode-1") == before
        assert not compare(await load.run(fleet.url, concurrency=8, salt=f"as {role}"), expected)
    fleet.quiet(within_s=5.0)


async def test_a_rank_that_dies_costs_no_answer(
    fleet: Cluster,
    load: RequestLoad,
    expected: list[Choices],
    compare: Callable[..., list[str]],
    until: Callable[..., Awaitable[None]],
) -> None:
    asking = asyncio.create_task(load.run(fleet.url, concurrency=8, salt="a rank dies"))
    await until(lambda: fleet.audit("decode-1")["running"] >= 1)
    os.kill(ranks_of(fleet, "decode-1")[0], signal.SIGKILL)
    await until(lambda: not fleet.alive("decode-1"), within_s=5.0 * slowness())
    assert not compare(await asking, expected)


async def test_ranks_that_drain_cost_no_answer(
    fleet: Cluster,
    load: RequestLoad,
    expected: list[Choices],
    compare: Callable[..., list[str]],
    until: Callable[..., Awaitable[None]],
) -> None:
    """Of the prefill worker with ranks, while decode workers read from it. A supervisor signals all
    processes of a worker."""
    ranks = ranks_of(fleet, "prefill-0")
    asking = asyncio.create_task(load.run(fleet.url, concurrency=8, salt="ranks drain"))
    await until(lambda: fleet.audit("prefill-0")["open_handoffs"] >= 1)
    for rank in ranks:
        os.kill(rank, signal.SIGTERM)
    assert await asyncio.to_thread(fleet.terminate, "prefill-0") == 0
    assert not compare(await asking, expected)
    assert ranks and not any(map(lives, ranks))
    fleet.quiet(within_s=5.0)
