"""How a prefill worker is called: a seam, and its gRPC side.

Knows addresses, no registry and no boot ids: who may be called, and what a greeting must say,
is peers.py's. gRPC's exceptions are translated here.
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

GREETING_TIMEOUT_S = 2.0
LOST = "the worker was lost while it was greeted"


class PeerCalls(Protocol):
    """A connection to one address; it is made when it is first used."""

    async def greet(self, mine: handoff_pb2.HandshakeMessage) -> handoff_pb2.HandshakeMessage:
        """Raises Unavailable if no answer comes within GREETING_TIMEOUT_S, or the error that
        the peer named."""
        ...

    def open(self) -> HandoffLink:
        """A new handoff stream."""
        ...

    @property
    def up(self) -> bool:
        """Whether a connection stands, as far as is known here."""
        ...

    async def close(self) -> None: ...


Dial = Callable[[str], PeerCalls]


def grpc_dial(token: str, tls: Tls | None = None) -> Dial:
    """Calls with the cluster's token; without `tls` in plain text."""
    return lambda address: _GrpcCalls(address, token, tls)


class _GrpcCalls:
    def __init__(self, address: str, token: str, tls: Tls | None) -> None:
        self._channel = open_channel(address, tls)
        self._stub = handoff_pb2_grpc.HandoffStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata = credentials(token)

    async def greet(self, mine: handoff_pb2.HandshakeMessage) -> handoff_pb2.HandshakeMessage:
        try:
            theirs: handoff_pb2.HandshakeMessage = await self._stub.Handshake(
                mine, metadata=self._metadata, timeout=GREETING_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise translate(error) from error
        except asyncio.CancelledError:
            if _cancelled():
                raise
            raise Unavailable(LOST) from None  # gRPC says so when the channel is closed meanwhile
        return theirs

    def open(self) -> HandoffLink:
        return ClientLink(self._stub.Open(metadata=self._metadata))

    @property
    def up(self) -> bool:
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def close(self) -> None:
        await self._channel.close()


def _cancelled() -> bool:
    """Whether this task was told to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
