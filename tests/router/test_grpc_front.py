"""The gRPC server itself: off by default, its port, and the bounds that gRPC holds for it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterable
from dataclasses import replace

import grpc
import pytest

from baton.proto import client_pb2, client_pb2_grpc
from baton.router.grpc_frontend import frontend as grpc_front
from baton.router.grpc_frontend.inference import SERVICE, InferenceService
from baton.runtime.config import Config, RouterConfig
from baton.runtime.errors import ConfigError
from baton.runtime.settings.checks import validate
from tests.support.machine_speed import slowness
from tests.support.router_process import FAST_ROUTER, StartGrpcRouter, StartRouter, refused
from tests.support.waiting import eventually

pytestmark = pytest.mark.timed

CODE = grpc.StatusCode
ALONE = ("grpc.use_local_subchannel_pool", 1)  # a connection of its own


def asked(text: str = "a") -> client_pb2.GenerateRequest:
    return client_pb2.GenerateRequest(model="tiny", prompt=text, max_tokens=1)


async def test_it_is_off_by_default(router: StartRouter) -> None:
    assert RouterConfig().grpc_port == -1
    async with router() as running:
        assert running.grpc_address == ""


async def test_a_port_in_use_is_named(router: StartRouter) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} .*gRPC.*router\.grpc_port"):
            async with router(config=replace(FAST_ROUTER, grpc_port=port)):
                pass


async def test_an_open_host_needs_keys(router: StartRouter) -> None:
    config = replace(FAST_ROUTER, host="0.0.0.0", grpc_port=0)
    with pytest.raises(ConfigError, match=r"router\.host.*router\.api_keys"):
        async with router(config=config):
            pass


async def test_calls_that_have_ended_and_watchers_hold_up_no_end(
    grpc_router: StartGrpcRouter,
) -> None:
    """However long the drain may last; a second signal then ends what is open."""
    config = replace(FAST_ROUTER, drain_s=3600.0)
    async with grpc_router(config=config) as (running, stub):
        async for _ in stub.Generate(asked()):
            pass
        async with grpc.aio.insecure_channel(running.grpc_address) as channel:
            watching = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
            assert await watching.read()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(running.serving, 5 * slowness())
    async with grpc_router(config=config) as (running, stub):
        running.workers["decode-0"].step_s = 0.05
        long = client_pb2.GenerateRequest(model="tiny", prompt="a", max_tokens=2000)
        call = stub.Generate(long)
        await eventually(lambda: running.workers["decode-0"].held)
        os.kill(os.getpid(), signal.SIGTERM)
        # Nothing may end in this time after the first signal.
        await asyncio.sleep(0.5)
        assert not running.serving.done() and not call.done()
        os.kill(os.getpid(), signal.SIGTERM)
        assert "the router stops" in str((await refused(call)).details())
        await asyncio.wait_for(running.serving, 10 * slowness())


async def test_an_endless_message_does_not_outlast_a_second_signal(
    grpc_router: StartGrpcRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.router.server.LAST_EVENT_S", 0.3)
    async with (
        grpc_router(config=replace(FAST_ROUTER, drain_s=3600.0)) as (running, _),
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        call = channel.stream_stream(f"/{SERVICE}/Generate")()
        assert await channel.unary_unary(f"/{SERVICE}/ListModels")(b"")  # so it has come before
        os.kill(os.getpid(), signal.SIGTERM)
        # Nothing may end in this time after the first signal.
        await asyncio.sleep(0.5)
        assert not running.serving.done() and not call.done()  # its message may come
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running.serving, 10 * slowness())
        await refused(call)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"grpc_port": 8000}, "the same"),
        ({"grpc_port": -2}, r"router\.grpc_port is -2"),
        ({"grpc_port": 70_000}, r"router\.grpc_port is 70000"),
    ],
)
def test_ports_that_cannot_be(fields: dict[str, int], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        validate(Config(router=RouterConfig(**fields)))
    validate(Config(router=RouterConfig(port=0, grpc_port=0)))


async def test_the_address_is_where_it_listens(grpc_router: StartGrpcRouter) -> None:
    async with grpc_router() as (running, _):
        host, port = running.grpc_address.split(":")
        assert host == "127.0.0.1" and int(port) != int(running.url.rsplit(":", 1)[1])


@pytest.mark.usefixtures("ipv6")
async def test_an_ipv6_address_stands_in_brackets(grpc_router: StartGrpcRouter) -> None:
    async with grpc_router(config=replace(FAST_ROUTER, host="::1"), wait=False) as (running, stub):
        assert running.grpc_address.startswith("[::1]:")
        assert (await stub.ListModels(client_pb2.ListModelsRequest())).models


async def test_the_served_methods_are_those_of_the_contract(grpc_router: StartGrpcRouter) -> None:
    service = client_pb2.DESCRIPTOR.services_by_name["Inference"]
    assert service.full_name == SERVICE == "baton.client.v1.Inference"
    served = InferenceService.methods(object.__new__(InferenceService))
    assert set(served) == {method.name for method in service.methods}
    async with (
        grpc_router() as (running, _),
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        error = await refused(channel.unary_stream(f"/{SERVICE}/Other")(b""))
        assert error.code() is CODE.UNIMPLEMENTED


async def test_a_large_message_is_refused_and_others_go_on(grpc_router: StartGrpcRouter) -> None:
    config = replace(FAST_ROUTER, max_body_bytes=100_000)
    async with grpc_router(config=config) as (running, stub):
        error = await refused(stub.Generate(asked("a" * 100_001)))
        assert error.code() is CODE.RESOURCE_EXHAUSTED
        assert await read_all(stub.Generate(asked()))
        assert len(running.workers["decode-0"].seen("submit")) == 1


async def test_a_compressed_message_is_refused_unopened(grpc_router: StartGrpcRouter) -> None:
    """Ten bytes that become a gigabyte are never made into one."""
    async with grpc_router() as (running, stub):
        call = stub.Generate(asked("a" * 100_000), compression=grpc.Compression.Gzip)
        assert (await refused(call)).code() is CODE.UNIMPLEMENTED
        assert await read_all(stub.Generate(asked()))


async def test_large_headers_are_refused(grpc_router: StartGrpcRouter) -> None:
    async with grpc_router() as (_, stub):
        error = await refused(stub.Generate(asked(), metadata=(("x-a", "a" * 20_000),)))
        assert error.code() is CODE.RESOURCE_EXHAUSTED
        assert await read_all(stub.Generate(asked(), metadata=(("x-a", "a" * 1000),)))


async def test_connections_are_bounded(grpc_router: StartGrpcRouter) -> None:
    async def models(channel: grpc.aio.Channel) -> bool:
        stub = client_pb2_grpc.InferenceStub(channel)
        try:
            return bool((await stub.ListModels(client_pb2.ListModelsRequest(), timeout=5)).models)
        except grpc.aio.AioRpcError as error:
            assert error.code() in (CODE.UNAVAILABLE, CODE.DEADLINE_EXCEEDED)
            return False

    async with grpc_router(
        config=replace(FAST_ROUTER, max_requests=3, connections_per_request=1)
    ) as (running, _):
        channels = [
            grpc.aio.insecure_channel(running.grpc_address, options=[ALONE]) for _ in range(6)
        ]
        let_in = await asyncio.gather(*(models(channel) for channel in channels))
        assert sum(let_in) == 3
        for channel in channels:
            await channel.close()


async def test_a_silent_client_is_disconnected(
    grpc_router: StartGrpcRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_front, "HANDSHAKE_TIMEOUT_S", 1)
    async with grpc_router() as (running, stub):
        host, port = running.grpc_address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(10):
            await reader.read()  # to its end
        writer.close()
        assert await read_all(stub.Generate(asked()))


async def test_an_idle_connection_is_closed_and_opened_again(
    grpc_router: StartGrpcRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_front, "IDLE_TIMEOUT_S", 1)
    async with grpc_router() as (running, _):
        address = running.grpc_address
        async with grpc.aio.insecure_channel(address, options=[ALONE]) as channel:
            stub = client_pb2_grpc.InferenceStub(channel)
            assert await read_all(stub.Generate(asked()))
            idle = grpc.ChannelConnectivity.IDLE
            await eventually(lambda: channel.get_state() is idle, limit_s=10)
            assert await read_all(stub.Generate(asked()))


async def test_after_the_end_the_port_is_free(grpc_router: StartGrpcRouter) -> None:
    async with grpc_router() as (running, stub):
        assert await read_all(stub.Generate(asked()))
        host, port = running.grpc_address.split(":")
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind((host, int(port)))


async def read_all(
    call: AsyncIterable[client_pb2.GenerateResponse],
) -> list[client_pb2.GenerateResponse]:
    return [message async for message in call]
