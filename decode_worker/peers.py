"""The prefill workers that this worker reads from: greeted once per boot id, then streams.

`Peers` is where a handoff stream comes from: over gRPC here, in memory in tests and simulation.
A peer's boot id is checked at every use; another boot id is another peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import grpc.aio

from baton.decode_worker.first_contact import FirstContact
from baton.kv_transfer import greeting
from baton.kv_transfer.mover import Mover
from baton.proto import handoff_pb2, handoff_pb2_grpc, worker_pb2
from baton.runtime import logs
from baton.runtime.errors import BatonError, Unavailable
from baton.runtime.grpc_links import ClientLink, credentials, open_channel, translate
from baton.runtime.links import Link
from baton.runtime.registry import Registry
from baton.runtime.tls import Tls

log = logs.get(__name__)

HandoffLink = Link[handoff_pb2.ReaderMessage, handoff_pb2.GranterMessage]

GREETING_TIMEOUT_S = 2.0
LOST = "the worker was lost while it was greeted"


class Peers(Protocol):
    async def open(self, candidate: worker_pb2.Candidate) -> HandoffLink:
        """A new handoff stream to a peer whose pool the mover can read. Raises Unavailable if
        it is not registered or not there under that boot id, Incompatible if its pool does
        not fit."""
        ...

    def forget(self, boot_id: bytes) -> None:
        """The peer has died or fell silent: greet again before the next stream."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Peer:
    """One boot id, at the address that the registry has for it. Its greetings never overlap."""

    address: str
    channel: grpc.aio.Channel
    greeting: asyncio.Lock = field(default_factory=asyncio.Lock)
    greeted: bool = False


class GrpcPeers:
    """One channel per peer address and boot id.

    A candidate is a name: where a peer is, the registry says. Nothing is sent to an address,
    the token least of all, that only a message has named."""

    def __init__(
        self,
        mine: Callable[[], handoff_pb2.Greeting],
        mover: Mover,
        token: str,
        first_contact: FirstContact,
        registry: Registry,
        tls: Tls | None = None,  # None: peers are called in plain text
    ) -> None:
        self._mine = mine
        self._tls = tls
        self._registry = registry
        self._first_contact = first_contact
        self._mover = mover
        self._metadata = credentials(token)
        self._peers: dict[bytes, _Peer] = {}
        self._closing: set[asyncio.Future[None]] = set()

    async def open(self, candidate: worker_pb2.Candidate) -> HandoffLink:
        boot_id = candidate.boot_id
        peer = self._peers.get(boot_id)
        if peer is None:
            self._check_registered(candidate)
            peer = self._peers[boot_id] = _Peer(
                candidate.address, open_channel(candidate.address, self._tls)
            )
        stub = handoff_pb2_grpc.HandoffStub(peer.channel)  # type: ignore[no-untyped-call]
        async with peer.greeting:
            if not peer.greeted or self._peers.get(boot_id) is not peer:
                await self._greeted_first(peer, boot_id, stub)
        return ClientLink(stub.Open(metadata=self._metadata))

    def forget(self, boot_id: bytes) -> None:
        self._mover.forget(boot_id)
        peer = self._peers.pop(boot_id, None)
        if peer is not None:
            closing = asyncio.ensure_future(peer.channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for boot_id in list(self._peers):
            self.forget(boot_id)
        if self._closing:
            await asyncio.wait(set(self._closing), timeout=GREETING_TIMEOUT_S)

    async def _greeted_first(
        self, peer: _Peer, boot_id: bytes, stub: handoff_pb2_grpc.HandoffStub
    ) -> None:
        """Greet, or raise why nothing can be read there. Who waited for another's greeting in
        vain has learned enough: it goes to its next candidate."""
        if self._peers.get(boot_id) is peer:
            try:
                await self._greet(stub, boot_id)
            except BatonError:
                if self._peers.get(boot_id) is peer:
                    self.forget(boot_id)
                raise
        if self._peers.get(boot_id) is not peer:
            raise Unavailable(LOST)
        peer.greeted = True
        self._forget_predecessors(peer)
        self._forget_departed()

    def _check_registered(self, candidate: worker_pb2.Candidate) -> None:
        named = (candidate.worker_id, candidate.boot_id.hex(), candidate.address)
        try:
            records = self._registry.workers()
        except OSError as error:  # as without descriptors: no peer is known then
            raise Unavailable(f"the registry cannot be read: {error}") from error
        if named not in {(record.worker_id, record.boot_id, record.address) for record in records}:
            raise Unavailable(
                f"worker {candidate.worker_id} is not registered at {candidate.address} under "
                "its boot id: nothing is sent there"
            )

    def _forget_predecessors(self, peer: _Peer) -> None:
        """One boot id has answered at this address: those that did before are dead."""
        for boot_id, other in list(self._peers.items()):
            if other.address == peer.address and other is not peer:
                self.forget(boot_id)

    def _forget_departed(self) -> None:
        """Those that the registry has forgotten, once no connection leads to them: a worker that
        has drained says no word at its end. One that drains still serves what it owes."""
        try:
            registered = {record.boot_id for record in self._registry.workers()}
        except OSError as error:  # they are looked for again at the next greeting
            log.warning("the registry cannot be read", why=str(error))
            return
        for boot_id, peer in list(self._peers.items()):
            if boot_id.hex() in registered or peer.greeting.locked():
                continue
            if peer.channel.get_state() is not grpc.ChannelConnectivity.READY:
                self.forget(boot_id)

    async def _greet(self, stub: handoff_pb2_grpc.HandoffStub, boot_id: bytes) -> None:
        try:
            theirs = await stub.Greet(
                self._mine(), metadata=self._metadata, timeout=GREETING_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise translate(error) from error
        except asyncio.CancelledError:
            if _cancelled():
                raise
            raise Unavailable(LOST) from None  # gRPC says so when the channel is closed meanwhile
        if theirs.boot_id != boot_id:
            raise Unavailable(
                f"worker {theirs.worker_id} has restarted: its boot id is not the placed one"
            )
        greeting.check(self._mine(), theirs)
        pool = greeting.peer_pool(theirs)
        await self._mover.connect(pool)
        await self._first_contact.check(theirs.worker_id, pool)


def _cancelled() -> bool:
    """Whether this task was told to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
