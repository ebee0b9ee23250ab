"""grpc.health.v1, on the wire as its own clients speak it: checked, watched, open without a key."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.proto import client_pb2
from baton.router.grpc_frontend import health as grpc_health
from tests.support.router_process import FAST_ROUTER, StartGrpcRouter
from tests.support.waiting import eventually

SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
SERVICE_UNKNOWN = b"\x08\x03"
OURS = b"\x0a\x19baton.client.v1.Inference"  # service = 1


def check(channel: grpc.aio.Channel, asked: bytes = b"") -> grpc.aio.UnaryUnaryCall[bytes, bytes]:
    method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
    method = channel.unary_unary("/grpc.health.v1.Health/Check")
    return method(asked)


def watch(channel: grpc.aio.Channel, asked: bytes = b"") -> grpc.aio.UnaryStreamCall[bytes, bytes]:
    method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
    method = channel.unary_stream("/grpc.health.v1.Health/Watch")
    return method(asked)


async def test_it_says_what_readyz_says(grpc_router: StartGrpcRouter) -> None:
    async with (
        grpc_router() as (running, _),
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        assert await check(channel) == SERVING == await check(channel, OURS)
        await running.workers["decode-0"].die()

        async def red() -> bool:
            return bool(await check(channel) == NOT_SERVING)

        await eventually(red)
        assert (await running.http.get("/readyz")).status_code == 503


async def test_list_names_each_service_and_its_status(grpc_router: StartGrpcRouter) -> None:
    async with (
        grpc_router() as (running, _),
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        listed = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
        serving = health_pb2.HealthCheckResponse(status=1)
        assert dict(listed.statuses) == {"": serving, "baton.client.v1.Inference": serving}


async def test_a_service_that_is_not_there(grpc_router: StartGrpcRouter) -> None:
    async with (
        grpc_router() as (running, _),
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await check(channel, b"\x0a\x05other")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        watching = watch(channel, b"\x0a\x05other")
        assert await watching.read() == SERVICE_UNKNOWN
        watching.cancel()


async def test_it_needs_no_key(grpc_router: StartGrpcRouter) -> None:
    async with (
        grpc_router(config=replace(FAST_ROUTER, api_keys=("k",))) as (running, stub),
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        assert await check(channel) == SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="API keys"):
            await stub.ListModels(client_pb2.ListModelsRequest())


async def test_a_watching_client_gets_each_change_and_the_end(grpc_router: StartGrpcRouter) -> None:
    async with (
        grpc_router(workers=("decode-0",)) as (running, _),
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        worker = running.workers["decode-0"]
        watching = watch(channel)
        async with asyncio.timeout(20):
            assert await watching.read() == SERVING
            worker.draining = True
            assert await watching.read() == NOT_SERVING
            worker.draining = False
            assert await watching.read() == SERVING
            running.serving.cancel()
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                while (last := await watching.read()) is not grpc.aio.EOF:
                    assert last == NOT_SERVING
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        await eventually(lambda: running.serving.done())


async def test_watching_clients_are_bounded(
    grpc_router: StartGrpcRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_health, "MAX_WATCHERS", 1)
    async with (
        grpc_router() as (running, _),
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        first = watch(channel)
        assert await first.read() == SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="watch already") as refused:
            await watch(channel).read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        first.cancel()

        async def let_in() -> bool:
            again = watch(channel)
            try:
                return bool(await again.read() == SERVING)
            except grpc.aio.AioRpcError:
                return False
            finally:
                again.cancel()

        await eventually(let_in)


async def test_a_question_that_does_not_come_is_not_waited_for(
    grpc_router: StartGrpcRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_health, "HEALTH_READ_TIMEOUT_S", 0.1)
    async with (
        grpc_router() as (running, _),
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        call = channel.stream_stream("/grpc.health.v1.Health/Check")()
        with pytest.raises(grpc.aio.AioRpcError, match=r"within 0\.1 s") as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
