"""Workers with blocks of unlike sizes, as processes over NIXL: a prompt's KV goes one way, and that
of a turn's answer back. In some fleets KV dtypes and numbers of ranks differ too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import httpx
import pytest

from chaos.cluster import Cluster, Site
from tests.support.conversation import FIRST, NEW, SHOWN_S, answer
from tests.support.request_load import Choices, RequestLoad

pytestmark = pytest.mark.timeout(300)

TURNS = 4  # of which a late first contact may cost one its READ
# Settings of the prefill worker and of the decode worker; whether their KV is alike and exact.
FLEETS: dict[str, tuple[str, str, bool]] = {
    "16-32": ("pool.block_size=16", "pool.block_size=32", True),
    "32-16": ("pool.block_size=32", "pool.block_size=16", True),
    "16-64": ("pool.block_size=16", "pool.block_size=64", True),
    "64-16 with two ranks": ("pool.block_size=64 worker.tp=2", "pool.block_size=16", True),
    "16-32 with int8": ("pool.block_size=16", "pool.block_size=32 pool.kv_dtype=int8", False),
}


@pytest.fixture(scope="module")
def load(make_load: Callable[..., RequestLoad]) -> RequestLoad:
    return make_load(10, seed=41)


@pytest.fixture(scope="module", params=FLEETS)
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, bool]]:
    prefill, decode, exact = FLEETS[request.param]

    def site(name: str) -> Site:
        own = decode if name.startswith("decode") else prefill if name != "router" else ""
        return Site(settings=tuple(own.split()))

    settings = ("router.placement=disaggregated", "handoff.lease_s=2.0")
    cluster = Cluster(tmp_path_factory.mktemp("sizes"), settings, site)
    try:
        yield cluster.start(1, 1), exact
    finally:
        cluster.close()
        print(cluster.logs())


@pytest.mark.nightly  # tests/stories/test_unlike_sizes.py has the same in one process
async def test_blocks_of_unlike_sizes_are_exchanged_both_ways(
    fleet: tuple[Cluster, bool],
    load: RequestLoad,
    expected: list[Choices],
    compare: Callable[..., list[str]],
) -> None:
    cluster, exact = fleet
    answers = await load.run(cluster.url, concurrency=4)
    if exact:
        assert not compare(answers, expected)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        prompt = FIRST
        for _ in range(TURNS):
            prompt = [*prompt, *(await answer(client, prompt)), *NEW]
            # Routers have to hear of the cached blocks; they report no end of that.
            await asyncio.sleep(SHOWN_S)
            if cluster.metric("prefill-0", "baton_cached_read_blocks_total"):
                break
    assert cluster.metric("decode-0", "baton_reordered_blocks_total") > 0
    assert cluster.metric("prefill-0", "baton_cached_read_blocks_total") > 0
    assert cluster.metric("prefill-0", "baton_reordered_blocks_total") > 0  # the answer's
    assert cluster.total("baton_local_prefills_total") == 0
    assert cluster.total("baton_checksum_failures_total") == 0
    cluster.quiet(within_s=5.0)
