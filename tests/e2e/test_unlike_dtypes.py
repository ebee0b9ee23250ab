"""A prefill worker in bf16 and a decode worker with KV in int8, as processes: KV is converted on
its way over NIXL, and the answer of a turn on its way back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from chaos.cluster import Cluster, Site
from tests.support.conversation import FIRST, NEW, SHOWN_S, answer

pytestmark = pytest.mark.timeout(300)

SAMPLED = {"temperature": 0.9, "seed": 5}


def site(name: str) -> Site:
    return Site(settings=("pool.kv_dtype=int8",) if name.startswith("decode") else ())


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = ("router.placement=disaggregated", "handoff.lease_s=1.0")
    cluster = Cluster(tmp_path_factory.mktemp("unlike"), settings, site)
    try:
        yield cluster.start(1, 1)
    finally:
        cluster.close()
        print(cluster.logs())


@pytest.mark.nightly  # tests/stories/test_unlike_dtypes.py has the same in one process
async def test_kv_is_converted_both_ways(fleet: Cluster) -> None:
    async with httpx.AsyncClient(base_url=fleet.url, timeout=60) as client:
        first = await answer(client, FIRST, **SAMPLED)
        prefilled = fleet.metric("prefill-0", "baton_converted_blocks_total")
        assert prefilled == -(-len(FIRST) // 16)
        assert fleet.metric("decode-0", "baton_handoffs_total", outcome="completed") == 1
        # Routers have to hear of the cached blocks; they report no end of that.
        await asyncio.sleep(SHOWN_S)
        await answer(client, [*FIRST, *first, *NEW], **SAMPLED)
    assert fleet.metric("decode-0", "baton_converted_blocks_total") > 0  # the answer's
    assert fleet.metric("prefill-0", "baton_cached_read_blocks_total") > 0
    assert fleet.metric("decode-0", "baton_handoffs_total", outcome="completed") == 2
    assert fleet.total("baton_checksum_failures_total") == 0
    fleet.quiet(within_s=5.0)
