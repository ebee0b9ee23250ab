"""The gRPC face of a worker towards routers: links and block events. Both roles serve it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

import grpc.aio

from baton.proto import worker_pb2, worker_pb2_grpc
from baton.runtime import metrics
from baton.runtime.config import RouterConfig
from baton.runtime.grpc_links import ServerLink
from baton.runtime.worker.block_feed import BlockFeed
from baton.runtime.worker.linked_routers import LinkedRouters
from baton.runtime.worker.router_links import LinkHandler, serve_link


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Hands each stream to the worker behind it."""

    def __init__(self, handler: LinkHandler, feed: BlockFeed, config: RouterConfig) -> None:
        self._handler = handler
        self._feed = feed
        self._config = config
        self.routers = LinkedRouters()

    async def Link(self, _: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        link: ServerLink[worker_pb2.WorkerMessage, worker_pb2.RouterMessage] = ServerLink(context)

        def attached(hello: worker_pb2.RouterHello) -> None:
            self.routers.open(link, hello.router_id, host_of(context.peer()))

        def on_heartbeat(beat: worker_pb2.Heartbeat) -> None:
            self.routers.record_heartbeat(link, beat)

        with metrics.LINKS.labels("router").track_inprogress():
            try:
                await serve_link(
                    link,
                    self._handler,
                    heartbeat_s=self._config.link_heartbeat_s,
                    silence_s=self._config.link_silence_s,
                    hang_s=self._config.hang_s,
                    attached=attached,
                    on_heartbeat=on_heartbeat,
                )
            finally:
                self.routers.close(link)

    async def WatchBlocks(
        self, request: worker_pb2.WatchBlocksRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.BlockEvents]:
        async for event in self._feed.watch():
            yield event


def host_of(peer: str) -> str:
    """Return the address of gRPC's `ipv4:10.0.0.1:5000` or `ipv6:[::1]:5000`, escaped or not."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
