"""The prefill workers that this worker reads from: greeted once per boot id, then streams.

`Peers` is where a handoff stream comes from. A peer's boot id is checked at every use; another
boot id is another peer. Knows no gRPC: how an address is called is peer_calls.py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.decode_worker.first_contact import FirstContact
from baton.decode_worker.peer_calls import (
    GREETING_TIMEOUT_S,
    LOST,
    Dial,
    HandoffLink,
    PeerCalls,
)
from baton.kv_transfer import greeting
from baton.kv_transfer.mover import Mover
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime import logs, waits
from baton.runtime.errors import BatonError, Unavailable
from baton.runtime.registry import WorkerRecord
from baton.runtime.registry_client import ANSWER_S, RegistryClient, hung

AGAIN_S = 0.1  # for who was waited for in vain the last time: the next candidate is asked
IN_VAIN_KEPT = 256

log = logs.get(__name__)


class Peers(Protocol):
    async def open(self, candidate: worker_pb2.Candidate) -> HandoffLink:
        """A new handoff stream to a peer whose pool the mover can read. Raises Unavailable if
        it is not registered or not there under that boot id, or if its first contact takes
        long, Incompatible if its pool does not fit."""
        ...

    def forget(self, boot_id: bytes) -> None:
        """The peer has died or fell silent: greet again before the next stream."""
        ...

    def degraded(self) -> list[worker_pb2.DegradedPeer]:
        """Return the peers whose first contact was slower than the configured floor."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Peer:
    """One boot id, at the address that the registry has for it. It is greeted once, by a task of
    its own, for which each who wants a stream waits only so long."""

    address: str
    calls: PeerCalls
    greeting: asyncio.Task[None]


class RegisteredPeers:
    """One connection per peer address and boot id, made by `dial`.

    A candidate is a name: where a peer is, the registry says. Nothing is sent to an address,
    the token least of all, that only a message has named. `patience_s`: for a first contact; once
    one has failed, or took longer, nobody waits so long again before one has gone well."""

    def __init__(
        self,
        mine: Callable[[], handoff_pb2.HandshakeMessage],
        mover: Mover,
        dial: Dial,
        first_contact: FirstContact,
        registry: RegistryClient,
        patience_s: float,
    ) -> None:
        self._mine = mine
        self._dial = dial
        self._registry = registry
        self._records: list[WorkerRecord] = []  # as the registry said last
        self._first_contact = first_contact
        self._mover = mover
        self._patience_s = patience_s
        self._in_vain: dict[bytes, None] = {}  # boot ids that were waited for, the oldest first
        self._peers: dict[bytes, _Peer] = {}
        self._closing: set[asyncio.Future[None]] = set()

    async def open(self, candidate: worker_pb2.Candidate) -> HandoffLink:
        boot_id = candidate.boot_id
        peer = self._peers.get(boot_id)
        if peer is None:
            await self._check_registered(candidate)
            peer = self._peers.get(boot_id)  # another handoff may have begun it by now
        is_first = peer is None
        if peer is None:
            self._forget_departed()
            peer = self._begin(candidate)
        patience_s = self._patience_s
        if boot_id in self._in_vain:
            patience_s = min(AGAIN_S, patience_s)
        if not await waits.over(peer.greeting, patience_s):
            self._note_in_vain(boot_id)
            raise Unavailable(
                f"first contact with worker {candidate.worker_id} takes over {patience_s:g} s"
            )
        if is_first and not peer.greeting.cancelled():
            peer.greeting.result()
        if self._peers.get(boot_id) is not peer:  # who waited in vain goes to its next candidate
            raise Unavailable(LOST)
        return peer.calls.open()

    def degraded(self) -> list[worker_pb2.DegradedPeer]:
        return self._first_contact.degraded()

    def forget(self, boot_id: bytes) -> None:
        self._mover.forget(boot_id)
        self._first_contact.forget(boot_id)
        peer = self._peers.pop(boot_id, None)
        if peer is not None:
            closing = asyncio.ensure_future(peer.calls.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for boot_id, peer in list(self._peers.items()):
            peer.greeting.cancel()
            self.forget(boot_id)
        if self._closing:
            await asyncio.wait(set(self._closing), timeout=GREETING_TIMEOUT_S)

    def _begin(self, candidate: worker_pb2.Candidate) -> _Peer:
        """Greet it. The greeting ends by its own bounds, whoever waits."""
        boot_id, calls = candidate.boot_id, self._dial(candidate.address)

        async def greet() -> None:
            try:
                await self._greet(calls, boot_id)
            except Exception as error:  # told to who began it, if he still waits
                if not isinstance(error, BatonError):
                    log.exception("a greeting stumbled")
                self._note_in_vain(boot_id)
                if self._peers.get(boot_id) is peer:
                    self.forget(boot_id)
                raise
            finally:
                if boot_id not in self._peers:  # forgotten meanwhile: it connected for nobody
                    self._mover.forget(boot_id)
                    self._first_contact.forget(boot_id)
            self._in_vain.pop(boot_id, None)
            if self._peers.get(boot_id) is peer:
                self._forget_predecessors(peer)

        peer = _Peer(candidate.address, calls, asyncio.create_task(greet()))
        peer.greeting.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._peers[boot_id] = peer
        return peer

    def _note_in_vain(self, boot_id: bytes) -> None:
        self._in_vain[boot_id] = None
        if len(self._in_vain) > IN_VAIN_KEPT:
            del self._in_vain[next(iter(self._in_vain))]

    async def _check_registered(self, candidate: worker_pb2.Candidate) -> None:
        """Raises Unavailable. While the registry does not answer, what it said last holds."""
        reading = self._registry.workers()
        answered = await waits.over(reading, ANSWER_S)
        try:
            if answered:
                self._records = reading.result()
        except OSError as error:  # as without descriptors: no peer is known then
            raise Unavailable(f"the registry cannot be read: {error}") from error
        named = (candidate.worker_id, candidate.boot_id.hex(), candidate.address)
        if named not in {(e.worker_id, e.boot_id, e.address) for e in self._records}:
            raise Unavailable(
                f"worker {candidate.worker_id} is not registered at {candidate.address} under "
                "its boot id: nothing is sent there"
                + ("" if answered else f"; the registry cannot be read: {hung(ANSWER_S)}")
            )

    def _forget_predecessors(self, peer: _Peer) -> None:
        """One boot id has answered at this address: those that did before are dead."""
        for boot_id, other in list(self._peers.items()):
            if other.address == peer.address and other is not peer:
                self.forget(boot_id)

    def _forget_departed(self) -> None:
        """Those that the registry has forgotten, once no connection leads to them: a worker that
        has drained says no word at its end. One that drains still serves what it owes."""
        registered = {record.boot_id for record in self._records}
        for boot_id, peer in list(self._peers.items()):
            if boot_id.hex() in registered or not peer.greeting.done():
                continue
            if not peer.calls.up:
                self.forget(boot_id)

    async def _greet(self, calls: PeerCalls, boot_id: bytes) -> None:
        mine = self._mine()
        theirs = await calls.greet(mine)
        if theirs.boot_id != boot_id:
            raise Unavailable(
                f"worker {theirs.worker_id} has restarted: its boot id is not the placed one"
            )
        greeting.check(mine, theirs)
        pool = greeting.peer_pool(theirs)
        await self._mover.connect(pool)
        await self._first_contact.check(theirs.worker_id, pool)
