"""Faults of the Redis server of a shared registry, and entries that others write into it.

`strike` begins a fault and returns what ends it. Knows the server, no workers' code.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from baton.runtime.registry import WorkerRecord
from baton.runtime.shared_registry.router_report import ReportSigner, RouterReport
from baton.runtime.shared_registry.signed_entry import EntrySigner, SignedEntry
from baton.simulation.fleet.scenario import Fault
from baton.simulation.fleet.shared_membership import (
    CHANNEL,
    LIFETIME_S,
    PREFIX,
    REPORTS,
    SharedMembership,
)
from baton.simulation.virtual.simulated_redis import EPOCH_S
from baton.simulation.virtual.virtual_loop import VirtualLoop

KINDS = ("killed", "paused", "flushed", "full", "slow", "cut", "forged", "replayed")
SLOW_S = (0.3, 3.0)  # that a command takes: below and above a client's timeout
WRITE_EVERY_S = 0.2  # of a process that writes what is not its own
MAX_REPLAYED = 200  # entries
_COUNTER = (1 << 63) - 1


class RedisFaults:
    """One per run. `dice` are the run's faults'."""

    def __init__(self, membership: SharedMembership, loop: VirtualLoop, dice: random.Random):
        self._membership = membership
        self._loop = loop
        self._dice = dice
        self._seen: dict[bytes, None] = {}  # all entries that were written, once
        self._reports: dict[bytes, None] = {}  # all reports of routers
        self.over: Callable[[], None] = lambda: None  # a fault that hindered the server is over
        note = membership.server.written

        def written(content: bytes, at_s: float) -> None:
            (self._seen if b'"record"' in content else self._reports)[content] = None
            note(content, at_s)

        membership.server.written = written

    def strike(self, fault: Fault) -> Callable[[], None]:
        server, (name,) = self._membership.server, fault.targets
        match fault.what:
            case "killed":
                server.kill()
                return self._ending(server.start)
            case "paused":
                server.pause()
                return self._ending(server.resume)
            case "cut":
                server.cut(name)
                return self._ending(lambda: server.heal(name))
            case "full":
                server.full = True
                return self._ending(lambda: setattr(server, "full", False))
            case "slow":
                server.slow_s = self._dice.choice(SLOW_S)
                return self._ending(lambda: setattr(server, "slow_s", 0.0))
            case "flushed":
                server.values.clear()
                self.over()
                return lambda: None
        writes = self._forge if fault.what == "forged" else self._replay
        return self._repeating(writes)

    def _ending(self, ends: Callable[[], None]) -> Callable[[], None]:
        def over() -> None:
            ends()
            self.over()

        return over

    def _repeating(self, writes: Callable[[], None]) -> Callable[[], None]:
        goes_on = True

        def again() -> None:
            if goes_on:
                writes()
                self._loop.call_world(self._loop.world_s + WRITE_EVERY_S, again)

        def over() -> None:
            nonlocal goes_on
            goes_on = False

        again()
        return over

    def _write(self, record: WorkerRecord, content: bytes) -> None:
        key = f"{PREFIX}:{'0' * 16}:{record.boot_id}".encode()
        self._membership.server.write(key, content, LIFETIME_S, CHANNEL)

    def _publish(self, content: bytes) -> None:
        self._membership.server.write(f"{PREFIX}:report".encode(), content, LIFETIME_S, REPORTS)

    def _wall_ns(self) -> int:
        return round((EPOCH_S + self._loop.world_s) * 1e9)

    def _forge(self) -> None:
        """Entries of a worker that does not exist, of a real one at another's address, and of one
        that has withdrawn: signed with another token, or copied and changed. And a router's report
        that all workers fail."""
        records = list(self._membership.records.values())
        one, other = self._dice.choice(records), self._dice.choice(records)
        invented = replace(one, worker_id=f"x{one.worker_id}", boot_id="f" * 32)
        moved = replace(one, address=other.address, boot_id="e" * 32)
        for record in (invented, moved):
            entry = SignedEntry(record, _COUNTER, _COUNTER)
            self._write(record, EntrySigner(("another token",)).write(entry))
        for content in self._dice.sample(list(self._seen), min(2, len(self._seen))):
            changed = content.replace(b'"withdrawn": false', b'"withdrawn": true')
            self._write(one, changed)
        boots = tuple(record.boot_id for record in records)
        lie = RouterReport("d" * 32, self._wall_ns(), boots, tuple((e, 64, 1 << 16) for e in boots))
        self._publish(ReportSigner(("another token",)).write(lie))

    def _replay(self) -> None:
        """All that was ever written, entries under the keys that a full read looks at."""
        for content in list(self._reports)[-MAX_REPLAYED:]:
            self._publish(content)
        server = self._membership.server
        for number, content in enumerate(list(self._seen)[-MAX_REPLAYED:]):
            key = f"{PREFIX}:{number:016x}:{'0' * 32}".encode()
            server.write(key, content, LIFETIME_S, CHANNEL)
