"""Disaggregated or not, the tokens are the same: mixed requests through real processes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from chaos.cluster import Cluster
from tests.support.machine_speed import timers
from tests.support.request_load import Choices, RequestLoad

pytestmark = pytest.mark.timeout(420)

CONCURRENCY = 32
FEW = 24  # requests in `make test`
# no lease ends because processes that share two cores have their turn late
SETTINGS = ("router.placement=disaggregated", *timers())


Expected = Callable[[int], Awaitable[list[Choices]]]


@pytest.fixture(scope="module")
def load(make_load: Callable[..., RequestLoad]) -> RequestLoad:
    return make_load(200, seed=7)


@pytest.fixture(scope="module")
def expected(load: RequestLoad, alone: Cluster) -> Expected:
    """`await expected(count)`: the right answers to the first requests of the load."""
    known: list[Choices] = []

    async def answers(count: int) -> list[Choices]:
        if len(known) < count:
            known[:] = await load.run(alone.url, concurrency=8, first=count)
            assert alone.total("baton_handoffs_total", outcome="completed") == 0
        return known[:count]

    return answers


@pytest.mark.parametrize("requests", [FEW, pytest.param(200, marks=pytest.mark.nightly)])
async def test_mixed_requests_give_the_tokens_of_one_process(
    make_cluster: Callable[..., Cluster],
    load: RequestLoad,
    expected: Expected,
    compare: Callable[..., list[str]],
    requests: int,
) -> None:
    cluster = make_cluster(*SETTINGS).start(1, 2)
    answers = await load.run(cluster.url, CONCURRENCY, first=requests)
    found = compare(answers, await expected(requests))
    assert not found, f"{len(found)} choices differ:\n" + "\n".join(found[:5])
    completed = cluster.total("baton_handoffs_total", outcome="completed")
    # a request whose router finds a stop string in its first token needs no KV: it is cut short
    short = cluster.total("baton_handoffs_total", outcome="cancelled")
    assert completed + short == requests and completed > requests / 2
    assert cluster.total("baton_handoffs_total", outcome="failed") == 0
    assert cluster.total("baton_local_prefills_total", reason="placed") == 0
    assert cluster.total("baton_local_prefills_total", reason="no_candidate") == 0
    for name in ("decode-0", "decode-1"):  # both had their share
        share = cluster.metric(name, "baton_handoffs_total", outcome="completed")
        assert share > requests / 10
    assert {reason for answer in answers for c in answer.values() for reason in c["finish"]} >= {
        "stop",
        "length",
    }
    cluster.quiet(within_s=1.0)


@pytest.mark.parametrize("verify", [True, pytest.param(False, marks=pytest.mark.nightly)])
async def test_corrupted_blocks_change_tokens_unless_they_are_verified(
    make_cluster: Callable[..., Cluster],
    load: RequestLoad,
    expected: Expected,
    compare: Callable[..., list[str]],
    corrupting: tuple[str, ...],
    verify: bool,
) -> None:
    """The comparison above can fail: its model depends on every block of KV."""
    cluster = make_cluster(*SETTINGS)
    cluster.start(1, 1, command=corrupting if verify else (*corrupting, "unverified"))
    answers = await load.run(cluster.url, CONCURRENCY, first=FEW)
    found = compare(answers, await expected(FEW))
    if verify:
        assert not found, "\n".join(found[:5])
        assert cluster.total("baton_checksum_failures_total") > 0
    else:
        assert len(found) >= 3
    cluster.quiet(within_s=1.0)
