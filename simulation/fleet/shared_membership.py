"""Workers and routers that meet over a Redis server: each process has a client of its own.

Above redis-py's client is the production code: RedisRegistry, the signatures, the announcer. The
hosts' wall clocks differ by up to SKEW_S. Owns the server and the clients.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from baton.runtime.registry import WorkerRecord
from baton.runtime.shared_registry.redis_registry import RedisRegistry
from baton.runtime.shared_registry.router_report import ReportSigner
from baton.runtime.shared_registry.router_reports import RedisReports
from baton.runtime.shared_registry.signed_entry import EntrySigner
from baton.simulation.virtual.machine import Machine
from baton.simulation.virtual.simulated_redis import (
    EPOCH_S,
    SimulatedRedis,
    SimulatedRedisClient,
)
from baton.simulation.virtual.virtual_loop import VirtualLoop

TOKEN = "the lab's token"
PREFIX = "baton:lab"
CHANNEL = f"{PREFIX}:entries"
REPORTS = f"{PREFIX}:routers"
LIFETIME_S = 8.0  # the shortest that can be configured
SKEW_S = 0.02  # of a host's wall clock; a process that is restarted takes as long at least


class SharedMembership:
    """`delay_s` is drawn for each way between a machine and the server."""

    def __init__(
        self, loop: VirtualLoop, dice: random.Random, delay_s: Callable[[Machine], float]
    ) -> None:
        self._loop = loop
        self._dice = dice
        self.server = SimulatedRedis(loop, delay_s)
        self.records: dict[str, WorkerRecord] = {}  # what workers have announced, by boot id
        self._clients: dict[Machine, RedisRegistry] = {}
        self.opened: Callable[[Machine, RedisRegistry], None] = lambda machine, registry: None

    def client_of(self, machine: Machine) -> RedisRegistry:
        """Return the client of a machine's process."""
        if (known := self._clients.get(machine)) is not None:
            return known
        client: Any = SimulatedRedisClient(self.server, machine)  # in place of redis-py's
        signer, wall_ns = EntrySigner((TOKEN,)), partial(self._wall_ns, self._skew_s())
        made = RedisRegistry(client, "redis://lab", PREFIX, signer, LIFETIME_S, wall_ns)
        self._clients[machine] = made
        self.opened(machine, made)
        return made

    def reports_of(self, machine: Machine) -> RedisReports:
        """Return how a router of that machine reaches the others."""
        client: Any = SimulatedRedisClient(self.server, machine)
        wall_ns = partial(self._wall_ns, 0.0)
        return RedisReports(client, "redis://lab", PREFIX, ReportSigner((TOKEN,)), wall_ns)

    def _skew_s(self) -> float:
        return self._dice.uniform(-SKEW_S / 2, SKEW_S / 2)

    def _wall_ns(self, skew_s: float) -> int:
        return round((EPOCH_S + self._loop.world_s + skew_s) * 1e9)
