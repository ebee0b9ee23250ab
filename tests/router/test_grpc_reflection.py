"""gRPC reflection, as its own clients ask for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from grpc_reflection.v1alpha.reflection_pb2 import (
    ServerReflectionRequest,
    ServerReflectionResponse,
)

from baton.router.grpc_frontend import reflection as grpc_reflection
from tests.support.router_process import FAST_ROUTER, StartGrpcRouter, refused

LISTING = ServerReflectionRequest(list_services="")


def described(address: str) -> tuple[list[str], list[str]]:
    """Services, and the methods of ours, as the library's client finds them."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        service = DescriptorPool(database).FindServiceByName("baton.client.v1.Inference")
        return sorted(database.get_services()), sorted(service.methods_by_name)


async def test_reflection_describes_the_services(grpc_router: StartGrpcRouter) -> None:
    async with grpc_router() as (running, _):
        services, methods = await asyncio.to_thread(described, running.grpc_address)
    assert methods == ["Detokenize", "Generate", "ListModels", "Tokenize"]
    assert services == [
        "baton.client.v1.Inference",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    ]


async def test_version_1_answers_as_v1alpha_does(grpc_router: StartGrpcRouter) -> None:
    async with (
        grpc_router() as (running, _),
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        ask = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        asking = ask(iter([LISTING.SerializeToString()] * 2))
        answers = [ServerReflectionResponse.FromString(answer) async for answer in asking]
    assert len(answers) == 2
    names = {service.name for service in answers[0].list_services_response.service}
    assert "baton.client.v1.Inference" in names


async def test_reflection_needs_the_key(grpc_router: StartGrpcRouter) -> None:
    async with (
        grpc_router(config=replace(FAST_ROUTER, api_keys=("k",))) as (running, _),
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        assert (await refused(ask(iter([LISTING])))).code() is grpc.StatusCode.UNAUTHENTICATED
        allowed = ask(iter([LISTING]), metadata=(("authorization", "Bearer k"),))
        assert len([answer async for answer in allowed]) == 1


async def test_a_call_is_ended_after_its_last_allowed_question(
    grpc_router: StartGrpcRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_reflection, "MAX_QUESTIONS", 2)
    async with (
        grpc_router() as (running, _),
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        error = await refused(ask(iter([LISTING] * 3)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "2 questions" in error.details()
