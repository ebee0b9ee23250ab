"""A collector gets the traces that are worth keeping, whatever its sample ratio is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest

from baton.router.answers.trace_store import MIN_RECENT
from baton.runtime.telemetry import tracing
from tests.support.json_values import JsonObject
from tests.support.machine_speed import slowness
from tests.support.router_process import RunningRouter, StartRouter
from tests.support.trace_collector import ListeningCollector

pytestmark = pytest.mark.timed


async def kept_at_collector(
    running: RunningRouter,
    collector: ListeningCollector,
    ask: Callable[[], Awaitable[httpx.Response]],
) -> tuple[JsonObject, dict[str, str]]:
    """The record of a request that no sample ratio takes, and the attributes of its span."""
    servicer, endpoint = collector
    tracing.setup("router", endpoint, ratio=0.0)
    found = await running.trace_of(await ask())
    tracing.shutdown(10.0)
    (root,) = [span for span in servicer.all if span.name == "request"]
    return found, {each.key: each.value.string_value for each in root.attributes}


async def test_a_collector_gets_a_preempted_request_of_no_sample(
    router: StartRouter, collector: ListeningCollector
) -> None:
    async with router() as running:
        running.workers["decode-0"].preempted_at = 2
        found, attributes = await kept_at_collector(
            running, collector, lambda: running.complete(max_tokens=4)
        )
    assert found["preempted"] and found["kept"] == ["preempted"]
    assert attributes["baton.kept"] == "preempted"


async def test_a_collector_gets_a_slow_request_of_no_sample(
    router: StartRouter, collector: ListeningCollector
) -> None:
    async with router() as running:
        for _ in range(2 * MIN_RECENT):
            await running.complete(max_tokens=1)
        running.workers["decode-0"].step_s = 0.5 * slowness()
        found, attributes = await kept_at_collector(
            running, collector, lambda: running.complete(max_tokens=1)
        )
    assert found["kept"] == ["slow"] and attributes["baton.kept"] == "slow"
    assert attributes["baton.request_id"] == found["id"]


async def test_a_collector_gets_a_failed_request_of_no_sample(
    router: StartRouter, collector: ListeningCollector
) -> None:
    servicer, endpoint = collector
    async with router() as running:
        tracing.setup("router", endpoint, ratio=0.0)
        served = await running.complete(max_tokens=2)
        await running.trace_of(served)
        (worker,) = running.workers.values()
        worker.fail_at = {0: ("ENGINE_ERROR", False)}
        reply = await running.complete(max_tokens=2)
        assert reply.status_code == 500
        found = await running.trace_of(reply)
        tracing.shutdown(10.0)
    assert found["kept"] == ["failed"]
    (root,) = [span for span in servicer.all if span.name == "request"]
    attributes = {each.key: each.value.string_value for each in root.attributes}
    assert attributes["baton.request_id"] == reply.headers["x-request-id"]
    assert attributes[tracing.ERROR_TYPE]


async def test_a_collector_gets_a_stalled_stream_of_no_sample(
    router: StartRouter, collector: ListeningCollector
) -> None:
    async with router() as running:
        worker = running.workers["decode-0"]

        async def stall() -> httpx.Response:
            worker.pause_at = 1
            asked = asyncio.create_task(running.complete(max_tokens=3, stream=True))
            # The stream stalls so long behind its first token.
            await asyncio.sleep(0.5 * slowness())
            worker.pause_at = None
            return await asked

        for _ in range(2 * MIN_RECENT):
            await running.complete(max_tokens=3, stream=True)
        found, attributes = await kept_at_collector(running, collector, stall)
    assert found["kept"] == ["slow"] and attributes["baton.kept"] == "slow"
    assert found["ttft_s"] < 0.25 * slowness() < found["total_s"]
