"""The client of a worker that grants: a seam, and its gRPC side.

Knows addresses, no registry and no boot ids: registered_peers.py decides which address may be
called and checks the handshake. This module translates gRPC's exceptions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import grpc
import grpc.aio

from baton.proto import handoff_pb2, handoff_pb2_grpc
from baton.runtime.errors import Unavailable
from baton.runtime.grpc_links import ClientLink, credentials, open_channel, translate
from baton.runtime.links import Link
from baton.runtime.tls import Tls

HandoffLink = Link[handoff_pb2.ReaderMessage, handoff_pb2.GranterMessage]

HANDSHAKE_TIMEOUT_S = 2.0
LOST_IN_HANDSHAKE = "the connection to the worker was lost during the handshake"


class PeerClient(Protocol):
    """A connection to one address, made at its first use."""

    async def handshake(self, mine: handoff_pb2.HandshakeMessage) -> handoff_pb2.HandshakeMessage:
        """Return the peer's message. Raises Unavailable if no answer comes within
        HANDSHAKE_TIMEOUT_S, or the error that the peer named."""
        ...

    def open(self) -> HandoffLink:
        """Open a handoff stream."""
        ...

    @property
    def connected(self) -> bool:
        """Whether the connection stands, as far as this side knows."""
        ...

    async def close(self) -> None: ...


Dial = Callable[[str], PeerClient]


def grpc_dial(token: str, tls: Tls | None = None) -> Dial:
    """Return a `Dial` that sends the cluster's token; without `tls` in plain text."""
    return lambda address: _GrpcPeerClient(address, token, tls)


class _GrpcPeerClient:
    def __init__(self, address: str, token: str, tls: Tls | None) -> None:
        self._channel = open_channel(address, tls)
        self._stub = handoff_pb2_grpc.HandoffStub(self._channel)
        self._metadata = credentials(token)

    async def handshake(self, mine: handoff_pb2.HandshakeMessage) -> handoff_pb2.HandshakeMessage:
        try:
            theirs: handoff_pb2.HandshakeMessage = await self._stub.Handshake(
                mine, metadata=self._metadata, timeout=HANDSHAKE_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise translate(error) from error
        except asyncio.CancelledError:
            if _cancelled():
                raise
            # gRPC cancels the call when the channel is closed beneath it.
            raise Unavailable(LOST_IN_HANDSHAKE) from None
        return theirs

    def open(self) -> HandoffLink:
        return ClientLink(self._stub.Open(metadata=self._metadata))

    @property
    def connected(self) -> bool:
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def close(self) -> None:
        await self._channel.close()


def _cancelled() -> bool:
    """Whether this task itself was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
