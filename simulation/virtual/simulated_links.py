"""The links of simulated processes: a router's to its workers, a decode worker's to its peers.

They stand where gRPC stands, on the simulated network. Know no worker and no faults.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from baton.kv_transfer.peers.peer_client import HANDSHAKE_TIMEOUT_S, HandoffLink
from baton.proto import handoff_pb2, worker_pb2
from baton.router.fleet.dialer import Connection, RouterLink
from baton.runtime.errors import Unavailable
from baton.runtime.links import LinkClosed
from baton.simulation.virtual.machine import Machine
from baton.simulation.virtual.network import Network, SimLink


class SimDialer:
    """Implements the router's `Dialer`."""

    def __init__(self, network: Network, machine: Machine) -> None:
        self._network = network
        self._machine = machine

    def connect(self, address: str) -> Connection:
        return _SimConnection(self._network, self._machine, address)


class _SimConnection:
    def __init__(self, network: Network, machine: Machine, address: str) -> None:
        self._network = network
        self._machine = machine
        self._address = address
        self._links: list[SimLink] = []

    def link(self) -> RouterLink:
        return self._open("link")

    async def watch_blocks(self) -> AsyncIterator[worker_pb2.BlockEvents]:
        link = self._open("blocks")
        try:
            while True:
                yield await link.receive()
        finally:
            await link.close()

    async def close(self) -> None:
        for link in self._links:
            await link.close()

    def _open(self, service: str) -> SimLink:
        link = self._network.connect(self._machine, self._address, service)
        self._links = [*(old for old in self._links if not old.closed), link]
        return link


class SimPeerClient:
    """Implements decode_worker's `PeerClient` on simulated streams."""

    def __init__(self, network: Network, machine: Machine, address: str) -> None:
        self._network = network
        self._machine = machine
        self._address = address
        self._peer = network.services[address][0]  # the callee is the one that was there

    async def handshake(self, mine: handoff_pb2.HandshakeMessage) -> handoff_pb2.HandshakeMessage:
        link = self._network.connect(self._machine, self._address, "greet")
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await link.send(mine)
                theirs: handoff_pb2.HandshakeMessage = await link.receive()
        except (TimeoutError, LinkClosed) as error:
            raise Unavailable(f"{self._address} does not answer") from error
        finally:
            await link.close()
        return theirs

    def open(self) -> HandoffLink:
        return self._network.connect(self._machine, self._address, "handoff")

    @property
    def connected(self) -> bool:
        return self._peer.alive or self._peer.silent

    async def close(self) -> None:
        pass
