"""gRPC clients against a router with scripted workers: deadlines that pass, and clients that leave,
in every phase of a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from baton.proto import client_pb2
from baton.router.dispatch.dispatcher import Dispatcher
from baton.router.grpc_frontend.call import ClientCall
from baton.runtime import metrics
from tests.support.machine_speed import slowness
from tests.support.metric_values import metric_value
from tests.support.router_process import FAST_ROUTER, RunningRouter, StartGrpcRouter, refused
from tests.support.waiting import eventually

pytestmark = pytest.mark.timed

CODE = grpc.StatusCode
DEADLINE_S = slowness()  # within which a processor has to bring a call to its phase
MARGIN_S = 0.15 * DEADLINE_S  # for a router that shares its processors with other tests


@pytest.fixture(autouse=True)
def wide_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's answer comes before the client's own clock ends the call."""
    monkeypatch.setattr("baton.router.grpc_frontend.call.DEADLINE_MARGIN_S", MARGIN_S)


def prompted(**fields: Any) -> client_pb2.GenerateRequest:
    return client_pb2.GenerateRequest(model="tiny", prompt="the quick brown", **fields)


async def taken(
    call: AsyncIterable[client_pb2.GenerateResponse],
) -> list[client_pb2.GenerateResponse]:
    return [message async for message in call]


def count(outcome: str) -> float:
    return metric_value(metrics.REQUESTS.labels(outcome))


def passed(phase: str) -> float:
    return metric_value(metrics.DEADLINES_PASSED.labels(phase))


# -- deadlines -------------------------------------------------------------------------------


async def test_a_deadline_while_the_message_comes(grpc_router: StartGrpcRouter) -> None:
    async with (
        grpc_router() as (running, _),
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        before = passed("receiving")
        open_call = channel.stream_stream("/baton.client.v1.Inference/Generate")
        error = await refused(open_call(timeout=0.5 * DEADLINE_S))
        assert error.code() is CODE.DEADLINE_EXCEEDED
        assert passed("receiving") == before + 1


async def test_a_deadline_in_the_queue(grpc_router: StartGrpcRouter) -> None:
    async with grpc_router(workers=(), wait=False) as (_, stub):
        before = passed("placing")
        error = await refused(stub.Generate(prompted(), timeout=DEADLINE_S))
        assert error.code() is CODE.DEADLINE_EXCEEDED and "no decode worker" in error.details()
        assert dict(error.trailing_metadata())["x-error-code"] == "deadline_exceeded"
        assert passed("placing") == before + 1


@pytest.mark.parametrize("pause_at", [0, 3], ids=["prefill", "decode"])
async def test_a_deadline_at_a_worker(
    grpc_router: StartGrpcRouter,
    fair_watch: Callable[[], AbstractAsyncContextManager[Callable[[], float]]],
    pause_at: int,
) -> None:
    async with grpc_router() as (running, stub):
        worker = running.workers["decode-0"]
        worker.pause_at = pause_at
        before, failed = passed("answering"), count("failed")
        loop = asyncio.get_running_loop()
        async with fair_watch() as so_far_s:
            started_s = loop.time()
            error = await refused(stub.Generate(prompted(), timeout=DEADLINE_S))
            assert error.code() is CODE.DEADLINE_EXCEEDED
            assert loop.time() - started_s > 0.9 * DEADLINE_S - MARGIN_S
            assert so_far_s() < DEADLINE_S + 2.0
        (submit,) = worker.seen("submit")
        assert 0 < submit.deadline_ms <= 1000 * DEADLINE_S
        await eventually(lambda: not worker.held)
        assert (passed("answering"), count("failed")) == (before + 1, failed + 1)


async def test_the_longest_life_is_a_setting_also_for_longer_deadlines(
    grpc_router: StartGrpcRouter,
) -> None:
    config = replace(FAST_ROUTER, request_s=0.3)
    async with grpc_router(config=config) as (running, stub):
        running.workers["decode-0"].pause_at = 0
        for timeout in (None, 3600):
            error = await refused(stub.Generate(prompted(), timeout=timeout))
            assert error.code() is CODE.DEADLINE_EXCEEDED
        assert all(s.deadline_ms <= 300 for s in running.workers["decode-0"].seen("submit"))


async def test_a_deadline_that_is_over_reaches_no_worker(
    grpc_router: StartGrpcRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, over = ClientCall.read, asyncio.Event()

    async def late(self: ClientCall, *what: Any, **how: Any) -> Any:
        try:
            message = await read(self, *what, **how)
            await asyncio.sleep(DEADLINE_S)  # The message comes after the deadline.
        finally:
            over.set()
        return message

    async with grpc_router() as (running, stub):
        monkeypatch.setattr(ClientCall, "read", late)
        error = await refused(stub.Generate(prompted(), timeout=0.5 * DEADLINE_S))
        assert error.code() is CODE.DEADLINE_EXCEEDED
        await asyncio.wait_for(over.wait(), 20)
        # Nothing may be submitted in this time.
        await asyncio.sleep(0.1)
        assert not running.workers["decode-0"].seen("submit")


# -- clients that leave -----------------------------------------------------------------------


async def test_a_cancel_in_the_queue(
    grpc_router: StartGrpcRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, begun = Dispatcher.start, asyncio.Event()

    def noted(*request: Any) -> Any:
        begun.set()
        return start(*request)

    monkeypatch.setattr(Dispatcher, "start", noted)
    async with grpc_router() as (running, stub):
        worker = running.workers["decode-0"]
        worker.draining = True
        await eventually(lambda: _unready(running))
        before = count("cancelled")
        call = stub.Generate(prompted())
        await asyncio.wait_for(begun.wait(), 20)
        call.cancel()
        await eventually(lambda: count("cancelled") == before + 1)
        worker.draining = False
        await running.ready()
        await taken(stub.Generate(prompted(max_tokens=1)))
        assert len(worker.seen("submit")) == 1


async def _unready(running: RunningRouter) -> bool:
    return bool((await running.http.get("/readyz")).status_code == 503)


@pytest.mark.parametrize("pause_at", [0, 3], ids=["prefill", "decode"])
async def test_a_cancel_at_a_worker(grpc_router: StartGrpcRouter, pause_at: int) -> None:
    async with grpc_router() as (running, stub):
        worker = running.workers["decode-0"]
        worker.pause_at = pause_at
        before = count("cancelled")
        call = stub.Generate(prompted(n=2))
        await eventually(lambda: bool(worker.held))
        if pause_at:
            assert (await call.read()).pieces
        call.cancel()
        await eventually(lambda: not worker.held)
        (submit,), (cancel,) = worker.seen("submit"), worker.seen("cancel")
        assert cancel.request_id == submit.request_id
        await eventually(lambda: count("cancelled") == before + 1)


async def test_a_channel_that_closes_is_a_client_that_leaves(grpc_router: StartGrpcRouter) -> None:
    async with grpc_router() as (running, _):
        worker = running.workers["decode-0"]
        worker.pause_at = 1
        channel = grpc.aio.insecure_channel(running.grpc_address)
        generate = channel.unary_stream("/baton.client.v1.Inference/Generate")
        call = generate(prompted().SerializeToString())
        await eventually(lambda: bool(worker.held))
        await channel.close()
        await eventually(lambda: not worker.held)
        assert call.done()


async def test_only_a_client_that_does_not_read_is_cancelled(
    grpc_router: StartGrpcRouter,
) -> None:
    config = replace(FAST_ROUTER, stream_buffer_messages=16)
    narrow = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with (
        grpc_router(config=config) as (running, stub),
        grpc.aio.insecure_channel(running.grpc_address, options=narrow) as channel,
    ):
        worker = running.workers["decode-0"]
        generate = channel.unary_stream("/baton.client.v1.Inference/Generate")
        asked = prompted(max_tokens=4000, n=16, logprobs=20, ignore_eos=True)
        idle = generate(asked.SerializeToString())
        await eventually(lambda: bool(worker.seen("submit")))
        messages = await taken(stub.Generate(prompted(max_tokens=30)))
        assert any(piece.text for message in messages for piece in message.pieces)
        await eventually(lambda: len(worker.seen("cancel")) == 1)
        await taken(stub.Generate(prompted(max_tokens=3)))
        error = await refused(idle)
        assert error.code() is CODE.CANCELLED and "slowly" in error.details()
