"""Checks the members that each process lists over a Redis server: all living ones, and no other.

    a reader forgets a member   only if it could read, and the member has not announced itself
                                for a lifetime
    the server can be used      one lifetime later every living worker has its entry there, and
                                every living process lists it
    a router is ready           only with a link to a decode worker

Looked at on the world's clock; changes nothing of what happens.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from baton.router.client_access.router import Router
from baton.runtime.errors import Unavailable
from baton.runtime.registry import WorkerRecord
from baton.runtime.shared_registry.redis_registry import FULL_READ_S, RedisRegistry
from baton.simulation.fleet.scenario import Fault
from baton.simulation.fleet.shared_membership import LIFETIME_S, SharedMembership
from baton.simulation.fleet.world import DRIFT, RouterProcess, World
from baton.simulation.virtual.machine import Machine

SURE_SHARE = 0.9  # of a lifetime: by no clock it is over
BACK_S = LIFETIME_S * (1 + DRIFT) + 0.1  # by the slowest clock, and the way there
GONE_S = (LIFETIME_S + FULL_READ_S) * (1 + DRIFT) + 0.3  # a full read ends a lifetime
LOOK_EVERY_S = 0.1
HELD_BACK = ("pause", "slow", "hang")  # what keeps a process from announcing itself


class Membership:
    """`breaches` gets a line for each. Does nothing in a world without a Redis server."""

    def __init__(self, world: World, breaches: list[str]) -> None:
        self._world = world
        self._breaches = breaches
        self._written_s: dict[str, float] = {}  # the last time of each boot's own entry
        self._counters: dict[str, int] = {}
        self._unreadable_s: dict[str, float] = {}  # by machine: when it was so last
        self._listed: dict[Machine, dict[str, WorkerRecord]] = {}
        self._readers: dict[Machine, RedisRegistry] = {}
        self._gone_s: dict[str, float] = {}  # boots that ended, as they were first seen so
        self._hindered = 0  # how often the server, or a process, was
        if world.shared is not None:
            self._watch(world.shared)

    def _watch(self, shared: SharedMembership) -> None:
        shared.opened = self._opened
        shared.server.written = self._written
        self._world.loop.call_world(LOOK_EVERY_S, self._look, shared)

    def struck(self, fault: Fault) -> None:
        """Record a fault before it strikes."""
        if fault.kind == "redis" or fault.kind in HELD_BACK:
            self._hindered += 1

    def over(self) -> None:
        """Record that the server can be used again, or was flushed."""
        self._hindered += 1
        loop, shared = self._world.loop, self._world.shared
        assert shared is not None
        machines = [process.machine for process in self._world.workers.values()]
        loop.call_world(loop.world_s + BACK_S, self._check_back, shared, self._hindered, machines)

    def over_router(self, process: RouterProcess) -> None:
        if self._world.shared is not None:
            self._world.loop.call_world(self._world.loop.world_s, self._check_ready, process)

    def _written(self, content: bytes, at_s: float) -> None:
        entry = json.loads(content)
        if "record" not in entry:
            return  # a router's report
        boot_id, counter = entry["record"]["boot_id"], entry["counter"]
        if counter > self._counters.get(boot_id, 0):
            self._counters[boot_id] = counter
            self._written_s[boot_id] = at_s

    def _opened(self, machine: Machine, registry: RedisRegistry) -> None:
        self._readers[machine] = registry
        ask = registry.workers

        def watched() -> asyncio.Future[list[WorkerRecord]]:
            future = ask()
            future.add_done_callback(lambda done: self._answered(machine, done))
            return future

        registry.workers = watched  # type: ignore[method-assign]  # wraps this instance alone

    def _answered(self, machine: Machine, answer: asyncio.Future[list[WorkerRecord]]) -> None:
        if answer.cancelled() or answer.exception() is not None:
            return
        now = {record.boot_id: record for record in answer.result()}
        before, self._listed[machine] = self._listed.get(machine, {}), now
        for boot_id in before.keys() - now.keys():
            self._check_forgotten(machine, before[boot_id])
        for record in now.values():
            self._check_listed(machine, record)

    def _check_forgotten(self, reader: Machine, record: WorkerRecord) -> None:
        process = self._world.boots[bytes.fromhex(record.boot_id)]
        if not process.machine.alive or process.worker.draining.is_set():
            return
        world_s = self._world.loop.world_s
        silent_s = world_s - self._written_s.get(record.boot_id, 0.0)
        read_s = world_s - self._unreadable_s.get(reader.name, 0.0)
        if min(silent_s, read_s) < SURE_SHARE * LIFETIME_S:
            self._breaches.append(
                f"{reader.name} forgot {record.worker_id}, which announced itself {silent_s:.2f} s "
                f"ago, {read_s:.2f} s after the registry could not be read"
            )

    def _check_listed(self, reader: Machine, record: WorkerRecord) -> None:
        shared, world = self._world.shared, self._world
        assert shared is not None
        if shared.records.get(record.boot_id) != record:
            self._breaches.append(f"{reader.name} lists {record}, which no worker announced")
            return
        gone_s = self._gone_s.get(record.boot_id)
        if gone_s is None:
            return
        listed_s = world.loop.world_s - max(gone_s, self._unreadable_s.get(reader.name, 0.0))
        if listed_s > GONE_S:
            self._breaches.append(
                f"{reader.name} lists {record.worker_id} {listed_s:.2f} s after that boot's end"
            )

    def _look(self, shared: SharedMembership) -> None:
        """Record which processes cannot use the server now, and which boots have ended."""
        now_s = self._world.loop.world_s
        for machine in self._readers:
            if machine.stopped or not shared.server.usable_by(machine):
                self._unreadable_s[machine.name] = now_s
        for process in self._world.boots.values():
            if not process.machine.alive:
                self._gone_s.setdefault(process.record.boot_id, now_s)
        self._world.loop.call_world(now_s + LOOK_EVERY_S, self._look, shared)

    def _check_back(self, shared: SharedMembership, hindered: int, machines: list[Machine]) -> None:
        """One lifetime after the server's return, if nothing hindered it, or a worker, since."""
        if hindered != self._hindered:
            return
        stored = {json.loads(content)["record"]["boot_id"] for content in self._stored(shared)}
        for process in self._world.workers.values():
            if process.machine not in machines or process.worker.draining.is_set():
                continue
            if process.machine.stopped:
                continue
            boot_id, name = process.record.boot_id, process.machine.name
            if boot_id not in stored:
                self._breaches.append(f"{name} is not announced again {BACK_S:.1f} s after Redis")
            for reader, registry in self._readers.items():
                known = {record.boot_id for record in registry._table.records()}
                if boot_id not in known and not reader.stopped:
                    self._breaches.append(f"{reader.name} does not list {name} after Redis is back")

    def _stored(self, shared: SharedMembership) -> list[bytes]:
        now_s = self._world.loop.world_s
        kept = [content for content, ends_s in shared.server.values.values() if ends_s > now_s]
        return [content for content in kept if b'"record"' in content]

    def _check_ready(self, process: RouterProcess) -> None:
        """Ask as `/readyz` does."""
        if self._world.routers.get(process.machine.name) is not process:
            return
        router: Any = SimpleNamespace(stopping=False, fleet=process.fleet)
        linked = [
            link
            for link in process.fleet._links.values()
            if link.up and link.record.role == "decode"
        ]
        if not process.machine.stopped and not linked:
            try:
                Router.check_ready(router)
            except Unavailable:
                pass
            else:
                self._breaches.append(
                    f"{process.machine.name} is ready and has no link to a decode worker"
                )
        self._world.loop.call_world(
            self._world.loop.world_s + LOOK_EVERY_S, self._check_ready, process
        )
