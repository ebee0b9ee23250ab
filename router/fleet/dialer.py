"""Connections from the router to workers, and the waits between attempts to connect.

The only module of router/ that knows gRPC channels; the simulation has its own Dialer. A
connection is owned by the link that opened it.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc.aio

from baton.proto import worker_pb2, worker_pb2_grpc
from baton.runtime.grpc_links import ClientLink, credentials, open_channel, translate
from baton.runtime.links import Link, LinkClosed
from baton.runtime.tls import Tls

LATE_HANDSHAKE = 4  # times the silence that ends a link

RouterLink = Link[worker_pb2.RouterMessage, worker_pb2.WorkerMessage]


class Backoff:
    """Waits between attempts: each twice as long as the previous one, up to `longest_s`, and
    jittered, so that routers that lost a worker at the same moment do not all return at once."""

    def __init__(self, first_s: float, longest_s: float, rng: random.Random) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._rng = rng
        self._next_s = first_s

    def next_s(self) -> float:
        """Return the next wait: from half of the full wait to all of it."""
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return wait_s * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._next_s = self._first_s


class HandshakeLimit:
    """The time limit of a handshake, `first_s` at first. After each that was late it doubles, up to
    LATE_HANDSHAKE times as long: else a worker on a busy host, whose answer takes longer than a
    silence may last, would begin again for ever."""

    def __init__(self, first_s: float) -> None:
        self._first_s = self._now_s = first_s

    def within_s(self, left_s: float | None) -> float:
        """Return the limit, at most what is left of the time until the link is given up."""
        return self._now_s if left_s is None else max(0.01, min(self._now_s, left_s))

    def note_late(self) -> None:
        self._now_s = min(2 * self._now_s, LATE_HANDSHAKE * self._first_s)

    def reset(self) -> None:
        self._now_s = self._first_s


class Connection(Protocol):
    """A connection to one address. `close` ends every link and stream on it with LinkClosed."""

    def link(self) -> RouterLink: ...

    def watch_blocks(self) -> AsyncIterator[worker_pb2.BlockEvents]:
        """Raises LinkClosed when the stream ends, whatever the reason."""
        ...

    async def close(self) -> None: ...


class Dialer(Protocol):
    def connect(self, address: str) -> Connection: ...


class GrpcDialer:
    """`token` is the cluster's shared secret; without `tls` nothing is encrypted."""

    def __init__(self, token: str, tls: Tls | None = None) -> None:
        self._token = token
        self._tls = tls

    def connect(self, address: str) -> Connection:
        return _GrpcConnection(open_channel(address, self._tls), self._token)


class _GrpcConnection:
    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._metadata = credentials(token)
        self._stub: Any = worker_pb2_grpc.WorkerStub(self._channel)

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
