"""Which routers a worker's service says are linked, over real gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.proto import worker_pb2, worker_pb2_grpc
from baton.runtime.config import RouterConfig
from baton.runtime.grpc_links import credentials, open_channel, open_port, open_server
from baton.runtime.links import LINK_PROTOCOL_VERSION
from baton.runtime.worker.block_feed import BlockFeed
from baton.runtime.worker.linked_routers import LinkedRouter, LinkedRouters
from baton.runtime.worker.service import WorkerService, host_of
from tests.support.waiting import eventually

BOOT = b"b" * 16


class IdleSession:
    """Has no outputs."""

    def receive(self, message: worker_pb2.RouterMessage) -> None:
        """Nothing is submitted here."""

    async def outputs(self) -> worker_pb2.StepOutputs:
        await asyncio.sleep(3600)  # There are no outputs.
        return worker_pb2.StepOutputs()

    def detach(self) -> None:
        """It has no requests."""


class IdleWorker:
    def __init__(self) -> None:
        self.draining = asyncio.Event()

    def attach(self, hello: worker_pb2.RouterHello) -> tuple[worker_pb2.WorkerHello, IdleSession]:
        return worker_pb2.WorkerHello(boot_id=BOOT), IdleSession()

    def load(self) -> worker_pb2.Load:
        return worker_pb2.Load()

    def red_in_s(self) -> float:
        return 3600.0


async def linked(service: WorkerService, count: int) -> list[LinkedRouter]:
    """The linked routers, once there are so many."""
    await eventually(lambda: len(service.routers.all()) == count, 30)
    return service.routers.all()


async def test_a_router_is_listed_while_its_link_lasts() -> None:
    add: Any = worker_pb2_grpc.add_WorkerServicer_to_server
    service = WorkerService(IdleWorker(), BlockFeed(BOOT, list, most=4), RouterConfig())
    server = open_server("t")
    add(service, server)
    port = open_port(server, "127.0.0.1:0", None)
    await server.start()
    hello = worker_pb2.RouterHello(
        router_id="a" * 32, boot_id=BOOT, protocol_version=LINK_PROTOCOL_VERSION
    )
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        calls = [stub.Link(metadata=credentials("t")) for _ in range(2)]
        for call in calls:  # the second stream of one router takes over
            await call.write(worker_pb2.RouterMessage(hello=hello))
            assert (await call.read()).HasField("hello")
        assert await linked(service, 1) == [LinkedRouter("a" * 32, "127.0.0.1")]
        reported = worker_pb2.UnplacedRequests(waiting=3, refused=5)
        beat = worker_pb2.RouterMessage(heartbeat=worker_pb2.Heartbeat(unplaced=reported))
        await calls[1].write(beat)
        found = [LinkedRouter("a" * 32, "127.0.0.1", waiting=3, refused=5)]
        await eventually(lambda: service.routers.all() == found, 30)
        for call in calls:
            call.cancel()
        assert await linked(service, 0) == []
    await server.stop(None)


def test_of_two_streams_of_a_router_the_later_heard_counts() -> None:
    """Though it was opened first."""
    routers = LinkedRouters()
    routers.open("first", "a", "10.0.0.1")
    routers.open("second", "a", "10.0.0.1")
    reported = worker_pb2.UnplacedRequests(waiting=3)
    routers.record_heartbeat("first", worker_pb2.Heartbeat(unplaced=reported))
    assert routers.all() == [LinkedRouter("a", "10.0.0.1", waiting=3)]


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.1:5000", "10.0.0.1"),
        ("ipv6:[fd00::1]:5000", "fd00::1"),
        ("ipv6:%5Bfd00::1%5D:5000", "fd00::1"),
    ],
)
def test_the_host_is_that_of_grpcs_peer(peer: str, host: str) -> None:
    assert host_of(peer) == host
