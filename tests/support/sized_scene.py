"""A leader of five workers whose number may change, with a pool whose calls are recorded, refused
or late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from baton.planner.control.size_loop import SizeLoop
from baton.planner.control.worker_count import WorkerCount
from baton.planner.fleet_size import SizeBounds, SizeController
from baton.planner.overdue_workers import WorkerProblem
from baton.runtime.errors import BatonError, Unavailable
from tests.support.role_loop_scene import RoleLoopScene, ScriptedLeadership

BOUNDS = SizeBounds(least=2, most=8, release_s=20.0)
START_S = 400.0  # the longest start of a worker


@dataclass
class ScriptedPool:
    """A number, and what was called; `faults` are raised by the calls of that name, and the call
    that `hangs` does not end. `amid` is called within the call of its name."""

    asked: int = 5
    version: int = 1
    last: str = "d3"
    least: int = 1
    calls: list[str] = field(default_factory=list)
    faults: dict[str, Exception] = field(default_factory=dict)
    hangs: str = ""
    amid: dict[str, Callable[[], None]] = field(default_factory=dict)
    slow: asyncio.Event | None = None
    found: dict[str, WorkerProblem] = field(default_factory=dict)

    async def count(self) -> WorkerCount:
        if self.slow is not None:
            await self.slow.wait()
        await self._begin("count")
        return self._count()

    async def check(self, seen: WorkerCount, workers: int) -> None:
        self.calls.append(f"check {workers}")
        await self._begin("check")

    async def resize(self, seen: WorkerCount, workers: int) -> None:
        assert seen == self._count()
        self.calls.append(f"resize {workers}")
        await self._begin("resize")
        self.asked, self.version = workers, self.version + 1

    async def problems(self, missing: Collection[str]) -> dict[str, WorkerProblem]:
        await self._begin("problems")
        return {name: self.found[name] for name in missing if name in self.found}

    async def close(self) -> None:
        self.calls.append("close")
        await self._begin("close")

    def _count(self) -> WorkerCount:
        """Return the workers of `fleet`, of which the last one leaves first."""
        names = ("p0", *(f"d{number}" for number in range(self.asked)))
        others = [each for each in names if each != self.last]
        names = (*others[: self.asked - 1], self.last)
        return WorkerCount(str(self.version), names, self.least)

    async def _begin(self, name: str) -> None:
        self.amid.get(name, lambda: None)()
        if name == self.hangs:
            await asyncio.Event().wait()
        if name in self.faults:
            raise self.faults[name]


class SizedScene(RoleLoopScene):
    """The same fleet of five workers, whose number may change."""

    def __init__(self, *, leadership: ScriptedLeadership | None = None, acts: bool = True) -> None:
        self.pool = ScriptedPool()
        self.refusal_of_drain: BatonError | None = None
        self.amid_drain: Callable[[], None] = lambda: None
        super().__init__(acts=acts, leadership=leadership or ScriptedLeadership())

    def size_loop(self) -> SizeLoop:
        self.sizes = SizeLoop(
            self.pool,
            SizeController(BOUNDS),
            self.drain,
            lambda: self.reader.scripted.now_s,
            START_S,
        )
        return self.sizes

    async def drain(self, boot_id: str) -> None:
        self.pool.calls.append(f"drain {boot_id}")
        self.amid_drain()
        if self.pool.hangs == "drain":
            await asyncio.Event().wait()
        if self.refusal_of_drain is not None:
            raise self.refusal_of_drain
        self.reader.scripted.states[boot_id.partition(".")[0]] = "draining"
        self.pool.version += 1  # as with each pod that is ready no more

    async def calm(self, seconds: int = 60) -> None:
        """Let a load pass that three workers would serve."""
        self.reader.scripted.rate = 1.0
        await self.pass_by(seconds)

    async def flood(self, seconds: int = 60) -> None:
        """Let a load pass that no ratio of the workers serves; no role changes."""
        self.refusal = Unavailable("the worker of a test keeps its role")
        await self.calm(15)
        self.reader.scripted.rate = 90.0
        await self.pass_by(seconds)
