"""A handoff over a real gRPC stream: orderly end, a caller that vanishes, a server that stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc.aio
import numpy as np
import pytest

from baton.kv_transfer import checksum_numba
from baton.kv_transfer.granter import Admit, GrantingWorker, GrantReport, grant
from baton.proto import handoff_pb2, handoff_pb2_grpc
from baton.runtime.errors import Overloaded, WorkerLost
from baton.runtime.grpc_links import (
    ClientLink,
    ServerLink,
    credentials,
    open_channel,
    open_server,
)
from tests.support import handoff_stage
from tests.support.waiting import eventually

pytestmark = pytest.mark.timed

OWN = [20, 3, 21, 5, 9, 30]
THEIRS = [4, 11, 2, 7, 8, 25]
LEASE_S = 1.0


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """A worker's process loads the kernel of checksums before it serves."""
    checksum_numba.warm_up()


class Servicer(handoff_pb2_grpc.HandoffServicer):
    def __init__(self, stage: handoff_stage.Stage, admit: Admit) -> None:
        self.stage = stage
        self.admit = admit
        self.reports: list[GrantReport] = []
        self.cancelled = 0

    async def Open(self, _: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        stage = self.stage
        try:
            worker = GrantingWorker(stage.granter, b"G" * 16, stage.config)
            report = await grant(ServerLink(context), self.admit, worker)
            self.reports.append(report)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@asynccontextmanager
async def served(
    servicer: Servicer,
) -> AsyncIterator[tuple[grpc.aio.Server, handoff_pb2_grpc.HandoffStub]]:
    server = open_server("token")
    handoff_pb2_grpc.add_HandoffServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = open_channel(f"127.0.0.1:{port}")
    stub = handoff_pb2_grpc.HandoffStub(channel)
    try:
        yield server, stub
    finally:
        await channel.close()
        await server.stop(grace=2 * LEASE_S)


async def test_blocks_move_and_the_end_is_orderly() -> None:
    stage = handoff_stage.Stage(lease_s=LEASE_S)
    prompt = handoff_stage.ScriptedPrompt(
        [handoff_stage.computed(0, THEIRS), handoff_stage.first_tokens()]
    )
    servicer = Servicer(stage, lambda _: prompt)
    async with served(servicer) as (_, stub):
        link = ClientLink(stub.Open(metadata=credentials("token")))
        names = [handoff_stage.name_of(index) for index in range(6)]
        report = await stage.fetch(link, stage.opening(), OWN, names)
        await stage.ended()
    assert np.array_equal(stage.own[OWN], stage.granted[THEIRS]) and report.reads == 3
    assert [grant.end for grant in servicer.reports] == ["closed"]
    assert len(prompt.ended_at) == 1 and stage.granter.holds == 0


async def test_a_cancelled_fetch_still_says_closed() -> None:
    stage = handoff_stage.Stage(lease_s=LEASE_S)
    prompt = handoff_stage.ScriptedPrompt([handoff_stage.computed(0, THEIRS[:2]), 60.0])
    servicer = Servicer(stage, lambda _: prompt)
    async with served(servicer) as (_, stub):
        link = ClientLink(stub.Open(metadata=credentials("token")))
        names = [handoff_stage.name_of(index) for index in range(6)]
        fetch = asyncio.ensure_future(stage.fetch(link, stage.opening(), OWN, names))
        await eventually(lambda: stage.exchange.reads, 30)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        await stage.ended()
    assert [grant.end for grant in servicer.reports] == ["closed"]
    assert len(prompt.ended_at) == 1


async def test_pins_outlive_a_caller_that_vanishes() -> None:
    stage = handoff_stage.Stage(lease_s=LEASE_S)
    prompt = handoff_stage.ScriptedPrompt([60.0])
    servicer = Servicer(stage, lambda _: prompt)
    loop = asyncio.get_running_loop()
    async with served(servicer) as (_, stub):
        begun = loop.time()  # before the granter begins to count
        call = stub.Open(metadata=credentials("token"))
        await call.write(handoff_pb2.ReaderMessage(open=stage.opening()))
        assert (await call.read()).WhichOneof("kind") == "opened"
        call.cancel()  # as when the caller's process dies
        await eventually(lambda: prompt.ended_at, 30)
    assert prompt.ended_at[0] >= begun + LEASE_S * 0.95
    assert len(prompt.ended_at) == 1 and stage.granter.holds == 0
    assert servicer.cancelled + len(servicer.reports) == 1


async def test_a_server_that_goes_is_a_lost_worker() -> None:
    stage = handoff_stage.Stage(lease_s=LEASE_S)
    servicer = Servicer(stage, lambda _: handoff_stage.ScriptedPrompt([60.0]))
    async with served(servicer) as (server, stub):
        link = ClientLink(stub.Open(metadata=credentials("token")))
        fetch = asyncio.ensure_future(stage.fetch(link, stage.opening(), OWN, [b"x"] * 6))
        await eventually(lambda: stage.granter.holds, 30)
        stopping = asyncio.ensure_future(server.stop(grace=None))
        with pytest.raises(WorkerLost):
            await fetch
        await stage.ended()
        with contextlib.suppress(asyncio.CancelledError):
            await stopping


async def test_a_refusal_reaches_the_reader_by_its_class() -> None:
    stage = handoff_stage.Stage(lease_s=LEASE_S)

    def admit(_: handoff_pb2.OpenHandoff) -> NoReturn:
        raise Overloaded("32 prompts wait")

    servicer = Servicer(stage, admit)
    async with served(servicer) as (_, stub):
        link = ClientLink(stub.Open(metadata=credentials("token")))
        with pytest.raises(Overloaded, match="32 prompts wait"):
            await stage.fetch(link, stage.opening(), OWN, [b"x"] * 6)
        await stage.ended()
    assert [grant.end for grant in servicer.reports] == ["refused"]
