"""The number of workers, as an orchestrator has it: names in order, of which the last leaves first.

    controller ─ count, check, resize ─▶ number, if it is still what was read ─▶ a worker starts
                                                                              └▶ one is removed

A worker that is removed gets SIGTERM: it drains, if it has not yet, and does not come back. Owns
the number; the world owns the workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping

from baton.planner.control.worker_count import WorkerCount
from baton.planner.overdue_workers import WorkerProblem
from baton.runtime.errors import BatonError
from baton.simulation.fleet.rolling_restart import roll
from baton.simulation.fleet.world import World

BLOCKS = 80  # of a worker that is started


class SimulatedPool:
    """`unborn`: workers that are asked for from now on do not start. `removing` receives the name
    of each worker that is removed, just before it is."""

    def __init__(self, world: World, names: tuple[str, ...]) -> None:
        self.names = names
        self.unborn = False
        self.removing: Callable[[str], None] = lambda name: None
        self.starting: set[str] = set()
        self._world = world
        self._version = 1
        self._made = len(names)

    def count(self) -> WorkerCount:
        return WorkerCount(str(self._version), self.names)

    def compare(self, seen: WorkerCount) -> None:
        """Raises BatonError if the number is another one than was read."""
        if seen.version != str(self._version):
            raise BatonError("the number of workers was changed since it was read")

    def changed(self) -> None:
        """Count another version: a worker starts, drains or ends, as its pod is ready or not."""
        self._version += 1

    def resize(self, seen: WorkerCount, workers: int) -> None:
        """Raises BatonError as `compare`."""
        self.compare(seen)
        self._version += 1
        while len(self.names) > workers:
            *kept, last = self.names
            self.names = tuple(kept)
            self._remove(last)
        while len(self.names) < workers:
            name = f"d{self._made}"
            self._made += 1
            self.names = (*self.names, name)
            if not self.unborn:
                self.starting.add(name)
                self._world.loop.call_world(
                    self._world.loop.world_s + self._world.start_s, self._start, name
                )

    def _start(self, name: str) -> None:
        self.starting.discard(name)
        if name in self.names:
            self._world.start_worker(name, "decode", BLOCKS)

    def _remove(self, name: str) -> None:
        world = self._world
        self.removing(name)
        process = world.workers.get(name)
        if process is None:
            return
        if not process.machine.alive:
            del world.workers[name]
            return
        world.removed.add(name)
        if not process.worker.draining.is_set():
            process.machine.spawn(roll(world, name), "drain")


class PoolConnection:
    """One controller's way to the orchestrator; implements `WorkerPool`. `passes` is awaited at
    each stage of a step, before and after it."""

    def __init__(
        self,
        pool: SimulatedPool,
        way_s: Callable[[], float],
        passes: Callable[[str], Awaitable[None]],
    ) -> None:
        self._pool = pool
        self._way_s = way_s
        self._passes = passes

    async def count(self) -> WorkerCount:
        await self._way()
        seen = self._pool.count()
        await self._way()
        return seen

    async def check(self, seen: WorkerCount, workers: int) -> None:
        await self._way()
        self._pool.compare(seen)
        await self._way()

    async def resize(self, seen: WorkerCount, workers: int) -> None:
        await self._passes("before resize")
        await self._way()
        self._pool.resize(seen, workers)
        await self._passes("after resize")
        await self._way()

    async def problems(self, missing: Collection[str]) -> Mapping[str, WorkerProblem]:
        await self._way()
        return {}

    async def close(self) -> None:
        """It has no connection of its own."""

    async def _way(self) -> None:
        """Simulate the way to the orchestrator."""
        await asyncio.sleep(self._way_s())  # on virtual time, which no event replaces
