"""Processes that die or stop while requests are under way: every client still gets its tokens."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.timeout(240)

LEASE_S = 1.0  # as make_busy has it
STOPPED_S = 10.0
SILENCE = "router.link_silence_s=1.5"


@pytest.fixture(scope="module")
def load(make_streams: Callable[..., Any]) -> Any:
    return make_streams(24, seed=11)


def in_handoff(cluster: Any, name: str) -> Callable[[], bool]:
    """Whether a reader is in the middle of fetching from this prefill worker."""

    def look() -> bool:
        audit = cluster.audit(name)
        return audit["open_handoffs"] > 0 and audit["blocks"]["pinned"] > 0

    return look


def mid_stream(cluster: Any, name: str) -> Callable[[], bool]:
    return lambda: cluster.audit(name)["running"] >= 2


async def test_a_prefill_worker_killed_in_a_handoff(
    until: Any,
    make_busy: Callable[..., Any],
    load: Any,
    expected: Any,
    compare: Callable[..., list[str]],
) -> None:
    cluster = make_busy(SILENCE).start(2, 1)
    running = asyncio.create_task(load.run(cluster.url, concurrency=16))
    await until(in_handoff(cluster, "prefill-0"))
    cluster.kill("prefill-0")
    assert not running.done()
    assert not compare(await running, expected)
    assert cluster.total("baton_handoffs_total", outcome="failed") >= 1
    cluster.quiet(within_s=LEASE_S + 1.0)


async def test_the_only_prefill_worker_killed_in_a_handoff(
    until: Any,
    make_busy: Callable[..., Any],
    load: Any,
    expected: Any,
    compare: Callable[..., list[str]],
) -> None:
    cluster = make_busy(SILENCE).start(1, 2)
    running = asyncio.create_task(load.run(cluster.url, concurrency=16))
    await until(in_handoff(cluster, "prefill-0"))
    cluster.kill("prefill-0")
    assert not running.done()
    assert not compare(await running, expected)
    assert cluster.total("baton_local_prefills_total", reason="no_candidate") >= 1
    cluster.quiet(within_s=LEASE_S + 1.0)


async def test_a_decode_worker_killed_mid_stream(
    until: Any,
    make_busy: Callable[..., Any],
    load: Any,
    expected: Any,
    compare: Callable[..., list[str]],
) -> None:
    cluster = make_busy(SILENCE).start(1, 2)
    running = asyncio.create_task(load.run(cluster.url, concurrency=16))
    await until(mid_stream(cluster, "decode-0"))
    cluster.kill("decode-0")
    assert not running.done()
    assert not compare(await running, expected)
    cluster.quiet(within_s=LEASE_S + 1.0)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_a_worker_stopped_for_ten_seconds(
    until: Any,
    make_busy: Callable[..., Any],
    load: Any,
    expected: Any,
    compare: Callable[..., list[str]],
    name: str,
) -> None:
    cluster = make_busy(SILENCE).start(1, 2)
    running = asyncio.create_task(load.run(cluster.url, concurrency=16))
    await until((in_handoff if name == "prefill-0" else mid_stream)(cluster, name))
    cluster.kill(name, signal.SIGSTOP)
    stopped = time.monotonic()
    assert not running.done()
    assert not compare(await running, expected)
    await asyncio.sleep(max(0.0, stopped + STOPPED_S - time.monotonic()))
    cluster.kill(name, signal.SIGCONT)
    cluster.quiet(within_s=LEASE_S + 4.0)  # its lease, and what it had in its sockets
    assert not compare(await load.run(cluster.url, concurrency=8), expected)  # it serves again


async def test_a_killed_worker_that_comes_back_is_used_again(
    make_busy: Callable[..., Any], load: Any, expected: Any, compare: Callable[..., list[str]]
) -> None:
    cluster = make_busy(SILENCE).start(1, 1)
    cluster.kill("prefill-0")
    cluster.start_worker("prefill", "prefill-0")
    cluster.wait_ready(2)
    before = cluster.total("baton_handoffs_total", outcome="completed")

    async def handed_off() -> bool:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            body = {"model": "small", "prompt": "a stone in the river", "max_tokens": 3}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        return bool(cluster.total("baton_handoffs_total", outcome="completed") > before)

    deadline = time.monotonic() + 20
    while not await handed_off():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
    assert not compare(await load.run(cluster.url, concurrency=8), expected)
    cluster.quiet(within_s=1.0)
