"""A worker's block events over real gRPC: a reader that leaves is forgotten at once."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

import grpc.aio
import pytest

from baton.proto import worker_pb2, worker_pb2_grpc
from baton.runtime.config import RouterConfig
from baton.runtime.grpc_links import credentials, open_channel, open_port, open_server
from baton.runtime.worker.block_feed import BlockFeed
from baton.runtime.worker.service import WorkerService
from tests.support.waiting import eventually

BOOT = b"b" * 16
LARGE = [number.to_bytes(16, "big") for number in range(1 << 15)]  # 512 KiB


@pytest.fixture
def feed() -> BlockFeed:
    return BlockFeed(BOOT, list, most=4)


@pytest.fixture
async def channel(feed: BlockFeed) -> AsyncIterator[grpc.aio.Channel]:
    handler: Any = None  # no link is opened here
    add: Any = worker_pb2_grpc.add_WorkerServicer_to_server
    server = open_server("t")
    add(WorkerService(handler, feed, RouterConfig()), server)
    port = open_port(server, "127.0.0.1:0", None)
    await server.start()
    channel = open_channel(f"127.0.0.1:{port}")
    yield channel
    await channel.close()
    await server.stop(None)


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class BlockCall(Protocol):
    """A call of WatchBlocks, which the tests read before its end alone."""

    async def read(self) -> worker_pb2.BlockEvents: ...

    def cancel(self) -> bool: ...


def watch(channel: grpc.aio.Channel) -> BlockCall:
    stub: Any = worker_pb2_grpc.WorkerStub(channel)
    call: BlockCall = stub.WatchBlocks(worker_pb2.WatchBlocksRequest(), metadata=credentials("t"))
    return call


async def forgotten(feed: BlockFeed) -> None:
    await eventually(lambda: not feed.watchers)
    assert not feed.behind


async def test_a_snapshot_and_what_follows_it(channel: grpc.aio.Channel, feed: BlockFeed) -> None:
    call = watch(channel)
    first = await call.read()
    assert first.snapshot and first.snapshot_end and first.boot_id == BOOT
    feed.publish(LARGE[:2], [])
    assert (await call.read()).stored == b"".join(LARGE[:2])
    call.cancel()
    await forgotten(feed)


async def test_a_router_that_leaves_while_idle_is_forgotten(
    channel: grpc.aio.Channel, feed: BlockFeed, no_garbage_collector: None
) -> None:
    call = watch(channel)
    await call.read()
    call.cancel()
    await forgotten(feed)


async def test_a_router_that_leaves_without_reading_is_forgotten(
    channel: grpc.aio.Channel, feed: BlockFeed, no_garbage_collector: None
) -> None:
    """The worker is writing to it, and nothing collects the garbage."""
    call = watch(channel)
    await call.read()

    def full() -> bool:
        feed.publish(LARGE, [])
        return bool(feed.behind)

    await eventually(full)  # no more goes out
    # The worker has to wait for room in the stream.
    await asyncio.sleep(0.05)
    call.cancel()
    await forgotten(feed)
