"""The workers that this worker reads from: one handshake per boot id, then streams.

`Peers` opens handoff streams. A peer's boot id is checked at every use; another boot id is
another peer. Knows no gRPC: peer_client.py calls an address.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from baton.kv_transfer import handshake
from baton.kv_transfer.mover import Mover
from baton.kv_transfer.peers.bandwidth_probe import BandwidthProbe
from baton.kv_transfer.peers.peer_client import (
    HANDSHAKE_TIMEOUT_S,
    LOST_IN_HANDSHAKE,
    Dial,
    HandoffLink,
    PeerClient,
)
from baton.kv_transfer.peers.peer_measurements import MeasuredPeer, PeerMeasurements
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime import logs, waits
from baton.runtime.errors import BatonError, Unavailable
from baton.runtime.registry import WorkerRecord
from baton.runtime.registry_client import ANSWER_S, RegistryClient, hung

REPEATED_WAIT_S = 0.1  # for a peer whose last first contact failed or took too long
MAX_TIMED_OUT_PEERS = 256

log = logs.get(__name__)


class Peers(Protocol):
    async def open(
        self, candidate: worker_pb2.Candidate, contact_s: float = math.inf
    ) -> HandoffLink:
        """Open a handoff stream to a peer whose pool the mover can read. Raises Unavailable if
        the peer is not registered or does not answer under that boot id, or if its first contact
        takes too long, or longer than `contact_s` (it goes on, for the next stream), Incompatible
        if its pool does not fit."""
        ...

    def forget(self, boot_id: bytes) -> None:
        """Drop a peer that died or fell silent: the next stream needs a new handshake."""
        ...

    def degraded(self) -> list[worker_pb2.DegradedPeer]:
        """Return the peers whose last measurement was below the configured floor."""
        ...

    def transport(self, boot_id: bytes) -> str:
        """Return in a word or two how READs of a peer travel, to which a stream is open."""
        ...

    async def close(self) -> None: ...


def degraded_entries(peers: Peers) -> list[dict[str, Any]]:
    """Return the degraded peers as a worker's audit shows them."""
    return [
        {
            "worker_id": peer.worker_id,
            "boot_id": peer.boot_id.hex(),
            "gb_per_s": round(peer.gb_per_s, 4),
        }
        for peer in peers.degraded()
    ]


@dataclass(slots=True, eq=False)
class _KnownPeer:
    """One boot id, at the address that the registry has for it. Its first contact is one task of
    its own; each handoff that needs the peer waits for that task with its own bound."""

    address: str
    client: PeerClient
    contact: asyncio.Task[None]


class RegisteredPeers:
    """One connection per peer address and boot id, made by `dial`.

    A candidate is a name; the registry has its address. Nothing is sent to an address, the token
    least of all, that only a message has named. `first_contact_s` bounds the wait for a first
    contact; after one that failed or took longer, REPEATED_WAIT_S does, until one succeeds."""

    def __init__(
        self,
        mine: Callable[[], handoff_pb2.HandshakeMessage],
        mover: Mover,
        dial: Dial,
        bandwidth_probe: BandwidthProbe,
        registry: RegistryClient,
        first_contact_s: float,
    ) -> None:
        self._mine = mine
        self._dial = dial
        self._registry = registry
        self._records: list[WorkerRecord] = []  # the registry's last answer
        self._measurements = PeerMeasurements(bandwidth_probe, mover.describe().boot_id)
        self._mover = mover
        self._first_contact_s = first_contact_s
        self._timed_out: dict[bytes, None] = {}  # boot ids, the oldest first
        self._peers: dict[bytes, _KnownPeer] = {}
        self._closing: set[asyncio.Future[None]] = set()

    async def open(
        self, candidate: worker_pb2.Candidate, contact_s: float = math.inf
    ) -> HandoffLink:
        boot_id = candidate.boot_id
        peer = self._peers.get(boot_id)
        if peer is None:
            await self._check_registered(candidate)
            peer = self._peers.get(boot_id)  # another handoff may have added it
        is_first = peer is None
        if peer is None:
            self._forget_departed()
            peer = self._begin_contact(candidate)
        wait_s = min(self._first_contact_s, contact_s)
        if boot_id in self._timed_out:
            wait_s = min(REPEATED_WAIT_S, wait_s)
        if not await waits.done_within(peer.contact, wait_s):
            self._record_timeout(boot_id)
            raise Unavailable(
                f"first contact with worker {candidate.worker_id} takes over {wait_s:g} s"
            )
        if is_first and not peer.contact.cancelled():
            peer.contact.result()
        if self._peers.get(boot_id) is not peer:
            raise Unavailable(LOST_IN_HANDSHAKE)
        return peer.client.open()

    def degraded(self) -> list[worker_pb2.DegradedPeer]:
        return self._measurements.degraded()

    def transport(self, boot_id: bytes) -> str:
        return self._measurements.transport(boot_id)

    def forget(self, boot_id: bytes) -> None:
        self._mover.forget(boot_id)
        self._measurements.forget(boot_id)
        peer = self._peers.pop(boot_id, None)
        if peer is not None:
            closing = asyncio.ensure_future(peer.client.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for boot_id, peer in list(self._peers.items()):
            peer.contact.cancel()
            self.forget(boot_id)
        if self._closing:
            await asyncio.wait(set(self._closing), timeout=HANDSHAKE_TIMEOUT_S)

    def _begin_contact(self, candidate: worker_pb2.Candidate) -> _KnownPeer:
        """Start a first contact. It ends by its own bounds, however many handoffs wait for it."""
        boot_id, client = candidate.boot_id, self._dial(candidate.address)

        async def contact() -> None:
            try:
                await self._connect(client, boot_id)
            except Exception as error:  # raised in the handoff that began it, if that still waits
                if not isinstance(error, BatonError):
                    log.exception("first contact failed", worker=candidate.worker_id)
                self._record_timeout(boot_id)
                if self._peers.get(boot_id) is peer:
                    self.forget(boot_id)
                raise
            finally:
                if boot_id not in self._peers:  # forgotten while it connected
                    self._mover.forget(boot_id)
                    self._measurements.forget(boot_id)
            self._timed_out.pop(boot_id, None)
            if self._peers.get(boot_id) is peer:
                self._forget_predecessors(peer)

        peer = _KnownPeer(candidate.address, client, asyncio.create_task(contact()))
        peer.contact.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._peers[boot_id] = peer
        return peer

    def _record_timeout(self, boot_id: bytes) -> None:
        self._timed_out[boot_id] = None
        if len(self._timed_out) > MAX_TIMED_OUT_PEERS:
            del self._timed_out[next(iter(self._timed_out))]

    async def _check_registered(self, candidate: worker_pb2.Candidate) -> None:
        """Raise Unavailable unless the registry has the candidate under this address and boot id.
        While the registry does not answer, its last answer holds."""
        reading = self._registry.workers()
        answered = await waits.done_within(reading, ANSWER_S)
        try:
            if answered:
                self._records = reading.result()
        except OSError as error:  # such as a lack of file descriptors
            raise Unavailable(f"the registry cannot be read: {error}") from error
        named = (candidate.worker_id, candidate.boot_id.hex(), candidate.address)
        if named not in {(e.worker_id, e.boot_id, e.address) for e in self._records}:
            raise Unavailable(
                f"worker {candidate.worker_id} is not registered at {candidate.address} under "
                "its boot id: nothing is sent there"
                + ("" if answered else f"; the registry cannot be read: {hung(ANSWER_S)}")
            )

    def _forget_predecessors(self, peer: _KnownPeer) -> None:
        """Forget older boot ids at the address where this one has answered: they are dead."""
        for boot_id, other in list(self._peers.items()):
            if other.address == peer.address and other is not peer:
                self.forget(boot_id)

    def _forget_departed(self) -> None:
        """Forget peers that have left the registry and whose connection is down: a drained worker
        sends no message at its end. A draining worker still serves its open handoffs."""
        registered = {record.boot_id for record in self._records}
        for boot_id, peer in list(self._peers.items()):
            if boot_id.hex() in registered or not peer.contact.done():
                continue
            if not peer.client.connected:
                self.forget(boot_id)

    async def _connect(self, client: PeerClient, boot_id: bytes) -> None:
        """Exchange handshakes, connect the mover and measure the bandwidth, now or later."""
        mine = self._mine()
        theirs = await client.handshake(mine)
        if theirs.boot_id != boot_id:
            raise Unavailable(
                f"worker {theirs.worker_id} has restarted: its boot id is not the placed one"
            )
        handshake.check(mine, theirs)
        pool = handshake.bridged_pool(mine, theirs)
        await self._mover.connect(pool)
        await self._measurements.meet(MeasuredPeer(theirs, pool, partial(_greet, client, mine)))


async def _greet(
    client: PeerClient, mine: handoff_pb2.HandshakeMessage, gb_per_s: float
) -> handoff_pb2.HandshakeMessage:
    """Repeat the handshake: with a measurement to report it, with 0 to take a time for another."""
    message = handoff_pb2.HandshakeMessage()
    message.CopyFrom(mine)
    message.read_gb_per_s = gb_per_s
    return await client.handshake(message)
