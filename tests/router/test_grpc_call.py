"""What stands before every method: whose call it is, how many there are, what it sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from dataclasses import replace
from typing import NoReturn, cast

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse
from structlog.testing import capture_logs

from baton.proto import client_pb2
from baton.router.grpc_frontend import call as grpc_call
from baton.router.grpc_frontend.call import ClientCall
from baton.router.requests.loop_budget import LoopBudget
from baton.router.requests.validator import Validator
from baton.runtime.config import RouterConfig
from tests.support.router_process import FAST_ROUTER, StartGrpcRouter, refused
from tests.support.virtual_time import on_virtual_time
from tests.support.waiting import eventually

pytestmark = pytest.mark.timed

GENERATE = "/baton.client.v1.Inference/Generate"
MODELS = "/baton.client.v1.Inference/ListModels"
CODE = grpc.StatusCode


class Context:
    """What a ClientCall asks of gRPC; `left_s` is the call's deadline."""

    def __init__(self, left_s: float | None = None) -> None:
        self.left_s = left_s
        self.sent: list[object] = []
        self.hangs = False

    def time_remaining(self) -> float | None:
        return self.left_s

    async def read(self) -> None:
        await asyncio.sleep(3600)  # This client never sends a message.

    async def send_initial_metadata(self, metadata: object) -> None:
        self.sent.append(metadata)

    async def write(self, message: bytes) -> None:
        if self.hangs:
            await asyncio.sleep(3600)  # This client never accepts a message.
        self.sent.append(message)


def call_of(context: Context, longest_s: float = 60.0) -> ClientCall:
    config = RouterConfig(request_s=longest_s)
    return ClientCall(
        cast(grpc.aio.ServicerContext[bytes, bytes], context),
        "req-1",
        {"a": "b"},
        config,
        LoopBudget(),
    )


@pytest.mark.parametrize(("left_s", "allowed_s"), [(None, 60.0), (5.0, 4.99), (600.0, 60.0)])
@on_virtual_time
async def test_the_deadline_is_the_calls_or_the_longest_life(
    left_s: float | None, allowed_s: float
) -> None:
    call = call_of(Context(left_s))
    now_s = asyncio.get_running_loop().time()
    assert call.deadline_s - now_s == pytest.approx(allowed_s, abs=0.011)
    assert (call.header("a"), call.header("x"), call.tenant) == ("b", "", b"")


@on_virtual_time
async def test_a_client_that_takes_nothing_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_call, "SEND_S", 0.05)
    context = Context()
    call = call_of(context)
    await call.write(HealthCheckResponse(status=1))
    await call.write(HealthCheckResponse(status=2))
    assert context.sent == [(("x-request-id", "req-1"),), b"\x08\x01", b"\x08\x02"]
    context.hangs = True
    with pytest.raises(grpc_call.ClientGone):
        await call.write(HealthCheckResponse(status=1))


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"\xff\xff\xff", "no GenerateRequest"),
        (b"\x0a\xff\x01", "no GenerateRequest"),
        (b"\x0a\x02\xff\xfe", "no GenerateRequest"),  # text that is no UTF-8
        (b"\x0b" * 200, "no GenerateRequest"),  # groups one in the other
        (b"", "give one of"),
    ],
)
async def test_what_is_no_message_is_refused(
    grpc_router: StartGrpcRouter, raw: bytes, word: str
) -> None:
    async with (
        grpc_router() as (running, stub),
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        error = await refused(channel.unary_stream(GENERATE)(raw))
        assert error.code() is CODE.INVALID_ARGUMENT and word in str(error.details())
        assert (await stub.ListModels(client_pb2.ListModelsRequest())).models


async def test_a_message_that_does_not_come(
    grpc_router: StartGrpcRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        grpc_router() as (running, _),
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        silent = channel.stream_stream(GENERATE)
        ended = silent()
        await ended.done_writing()
        error = await refused(ended)
        assert error.code() is CODE.INVALID_ARGUMENT and "without a message" in str(error.details())
        monkeypatch.setattr(ClientCall.read, "__defaults__", (0.1, None))
        error = await refused(silent())
        assert error.code() is CODE.INVALID_ARGUMENT and "within 0.1 s" in str(error.details())


async def test_calls_beyond_the_limit_are_refused_except_health(
    grpc_router: StartGrpcRouter,
) -> None:
    config = replace(FAST_ROUTER, max_requests=3, connections_per_request=1)
    async with (
        grpc_router(config=config) as (running, stub),
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        worker = running.workers["decode-0"]
        worker.pause_at = 0
        asked = client_pb2.GenerateRequest(model="tiny", prompt="a", max_tokens=1)
        held = [asyncio.create_task(read_all(stub.Generate(asked))) for _ in range(3)]
        await eventually(lambda: len(worker.held) == 3)
        error = await refused(stub.Generate(asked))
        assert error.code() is CODE.UNAVAILABLE and "too many calls" in str(error.details())
        assert dict(error.trailing_metadata())["retry-after"] == "1"
        assert await channel.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"\x08\x01"
        worker.pause_at = None
        await asyncio.gather(*held)
        await read_all(stub.Generate(asked))


async def read_all(
    call: AsyncIterable[client_pb2.GenerateResponse],
) -> list[client_pb2.GenerateResponse]:
    return [message async for message in call]


async def test_open_calls_are_bounded_too(
    grpc_router: StartGrpcRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_call, "MAX_KEYLESS_CALLS", 1)
    async with (
        grpc_router() as (running, stub),
        grpc.aio.insecure_channel(running.grpc_address) as channel,
    ):
        watching = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        assert await watching.read() == b"\x08\x01"
        with pytest.raises(grpc.aio.AioRpcError, match="too many calls"):
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"")
        assert (await stub.ListModels(client_pb2.ListModelsRequest())).models
        watching.cancel()


async def test_a_bug_before_the_answer_is_logged_and_not_shown(
    grpc_router: StartGrpcRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> NoReturn:
        raise RuntimeError("a secret of the inside")

    monkeypatch.setattr(Validator, "completion", broken)
    async with grpc_router() as (_, stub):
        with capture_logs() as reported:
            asked = client_pb2.GenerateRequest(model="tiny", prompt="a")
            metadata = (("x-request-id", "my-label"),)
            error = await refused(stub.Generate(asked, metadata=metadata))
        assert error.code() is CODE.INTERNAL and "secret" not in str(error)
        assert dict(error.trailing_metadata())["x-error-code"] == "internal_error"
        (event,) = [event for event in reported if event["event"] == "internal error raised"]
        assert event["error"].startswith("RuntimeError at ") and "secret" not in event["error"]
        assert __file__ in event["error"]
