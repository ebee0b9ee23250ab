"""The gRPC face of a worker towards routers: links and block events. Both roles serve it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from baton.proto import worker_pb2, worker_pb2_grpc
from baton.runtime import metrics
from baton.runtime.config import RouterConfig
from baton.runtime.grpc_links import ServerLink
from baton.runtime.worker.block_feed import BlockFeed
from baton.runtime.worker.router_links import LinkHandler, serve_link


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Hands each stream to the worker behind it."""

    def __init__(self, handler: LinkHandler, feed: BlockFeed, config: RouterConfig) -> None:
        self._handler = handler
        self._feed = feed
        self._config = config

    async def Link(self, _: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        link: ServerLink[worker_pb2.WorkerMessage, worker_pb2.RouterMessage] = ServerLink(context)
        with metrics.LINKS.labels("router").track_inprogress():
            await serve_link(
                link,
                self._handler,
                heartbeat_s=self._config.link_heartbeat_s,
                silence_s=self._config.link_silence_s,
                hang_s=self._config.hang_s,
            )

    async def WatchBlocks(
        self, request: worker_pb2.WatchBlocksRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.BlockEvents]:
        async for event in self._feed.watch():
            yield event
