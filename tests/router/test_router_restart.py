"""A router that was just started: nothing is placed before it knows what its workers hold, and
no request waits for that beyond its bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import grpc
import pytest
from structlog.testing import capture_logs

from baton.proto import client_pb2, client_pb2_grpc
from baton.router.fleet.fleet import INDEX_NOT_REBUILT
from baton.runtime.errors import Unavailable
from baton.runtime.identity import chain, cluster_key, root, tenant_salt
from tests.support.dispatch_scene import DispatchScene
from tests.support.machine_speed import slowness
from tests.support.router_process import FAST_ROUTER, RunningRouter, StartGrpcRouter, StartRouter
from tests.support.scripted_worker import ScriptedWorker
from tests.support.virtual_time import on_virtual_time
from tests.support.waiting import eventually

pytestmark = pytest.mark.timed

TOKEN = "a secret of the test"
KEY = cluster_key(TOKEN)
PROMPT = "the quick brown fox jumps over the lazy dog and the cat sleeps in the warm sun " * 4
Ask = Callable[..., Awaitable[str]]


async def by_http(
    running: RunningRouter, stub: client_pb2_grpc.InferenceStub, within_s: float = 60
) -> str:
    reply = await running.http.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": PROMPT, "max_tokens": 2},
        headers={"x-request-deadline": f"{within_s:g}"},
    )
    return {200: "answered", 504: "late"}.get(reply.status_code, reply.text)


async def by_grpc(
    running: RunningRouter, stub: client_pb2_grpc.InferenceStub, within_s: float = 60
) -> str:
    asked = client_pb2.GenerateRequest(model="tiny", prompt=PROMPT, max_tokens=2)
    try:
        async for _ in stub.Generate(asked, timeout=within_s):
            pass
    except grpc.aio.AioRpcError as error:
        late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        return "late" if late else str(error.details())
    return "answered"


both_ways = pytest.mark.parametrize("ask", [by_http, by_grpc])


async def ready(running: RunningRouter) -> bool:
    return bool((await running.http.get("/readyz")).status_code == 200)


async def blocks_of_the_prompt(running: RunningRouter) -> list[bytes]:
    tokens = (await running.http.post("/tokenize", json={"prompt": PROMPT})).json()["tokens"]
    parent = root(KEY, "f" * 32, "float32", salt=tenant_salt(KEY, b"", b""))
    held: list[bytes] = chain(KEY, parent, tokens, 16)
    assert len(held) > 2
    return held


@both_ways
async def test_a_request_waits_for_the_index_and_goes_to_its_prefix(
    ask: Ask, grpc_router: StartGrpcRouter
) -> None:
    config = replace(FAST_ROUTER, rebuild_s=60)
    names = ("decode-0", "decode-1")  # equal costs: the first would be taken
    async with grpc_router(config=config, workers=names, wait=False, tells_blocks=False) as (
        running,
        stub,
    ):
        other, holder = running.workers.values()
        holder.blocks = await blocks_of_the_prompt(running)
        asking = asyncio.ensure_future(ask(running, stub))
        await eventually(lambda: other.seen("hello") and holder.seen("hello"))
        other.tells_blocks = True  # one has told, not all
        # The request may not be placed in this time: one worker has not reported.
        await asyncio.sleep(0.15)
        assert not asking.done() and not await ready(running)
        assert not other.seen("submit") and not holder.seen("submit")
        holder.tells_blocks = True
        assert await asking == "answered"
        assert holder.seen("submit") and not other.seen("submit")
        assert await ready(running)


@both_ways
async def test_a_worker_that_never_reports_delays_within_the_bound(
    ask: Ask, grpc_router: StartGrpcRouter
) -> None:
    config = replace(FAST_ROUTER, rebuild_s=0.5)
    with capture_logs() as logs:
        async with grpc_router(config=config, wait=False, tells_blocks=False) as (running, stub):
            asking = asyncio.ensure_future(ask(running, stub))
            (worker,) = running.workers.values()

            def rebuilt() -> bool:
                found = any(line["event"] == "index rebuilt" for line in logs)
                assert found or not worker.seen("submit")
                return found

            await eventually(rebuilt)
            async with asyncio.timeout(5 * slowness()):
                assert await asking == "answered"
        reported = [line for line in logs if line["event"] == "index rebuilt"]
    assert reported[0]["missing"] == ["decode-0"] and reported[0]["seconds"] >= 0.5


@both_ways
async def test_a_deadline_ends_the_wait_for_the_index(
    ask: Ask, grpc_router: StartGrpcRouter
) -> None:
    config = replace(FAST_ROUTER, rebuild_s=60)
    async with grpc_router(config=config, wait=False, tells_blocks=False) as (running, stub):
        (worker,) = running.workers.values()
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        assert await ask(running, stub, 0.3) == "late"
        assert 0.2 < loop.time() - started_s < 20  # the index would take sixty
        worker.tells_blocks = True
        await eventually(lambda: ready(running))
        assert not worker.seen("submit")
        assert await ask(running, stub) == "answered"


async def test_the_reason_of_the_delay_is_reported(router: StartRouter) -> None:
    config = replace(FAST_ROUTER, rebuild_s=60)
    async with router(config=config, wait=False, tells_blocks=False) as running:
        await eventually(lambda: running.workers["decode-0"].seen("hello"))
        reply = await running.http.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": "a"},
            headers={"x-request-deadline": f"{slowness():g}"},
        )
        assert reply.status_code == 504 and INDEX_NOT_REBUILT in reply.json()["error"]["message"]


async def test_a_late_worker_without_reports_delays_nothing(
    router: StartRouter,
) -> None:
    async with router(config=replace(FAST_ROUTER, rebuild_s=60)) as running:
        later = ScriptedWorker(
            "decode-1", running.registry, running.vocabulary, TOKEN, tells_blocks=False
        )
        await later.start()
        await eventually(lambda: later.seen("hello"))
        async with asyncio.timeout(30):  # of 60
            while not later.seen("submit"):  # it is used, too
                replies = [running.complete(max_tokens=1) for _ in range(4)]
                assert {reply.status_code for reply in await asyncio.gather(*replies)} == {200}
        await later.die()


@on_virtual_time
async def test_the_wait_for_the_index_is_bounded_by_that_for_a_worker() -> None:
    scene = DispatchScene()
    scene.fleet.known = False
    with pytest.raises(Unavailable, match="not known yet"):
        await scene.start()
    assert not scene.link().sent and len(scene.dispatcher) == 0
    waiting = asyncio.create_task(scene.start())
    await scene.settle_down()
    assert not waiting.done()
    scene.fleet.known = True
    await waiting
    assert [submit.attempt for submit in scene.link().submits()] == [1]
