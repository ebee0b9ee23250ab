"""The prefill workers that this worker reads from: greeted once per boot id, then streams.

`Peers` is where a handoff stream comes from: over gRPC here, in memory in tests and simulation.
A peer's boot id is checked at every use; another boot id is another peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import grpc
import grpc.aio

from baton.decode_worker.first_contact import FirstContact
from baton.kv_transfer import greeting
from baton.kv_transfer.mover import Mover
from baton.proto import handoff_pb2, handoff_pb2_grpc, worker_pb2
from baton.runtime import logs
from baton.runtime.errors import Unavailable, WorkerLost
from baton.runtime.grpc_links import ClientLink, credentials, open_channel, translate
from baton.runtime.links import Link
from baton.runtime.registry import Registry

log = logs.get(__name__)

HandoffLink = Link[handoff_pb2.ReaderMessage, handoff_pb2.GranterMessage]

GREETING_TIMEOUT_S = 2.0


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


class GrpcPeers:
    """One channel per peer address and boot id; greetings to one peer never overlap.

    A candidate is a name: where a peer is, the registry says. Nothing is sent to an address,
    the token least of all, that only a message has named."""

    def __init__(
        self,
        mine: Callable[[], handoff_pb2.Greeting],
        mover: Mover,
        token: str,
        first_contact: FirstContact,
        registry: Registry,
    ) -> None:
        self._mine = mine
        self._registry = registry
        self._first_contact = first_contact
        self._mover = mover
        self._metadata = credentials(token)
        self._channels: dict[bytes, grpc.aio.Channel] = {}
        self._greeted: set[bytes] = set()
        self._addresses: dict[bytes, str] = {}  # of those greeted
        self._closing: set[asyncio.Future[None]] = set()
        self._greeting: dict[bytes, asyncio.Lock] = {}

    async def open(self, candidate: worker_pb2.Candidate) -> HandoffLink:
        boot_id = candidate.boot_id
        if boot_id not in self._channels:
            self._check_registered(candidate)
        async with self._greeting.setdefault(boot_id, asyncio.Lock()):
            channel = self._channels.get(boot_id)
            if channel is None:
                channel = self._channels[boot_id] = open_channel(candidate.address)
            stub = handoff_pb2_grpc.HandoffStub(channel)  # type: ignore[no-untyped-call]
            if boot_id not in self._greeted:
                try:
                    await self._greet(stub, boot_id)
                except Unavailable:
                    self.forget(boot_id)
                    raise
                if self._channels.get(boot_id) is not channel:
                    raise WorkerLost("the worker was lost while it was greeted")
                self._greeted.add(boot_id)
                self._forget_predecessors(candidate)
                self._forget_departed()
            return ClientLink(stub.Open(metadata=self._metadata))

    def forget(self, boot_id: bytes) -> None:
        self._greeted.discard(boot_id)
        self._greeting.pop(boot_id, None)
        self._addresses.pop(boot_id, None)
        self._mover.forget(boot_id)
        channel = self._channels.pop(boot_id, None)
        if channel is not None:
            closing = asyncio.ensure_future(channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        if self._closing:
            await asyncio.wait(set(self._closing), timeout=GREETING_TIMEOUT_S)

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

    def _forget_predecessors(self, candidate: worker_pb2.Candidate) -> None:
        """One boot id has answered at this address: those that did before are dead."""
        dead = [boot for boot, place in self._addresses.items() if place == candidate.address]
        for boot_id in dead:
            self.forget(boot_id)
        self._addresses[candidate.boot_id] = candidate.address

    def _forget_departed(self) -> None:
        """Those that the registry has forgotten, once no connection leads to them: a worker that
        has drained says no word at its end. One that drains still serves what it owes."""
        try:
            registered = {record.boot_id for record in self._registry.workers()}
        except OSError as error:  # they are looked for again at the next greeting
            log.warning("the registry cannot be read", why=str(error))
            return
        for boot_id in [boot for boot in self._greeted if boot.hex() not in registered]:
            state = self._channels[boot_id].get_state()
            if state is not grpc.ChannelConnectivity.READY:
                self.forget(boot_id)

    async def _greet(self, stub: handoff_pb2_grpc.HandoffStub, boot_id: bytes) -> None:
        try:
            theirs = await stub.Greet(
                self._mine(), metadata=self._metadata, timeout=GREETING_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise translate(error) from error
        if theirs.boot_id != boot_id:
            raise Unavailable(
                f"worker {theirs.worker_id} has restarted: its boot id is not the placed one"
            )
        greeting.check(self._mine(), theirs)
        pool = greeting.peer_pool(theirs)
        await self._mover.connect(pool)
        await self._first_contact.check(theirs.worker_id, pool)
