"""A fleet on simulated machines: real routers and workers, each a process of its own.

    machine "r0"                      machine "d0"                     machine "p0"
    Fleet, Dispatcher  ═ stream ═▶    serve_link, DecodeWorker  ═ stream ═▶  PrefillWorker
                                      BlockPool, HashEngine ◀── READ ──      BlockPool, HashEngine

Above the seams is the production code; below them are the network, the exchange of READs and the
hash engine. A worker that dies comes back under its name and address with another boot id. Owns
the processes; what befalls them is drawn in draw_scenario.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.decode_worker.speculator import Speculator
from baton.decode_worker.worker import DecodeWorker
from baton.engine.scheduling.batch import StepBatch
from baton.engine.scheduling.blocks import BlockPool
from baton.kv_transfer import handshake
from baton.kv_transfer.memory_mover import MemoryExchange, MemoryMover, MemoryRead
from baton.kv_transfer.peers.bandwidth_probe import BandwidthProbe
from baton.kv_transfer.peers.contact_answers import ContactAnswers
from baton.kv_transfer.peers.peer_client import HANDSHAKE_TIMEOUT_S
from baton.kv_transfer.peers.registered_peers import RegisteredPeers
from baton.prefill_worker.worker import PrefillWorker
from baton.proto import handoff_pb2
from baton.router.dispatch.dispatcher import Dispatcher
from baton.router.fleet.fleet import Fleet
from baton.router.fleet.fleet_timing import FleetTiming
from baton.router.requests.admission import Admission
from baton.router.requests.prompt_limits import ContextLimits
from baton.runtime.config import Config
from baton.runtime.errors import DeviceLost
from baton.runtime.grammar.grammar_compiler import GrammarCompiler
from baton.runtime.grammar.vocabulary import Vocabulary
from baton.runtime.links import LinkClosed
from baton.runtime.registry import MemoryRegistry, Role, WorkerRecord
from baton.runtime.registry_client import RegistryClient
from baton.runtime.worker import announcer
from baton.runtime.worker.kv_bridge import bridged_dtypes
from baton.runtime.worker.linked_routers import LinkedRouters
from baton.runtime.worker.router_links import serve_link
from baton.simulation.fleet.engine_kind import HASHES, WIDE_HASHES, EngineKind, PlainSums
from baton.simulation.fleet.shared_membership import SharedMembership
from baton.simulation.virtual.held_registry import HeldRegistry
from baton.simulation.virtual.machine import Machine
from baton.simulation.virtual.network import Network, Service, SimLink
from baton.simulation.virtual.simulated_links import SimDialer, SimPeerClient
from baton.simulation.virtual.virtual_loop import VirtualLoop
from baton.simulation.virtual.virtual_steps import VirtualSteps

KEY = b"the lab's key"
CONVERSION_S = 0.02  # a call in the checksums' thread, where workers convert KV
DRIFT = 0.04  # of a clock from the world's: two of them are less than a tenth apart


@dataclass(slots=True)
class WorkerProcess:
    """One boot of a worker, with what lies below its seams."""

    machine: Machine
    role: Role
    worker: PrefillWorker | DecodeWorker
    engine: VirtualSteps
    pool: BlockPool
    array: NDArray[np.uint8]  # [blocks, block_bytes]
    mover: MemoryMover
    boot_id: bytes
    record: WorkerRecord
    task: asyncio.Task[None]
    watches: list[asyncio.Task[None]]  # beside the loop, until its end
    finish: Callable[[], Awaitable[None]]  # what it owes to its peers, at its end
    routers: LinkedRouters = field(default_factory=LinkedRouters)


@dataclass(slots=True)
class RouterProcess:
    machine: Machine
    fleet: Fleet
    dispatcher: Dispatcher
    admission: Admission
    task: asyncio.Task[None]


@dataclass(slots=True)
class World:
    """`dice` draw what the environment does: delays, step times, clocks, boot ids."""

    loop: VirtualLoop
    config: Config
    dice: random.Random
    kind: EngineKind = HASHES
    wide: tuple[str, ...] = ()  # workers whose kind is WIDE_HASHES
    sizes: Mapping[str, int] = field(default_factory=dict)  # of blocks, of workers with others
    speculator: Callable[[], Speculator | None] = lambda: None  # of each decode worker
    vocabulary: Vocabulary | None = None  # of workers' grammars
    lost: Callable[[WorkerProcess], None] = lambda process: None  # a worker's device is lost
    host_of: Callable[[str], str | None] = lambda name: None  # None: measurements are not shared
    more_services: Callable[[WorkerProcess], dict[str, Service]] = lambda process: {}
    start_s: float = 0.0  # of a worker's process that follows one which has drained
    step_s: float = 0.002
    delay_s: float = 0.0005
    registry: MemoryRegistry = field(default_factory=MemoryRegistry)
    exchange: MemoryExchange = field(default_factory=MemoryExchange)
    workers: dict[str, WorkerProcess] = field(default_factory=dict)  # the last boot of each
    routers: dict[str, RouterProcess] = field(default_factory=dict)
    boots: dict[bytes, WorkerProcess] = field(default_factory=dict)  # all of them
    roles: dict[str, Role] = field(default_factory=dict)  # that workers are to take on
    removed: set[str] = field(default_factory=set)  # workers that do not come back
    started: Callable[[WorkerProcess], None] = lambda process: None  # receives each
    router_started: Callable[[RouterProcess], None] = lambda process: None
    # see rolling_restart.py
    restart_stage: Callable[[str, WorkerProcess], None] = lambda stage, process: None
    network: Network = field(init=False)
    client: HeldRegistry = field(init=False)  # the registry, as all processes read it
    shared: SharedMembership | None = None  # a Redis server in place of `registry`
    reads: list[MemoryRead] = field(default_factory=list)  # all that were asked for
    _handoffs: int = 0

    def __post_init__(self) -> None:
        self.kind.begin()
        self.client = HeldRegistry(self.registry)
        self.network = Network(self.loop, self._delay)
        self.exchange.later = self._later
        begin = self.exchange.begin

        def noted(read: MemoryRead) -> None:
            self.reads.append(read)
            begin(read)

        self.exchange.begin = noted  # type: ignore[method-assign]  # wraps this instance alone

    def share_registry(self) -> None:
        """Let the processes that are started from now on meet over a Redis server."""
        self.shared = SharedMembership(self.loop, self.dice, self._way_to_server)

    # -- processes ----------------------------------------------------------------------------

    def start_worker(self, name: str, role: Role, blocks: int) -> WorkerProcess:
        before = self.workers.get(name)
        assert before is None or not before.machine.alive  # as worker_lock.py sees to
        machine, boot_id = self.new_machine(name), self.dice.randbytes(16)
        registry = self.registry_of(machine)
        size, handoff = self.sizes.get(name, self.config.pool.block_size), self.config.handoff
        kind = WIDE_HASHES if name in self.wide else self.kind
        if self.wide or self.sizes:
            self.exchange.checksum_s = CONVERSION_S
        engine, array = kind.make(blocks, size, partial(self._step_time_s, machine))
        pool, limits, conversions = (
            BlockPool(blocks, size),
            kind.limits(KEY),
            kind.conversions(array),
        )
        mover = MemoryMover(PlainSums(array, kind.slabs, rows=kind.rows), boot_id, self.exchange)
        mine = cache(partial(_hello, name, mover, kind, size, self.host_of(name)))
        grammars = GrammarCompiler(self.vocabulary, threads=False)
        bandwidth_probe = BandwidthProbe(mover, pool, handoff.preflight_floor_gb_per_s)
        dial = partial(SimPeerClient, self.network, machine)
        patience_s = HANDSHAKE_TIMEOUT_S  # a lease is short here beside a first contact's READs
        peers = RegisteredPeers(mine, mover, dial, bandwidth_probe, registry, patience_s)
        below: dict[str, Any] = {
            "worker_id": name,
            "boot_id": boot_id,
            "engine": engine,
            "pool": pool,
            "mover": mover,
            "peers": peers,
            "limits": replace(limits, kv_terms=handshake.terms(mine())),
            "config": self.config,
            "wall_offset_s": 0.0,
            "new_id": self._new_id,
            "grammars": grammars,
            "conversions": conversions,
        }
        worker: PrefillWorker | DecodeWorker
        if role == "prefill":
            worker = PrefillWorker(**below)
        else:
            worker = DecodeWorker(**below, speculator=self.speculator())
        finish = partial(_finish, worker, peers, 2 * handoff.lease_s)
        task = machine.spawn(worker.run(), "loop")
        watches = [machine.spawn(worker.health.watch(), "probe")]
        record = WorkerRecord(name, boot_id.hex(), role, machine.address, "", "hash", 1)
        process = WorkerProcess(
            machine, role, worker, engine, pool, array, mover, boot_id, record, task, watches,
            finish,
        )  # fmt: skip
        task.add_done_callback(lambda over: self._ended(process))
        self.workers[name] = process
        self.boots.setdefault(boot_id, process)
        self.started(process)
        services = self._services(process, mine) | self.more_services(process)
        self.network.listen(machine, services)
        self._announce(process)
        return process

    def registry_of(self, machine: Machine) -> RegistryClient:
        """Return the registry as a machine's process reads it."""
        return self.client if self.shared is None else self.shared.client_of(machine)

    def _announce(self, process: WorkerProcess) -> None:
        if self.shared is None:
            self.registry.announce(process.record)
            return
        self.shared.records[process.record.boot_id] = process.record
        registry = self.shared.client_of(process.machine)
        announcing = announcer.announce(registry, process.record)
        process.watches.append(process.machine.spawn(announcing, "announcer"))

    async def withdraw(self, process: WorkerProcess) -> None:
        """Take a worker out of the registry, as its process does at its end."""
        if self.shared is None:
            self.registry.withdraw(process.record.worker_id, process.record.boot_id)
        else:
            await announcer.withdraw(self.shared.client_of(process.machine), process.record)

    def _ended(self, process: WorkerProcess) -> None:
        """Notice a loop that has ended because a device is lost."""
        cancelled = process.task.cancelled()
        if not cancelled and isinstance(process.task.exception(), DeviceLost):
            self.lost(process)

    def _step_time_s(self, machine: Machine, batch: StepBatch) -> float:
        tokens = sum(len(piece.tokens) for piece in batch.slices)
        spread = 0.5 + self.dice.random()
        hang_s, machine.hang_s = machine.hang_s, 0.0
        return hang_s + machine.slowness * self.step_s * (1 + tokens / 16) * spread

    def start_router(self, name: str) -> RouterProcess:
        machine = self.new_machine(name)
        router, limits = self.config.router, self.kind.limits(KEY)
        fleet = Fleet(
            self.registry_of(machine),
            SimDialer(self.network, machine),
            router,
            KEY,
            ContextLimits(limits.max_context, limits.vocab_size),
            boot_id=self.dice.randbytes(16),
            reports=None if self.shared is None else self.shared.reports_of(machine),
            timing=FleetTiming(self.config.step, self.config.slo.itl_s),
        )
        dispatcher = Dispatcher(fleet, router, self.config.step)
        dispatcher.confirm_weight = 1  # answers are short here
        self.network.listen(machine, {})
        task = machine.spawn(fleet.run(dispatcher), "fleet")
        admission = Admission(router.max_requests, asyncio.get_running_loop().time)
        process = RouterProcess(machine, fleet, dispatcher, admission, task)
        self.routers[name] = process
        self.router_started(process)
        return process

    def machine(self, name: str) -> Machine:
        """Return the machine of the last process of that name."""
        return (self.workers.get(name) or self.routers[name]).machine

    def kill(self, name: str, *, silent: bool) -> None:
        machine = self.machine(name)
        if not machine.alive:
            return
        machine.kill(silent=silent)
        if name in self.workers:
            self.exchange.leave(self.workers[name].boot_id)
        self.network.killed(machine)

    def restart(self, name: str) -> None:
        """A worker that is gone comes back, in the role that it is to have by now, unless it was
        removed."""
        if name in self.removed:
            self.removed.discard(name)
            del self.workers[name]
        if (old := self.workers.get(name)) is None:
            return
        self.start_worker(name, self.roles.get(name, old.role), old.pool.total)

    def reads_in_flight(self) -> int:
        """READs that wait for their turn, move, are held back, or have not landed yet."""
        self.reads = [read for read in self.reads if not read.settled.done()]
        return len(self.reads)

    def of_boot(self, boot_id: bytes) -> WorkerProcess:
        return self.boots[boot_id]

    def new_machine(self, name: str) -> Machine:
        """Return a machine for one process, with a clock of its own."""
        rate = 1 + self.dice.uniform(-DRIFT, DRIFT)
        return Machine(name, name, rate=rate, offset_s=self.dice.uniform(0, 1000))

    def _new_id(self) -> bytes:
        self._handoffs += 1
        return self._handoffs.to_bytes(16, "big")

    def _delay(self, source: Machine, target: Machine) -> float:
        return self.delay_s * self.dice.random() * max(source.slowness, target.slowness)

    def _way_to_server(self, machine: Machine) -> float:
        return self._delay(machine, machine)

    def _later(self, delay_s: float, callback: object) -> None:
        self.loop.call_world(self.loop.world_s + delay_s, callback)

    # -- what a worker serves -----------------------------------------------------------------

    def _services(
        self, process: WorkerProcess, mine: Callable[[], handoff_pb2.HandshakeMessage]
    ) -> dict[str, Service]:
        worker, router = process.worker, self.config.router

        async def link(link: SimLink) -> None:
            try:
                await serve_link(
                    link,
                    worker,
                    heartbeat_s=router.link_heartbeat_s,
                    silence_s=router.link_silence_s,
                    hang_s=router.hang_s,
                    attached=lambda hello: process.routers.open(link, hello.router_id, ""),
                    on_heartbeat=lambda beat: process.routers.record_heartbeat(link, beat),
                )
            finally:
                process.routers.close(link)

        async def blocks(link: SimLink) -> None:
            with contextlib.suppress(LinkClosed):  # its caller has left
                await _send_blocks(link, worker)

        has_host = self.host_of(process.machine.name) is not None
        paced = ContactAnswers(worker.grants, mine) if has_host else None

        async def greet(link: SimLink) -> None:
            with contextlib.suppress(LinkClosed):  # the one that greeted does not wait any more
                theirs = await link.receive()
                await link.send(mine() if paced is None else paced.answer(theirs))
            await link.close()

        return {"link": link, "blocks": blocks, "greet": greet, "handoff": worker.grants.serve}


def _hello(
    name: str, mover: MemoryMover, kind: EngineKind, block_size: int, host: str | None
) -> handoff_pb2.HandshakeMessage:
    limits = kind.limits(KEY)
    common = handshake.compatibility(
        limits.fingerprint,
        limits.kv_dtype,
        block_size,
        layers=1,
        kv_heads=kind.slabs,
        head_dim=8,
        bridged_dtypes=bridged_dtypes(limits.kv_dtype),
        bridges_sizes=mover.bridges_sizes,
    )
    return handshake.build(name, mover.describe(), common, host)


async def _finish(
    worker: PrefillWorker | DecodeWorker, peers: RegisteredPeers, within_s: float
) -> None:
    """Wait for what a worker still grants, as its process does at its end."""
    await worker.loop.drain(worker.grants.idle, within_s)
    await peers.close()


async def _send_blocks(link: SimLink, worker: PrefillWorker | DecodeWorker) -> None:
    """Send block events until the caller leaves, which cancels the handler as gRPC does."""
    sending = asyncio.current_task()
    assert sending is not None
    events = worker.feed.watch()
    link.tell_end(sending.cancel)
    try:
        async for event in events:
            await link.send(event)
    finally:
        link.tell_end(None)
        await events.aclose()  # type: ignore[attr-defined]  # it is a generator
        await link.close()
