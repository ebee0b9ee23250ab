"""Processes that die or stop while requests are under way: every client still gets its tokens."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx
import pytest

from chaos.cluster import Cluster
from tests.support.kept_cluster import KeptCluster
from tests.support.machine_speed import timers
from tests.support.request_load import Choices, RequestLoad
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(240)

LEASE_S = 1.0  # as make_busy has it
TIMERS = timers(lease_s=LEASE_S, silence_s=1.5)


@pytest.fixture(scope="module")
def load(make_streams: Callable[..., RequestLoad]) -> RequestLoad:
    return make_streams(24, seed=11)


@pytest.fixture(scope="module")
def kept(kept_busy: Callable[..., KeptCluster]) -> KeptCluster:
    return kept_busy(*TIMERS)


@pytest.fixture
def fleet(kept: KeptCluster) -> Iterator[Cluster]:
    """One prefill and two decode workers, whole and at rest before each test and after it."""
    yield kept.whole()
    kept.at_rest()


@pytest.fixture
def under_load(
    until: Callable[..., Awaitable[None]],
    load: RequestLoad,
    expected: list[Choices],
    compare: Callable[..., list[str]],
    request: pytest.FixtureRequest,
) -> Callable[..., AbstractAsyncContextManager[None]]:
    """`async with under_load(cluster, happens)`: a load is under way, of prompts that no worker
    holds, and `happens`. What is done then is done in time, and every client gets the right
    tokens."""

    @asynccontextmanager
    async def begin(cluster: Cluster, happens: Callable[[], bool]) -> AsyncIterator[None]:
        asking = load.run(cluster.url, concurrency=16, salt=request.node.name)
        running = asyncio.create_task(asking)
        await until(happens)
        yield
        assert not running.done()
        assert not compare(await running, expected)

    return begin


def in_handoff(cluster: Cluster, name: str) -> Callable[[], bool]:
    """Whether a reader is in the middle of fetching from this prefill worker."""

    def look() -> bool:
        audit = cluster.audit(name)
        return audit["open_handoffs"] > 0 and audit["blocks"]["pinned"] > 0

    return look


def computed_by_decode(cluster: Cluster) -> float:
    """How many prompts decode workers computed: placed so, or because a handoff had failed."""
    reasons = ("placed", "no_candidate")
    return sum(cluster.total("baton_local_prefills_total", reason=reason) for reason in reasons)


def mid_stream(cluster: Cluster, name: str) -> Callable[[], bool]:
    return lambda: cluster.audit(name)["running"] >= 2


@pytest.mark.nightly
async def test_a_prefill_worker_killed_in_a_handoff(
    make_busy: Callable[..., Cluster], under_load: Callable[..., AbstractAsyncContextManager[None]]
) -> None:
    cluster = make_busy(*TIMERS).start(2, 1)
    async with under_load(cluster, in_handoff(cluster, "prefill-0")):
        cluster.kill("prefill-0")
    assert cluster.total("baton_handoffs_total", outcome="failed") >= 1
    cluster.quiet(within_s=LEASE_S + 1.0)


async def test_the_only_prefill_worker_killed_in_a_handoff(
    fleet: Cluster,
    under_load: Callable[..., AbstractAsyncContextManager[None]],
    load: RequestLoad,
    expected: list[Choices],
    compare: Callable[..., list[str]],
) -> None:
    before = computed_by_decode(fleet)
    async with under_load(fleet, in_handoff(fleet, "prefill-0")):
        fleet.kill("prefill-0")
    later = await load.run(fleet.url, concurrency=2, first=2, salt="later")  # no prompt is left
    assert not compare(later, expected[:2])
    assert computed_by_decode(fleet) > before
    fleet.quiet(within_s=LEASE_S + 1.0)


async def test_a_decode_worker_killed_mid_stream(
    fleet: Cluster, under_load: Callable[..., AbstractAsyncContextManager[None]]
) -> None:
    async with under_load(fleet, mid_stream(fleet, "decode-0")):
        fleet.kill("decode-0")
    fleet.quiet(within_s=LEASE_S + 1.0)


# decode-1, since a test before this kills decode-0: the share of a new worker grows for seconds
@pytest.mark.parametrize(
    ("name", "stopped_s"),
    [
        ("decode-1", 3.0),
        ("decode-1", 10.0),
        ("prefill-0", 10.0),
    ],
)
@pytest.mark.nightly
async def test_a_worker_stopped_for_seconds_and_continued(
    fleet: Cluster,
    under_load: Callable[..., AbstractAsyncContextManager[None]],
    load: RequestLoad,
    expected: list[Choices],
    compare: Callable[..., list[str]],
    name: str,
    stopped_s: float,
) -> None:
    happens = (in_handoff if name == "prefill-0" else mid_stream)(fleet, name)
    async with under_load(fleet, happens):
        fleet.kill(name, signal.SIGSTOP)
        stopped = time.monotonic()
    # the worker stands still for so long
    await asyncio.sleep(max(0.0, stopped + stopped_s - time.monotonic()))
    fleet.kill(name, signal.SIGCONT)
    fleet.quiet(within_s=LEASE_S + 4.0)  # its lease, and what it had in its sockets
    answers = await load.run(fleet.url, concurrency=8, first=12)  # it serves again
    assert not compare(answers, expected[:12])


@pytest.mark.nightly
async def test_a_worker_terminated_under_load_drains(
    fleet: Cluster, under_load: Callable[..., AbstractAsyncContextManager[None]]
) -> None:
    async with under_load(fleet, mid_stream(fleet, "decode-1")):
        ending = asyncio.create_task(asyncio.to_thread(fleet.terminate, "decode-1"))
    assert await ending == 0
    fleet.quiet(within_s=LEASE_S + 1.0)


@pytest.mark.nightly
async def test_a_killed_worker_that_comes_back_is_used_again(
    fleet: Cluster, load: RequestLoad, expected: list[Choices], compare: Callable[..., list[str]]
) -> None:
    fleet.kill("prefill-0")
    fleet.start_worker("prefill", "prefill-0")
    fleet.wait_ready(3)
    before = fleet.total("baton_handoffs_total", outcome="completed")

    async def handed_off() -> bool:
        async with httpx.AsyncClient(base_url=fleet.url, timeout=60) as client:
            body = {"model": "small", "prompt": "a stone in the river", "max_tokens": 3}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        return bool(fleet.total("baton_handoffs_total", outcome="completed") > before)

    await eventually(handed_off, 20, every_s=0.2)
    assert not compare(await load.run(fleet.url, concurrency=8), expected)
    fleet.quiet(within_s=1.0)
