"""How the router reaches a worker: the one place in router/ that knows gRPC channels.

The simulation has its own Dialer. A connection is owned by whoever opened it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc.aio

from baton.proto import worker_pb2, worker_pb2_grpc
from baton.runtime.grpc_links import ClientLink, credentials, open_channel, translate
from baton.runtime.links import Link, LinkClosed
from baton.runtime.tls import Tls

RouterLink = Link[worker_pb2.RouterMessage, worker_pb2.WorkerMessage]


class Connection(Protocol):
    """A way to one address. After `close` every link and stream on it ends with LinkClosed."""

    def link(self) -> RouterLink: ...

    def watch_blocks(self) -> AsyncIterator[worker_pb2.BlockEvents]:
        """Raises LinkClosed when the stream ends, whatever the reason."""
        ...

    async def close(self) -> None: ...


class Dialer(Protocol):
    def connect(self, address: str) -> Connection: ...


class GrpcDialer:
    """`token` is the cluster's shared secret; without `tls` workers are called in plain text."""

    def __init__(self, token: str, tls: Tls | None = None) -> None:
        self._token = token
        self._tls = tls

    def connect(self, address: str) -> Connection:
        return _GrpcConnection(open_channel(address, self._tls), self._token)


class _GrpcConnection:
    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._metadata = credentials(token)
        self._stub: Any = worker_pb2_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]

    def link(self) -> RouterLink:
        return ClientLink(self._stub.Link(metadata=self._metadata))

    async def watch_blocks(self) -> AsyncIterator[worker_pb2.BlockEvents]:
        call = self._stub.WatchBlocks(worker_pb2.WatchBlocksRequest(), metadata=self._metadata)
        try:
            async for events in call:
                yield events
        except grpc.aio.AioRpcError as error:
            raise LinkClosed(str(translate(error))) from error
        finally:
            call.cancel()
        raise LinkClosed("the worker ended the stream of block events")

    async def close(self) -> None:
        await self._channel.close()
