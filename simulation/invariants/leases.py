"""Check the promises of leases during a run.

A READ lands only in blocks that are kept for it; what was read while its own handoff did not pin
it is tainted until it is read again, and no request may use it; and no reader trusts a lease for
longer than its granter keeps it, by the world's clock. Sits on handoffs and READs of one world,
and changes nothing of what happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from baton.decode_worker.scheduler import DecodeScheduler
from baton.decode_worker.sequences import Group
from baton.decode_worker.worker import DecodeWorker
from baton.engine.scheduling.blocks import Hold
from baton.kv_transfer import granter
from baton.kv_transfer.conversion import HostConversion
from baton.kv_transfer.lease import GranterLease
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.memory_mover import Attempt, Fate, MemoryRead
from baton.kv_transfer.peers.cached_prefix import CachedPrefix
from baton.kv_transfer.peers.converted_prompt import ConvertedPrompt
from baton.kv_transfer.reader import HandoffReader
from baton.kv_transfer.session import ReaderSession
from baton.prefill_worker.prompts import Prompt
from baton.prefill_worker.scheduler import PrefillScheduler
from baton.proto import handoff_pb2
from baton.simulation.fleet.world import WorkerProcess, World
from baton.simulation.virtual.machine import OWNER, Machine


@dataclass(frozen=True, slots=True)
class Granted:
    """One handoff, as its granter has it."""

    prompt: Prompt | CachedPrefix | ConvertedPrompt
    lease: GranterLease
    machine: Machine

    def pins(self, block: int) -> bool:
        return self.machine.alive and block in self.prompt.pinned

    def until_s(self) -> float:
        """The lease's end, by the world's clock."""
        return (self.lease._until - self.machine.offset_s) / self.machine.rate


class Leases:
    """`breaches` gets a line for each promise that is broken."""

    def __init__(self, world: World, breaches: list[str]) -> None:
        self._world = world
        self._breaches = breaches
        # The reader's boot, its block, and the cell of that: 0 where all of it is read at once.
        self.tainted: set[tuple[bytes, int, int]] = set()
        self.granted: dict[bytes, Granted] = {}  # all admitted handoffs by their ids
        self._wanted: dict[tuple[bytes, int], bytes] = {}  # the last handoff that is to fill it
        self._reads: dict[int, bytes] = {}  # the handoffs of READs that have been posted
        self.stale_reads: set[int] = set()  # READs of which a fault makes another process's
        self._sessions: WeakKeyDictionary[ReaderSession, bytes] = WeakKeyDictionary()

    def posted(self, attempt: Attempt, fate: Fate) -> None:
        """Record a READ as it starts: a handoff's own, or a measurement (without checksums)."""
        if attempt.checksummed:
            self._reads[attempt.number] = self._wanted[
                attempt.reader, attempt.local[0] // attempt.joined
            ]
        if fate.stale:
            self.stale_reads.add(attempt.number)

    def landing(self, attempt: Attempt) -> None:
        granted = self.granted.get(self._reads.pop(attempt.number, b""))
        if granted and not granted.machine.alive and attempt.number not in self.stale_reads:
            self._breaches.append(
                f"{granted.machine.name}: a READ lands from a process under the boot id of the "
                "one that is dead"
            )
        for remote, own in _units(attempt, attempt.units):
            pinned = granted is not None and all(map(granted.pins, remote))
            for block, cell in own:
                self._check_kept(attempt, block)
                if pinned:
                    self.tainted.discard((attempt.reader, block, cell))
                else:
                    self.tainted.add((attempt.reader, block, cell))

    def landing_early(self, read: MemoryRead) -> None:
        """Judge some blocks of a READ, which land again with the others. (In a round of the loop
        both may come, in any order: what comes second then brings the same.)"""
        attempt, count = read.attempt, read._fate.early
        if read.settled.done() or self._world.exchange.pool(attempt.granter) is None:
            return
        granted = self.granted.get(self._reads.get(attempt.number, b""))
        for remote, own in _units(attempt, count):
            for block, cell in own:
                self._check_kept(attempt, block)
                if granted is None or not all(map(granted.pins, remote)):
                    self.tainted.add((attempt.reader, block, cell))

    def _check_kept(self, attempt: Attempt, local: int) -> None:
        reader = self._world.of_boot(attempt.reader)
        holds = (Hold.LEASED, Hold.QUARANTINED)
        if reader.machine.alive and not any(reader.pool.is_held(local, hold) for hold in holds):
            self._breaches.append(
                f"{reader.machine.name}: a READ lands in block {local}, which is kept for none"
            )

    def _converts(
        self, _: HostConversion, sources: object, targets: list[int], seeds: object
    ) -> None:
        """A conversion writes into pinned blocks, also where its handoff is over."""
        machine = OWNER.get()
        (process,) = [each for each in self._world.boots.values() if each.machine is machine]
        if not all(process.pool.is_held(target, Hold.PINNED) for target in targets):
            self._breaches.append(
                f"{process.machine.name}: a conversion writes into blocks that are not pinned"
            )

    def _orders(self, _: HostPool, blocks: list[int], *__: object) -> None:
        """Blocks that are put in order are kept for their reader."""
        machine, kept = OWNER.get(), (Hold.LEASED, Hold.QUARANTINED)
        (process,) = [each for each in self._world.boots.values() if each.machine is machine]
        if not all(any(process.pool.is_held(block, hold) for hold in kept) for block in blocks):
            self._breaches.append(
                f"{process.machine.name}: blocks that are kept for none are put in order"
            )

    def over(self, process: WorkerProcess) -> None:
        """Watch what a worker that has just been started uses."""
        if isinstance(process.worker, DecodeWorker):
            self._over_decode(process, process.worker._scheduler)
        else:
            self._over_prefill(process, process.worker._scheduler)

    def _over_decode(self, process: WorkerProcess, scheduler: DecodeScheduler) -> None:
        fetched: Callable[[Group], None] = scheduler.fetched

        def watched(group: Group) -> None:
            # without those behind its tokens, which only a granter with larger blocks fills
            end = -(-len(group.tokens) // process.pool.block_size)
            self._check_used(process, group.request.request_id, group.blocks[group.held : end])
            fetched(group)

        scheduler.fetched = watched  # type: ignore[method-assign]  # wraps this instance alone

    def _over_prefill(self, process: WorkerProcess, scheduler: PrefillScheduler) -> None:
        read_ended: Callable[[Prompt, int], None] = scheduler.read_ended

        def watched(prompt: Prompt, verified: int) -> None:
            used = prompt.blocks[prompt.cached : prompt.cached + verified]
            self._check_used(process, prompt.request_id, used)
            read_ended(prompt, verified)

        scheduler.read_ended = watched  # type: ignore[method-assign]  # wraps this instance alone

    def _check_used(self, process: WorkerProcess, request_id: str, blocks: list[int]) -> None:
        tainted = {block for boot_id, block, _ in self.tainted if boot_id == process.boot_id}
        if tainted.intersection(blocks):
            self._breaches.append(
                f"{process.machine.name}: {request_id} uses blocks that were read while their "
                "handoff did not pin them"
            )

    @contextmanager
    def watching(self) -> Iterator[None]:
        watched: list[tuple[Any, str, Callable[..., None]]] = [
            (granter._Handoff, "run", self._begins),
            (HandoffReader, "fetch", self.fetches),
            (ReaderSession, "start", self.opens),
            (ReaderSession, "_set_alarm", self.check_trust),
            (MemoryRead, "_land_early", self.landing_early),
            (HostConversion, "convert", self._converts),
            (HostPool, "put_in_order", self._orders),
        ]
        before = [owner.__dict__[name] for owner, name, _ in watched]
        for (owner, name, look), own in zip(watched, before, strict=True):
            setattr(owner, name, _looked_at(own, look))
        try:
            yield
        finally:
            for (owner, name, _), own in zip(watched, before, strict=True):
                setattr(owner, name, own)

    def _begins(self, handoff: Any) -> None:
        machine = OWNER.get()
        assert machine is not None
        handoff_id = handoff._opening.handoff_id
        self.granted[handoff_id] = Granted(handoff._prompt, handoff._lease, machine)

    def fetches(
        self, reader: Any, opening: handoff_pb2.OpenHandoff, blocks: list[int], *_: object
    ) -> None:
        """Record which handoff is to fill the blocks that its reader fetches."""
        boot_id = opening.reader_boot_id
        for block in blocks:
            self._wanted[boot_id, block] = opening.handoff_id
        if self._world.sizes:  # what fills a cell besides the first is not read again each time
            kept = {each for each in self.tainted if each[0] != boot_id or each[2] == 0}
            self.tainted -= {each for each in self.tainted - kept if each[1] in blocks}

    def opens(self, session: ReaderSession, opening: handoff_pb2.OpenHandoff) -> None:
        """Record the handoff of a session that starts."""
        self._sessions[session] = opening.handoff_id

    def check_trust(self, session: ReaderSession) -> None:
        """Compare trust and pins after each message that prolongs the trust."""
        until, granted = session._lease.trusted_until, self.granted.get(self._sessions[session])
        reader = OWNER.get()
        assert reader is not None
        if until is None or granted is None:
            return
        left_s = (until - asyncio.get_running_loop().time()) / reader.rate
        longer_s = self._world.loop.world_s + left_s - granted.until_s()
        if left_s > 0 and longer_s > 0:
            self._breaches.append(
                f"{reader.name}: a lease is trusted for {longer_s:.3f} s longer than "
                f"{granted.machine.name} keeps it"
            )


def _units(attempt: Attempt, count: int) -> Iterator[tuple[tuple[int, ...], list[tuple[int, int]]]]:
    """Yield the granter's blocks of the first units of a READ, and the reader's with their cell."""
    theirs, ours = attempt.parts
    for unit in range(count):
        remote = attempt.remote[unit * theirs : (unit + 1) * theirs]
        cells = attempt.local[unit * ours : (unit + 1) * ours]
        yield remote, [divmod(cell, attempt.joined) for cell in cells]


def _looked_at(own: Any, look: Callable[..., None]) -> Any:
    """The product's own function, with a look before it."""

    def call(*args: Any) -> Any:
        look(*args)
        return own(*args)

    return call
