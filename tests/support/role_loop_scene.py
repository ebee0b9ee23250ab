"""A role loop with a scripted fleet and leadership, whose orders are recorded."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.planner.change_history import RoleStep
from baton.planner.control.controller_memory import ControllerMemory
from baton.planner.control.leadership import TERM_S
from baton.planner.control.role_loop import RoleLoop
from baton.planner.control.size_loop import SizeLoop
from baton.planner.controller import Decision, RoleController
from baton.planner.controller_load import FleetSample
from baton.runtime.errors import Unavailable
from tests.support.scripted_fleet import GOALS, ScriptedFleet, fleet


@dataclass
class ScriptedReader:
    """Reports of a scripted fleet; `fails` makes the registry unreadable."""

    scripted: ScriptedFleet
    fails: bool = False

    async def read(self, term: int) -> FleetSample:
        sample = self.scripted.tick()
        if self.fails:
            raise Unavailable("the registry of a test cannot be read")
        return sample


@dataclass
class ScriptedLeadership:
    leads: bool = True
    term: int = 1
    asked: int = 0
    closed: bool = False
    lost_after: int | None = None  # questions
    remaining_s: float = TERM_S
    now_s: float = 0.0  # of the store
    left: bytes | None = None  # for the next leader
    broken: bool = False  # the store does not answer

    def lasts_s(self) -> float:
        return self.remaining_s

    async def hold(self) -> bool:
        self.asked += 1
        return self.leads and (self.lost_after is None or self.asked <= self.lost_after)

    async def store(self, text: bytes) -> None:
        self._answer()
        self.left = text

    async def load(self) -> bytes | None:
        self._answer()
        return self.left

    async def time(self) -> float:
        self._answer()
        return self.now_s

    async def close(self) -> None:
        self.closed = True

    def _answer(self) -> None:
        if self.broken:
            raise Unavailable("the store of a test does not answer")


@dataclass
class RoleLoopScene:
    """A fleet whose only prefill worker is overloaded, after some calm seconds. `workers` are
    prefill and decode workers."""

    workers: tuple[int, int] = (1, 4)
    acts: bool = True
    leadership: ScriptedLeadership = field(default_factory=ScriptedLeadership)
    refusal: Exception | None = None
    late_s: float = 0.0  # of the clock
    ordered: list[RoleStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reader = ScriptedReader(fleet(*self.workers, rate=4.0))
        self.start()

    def size_loop(self) -> SizeLoop | None:
        """Return the size loop of the next controller."""
        return None

    def start(self) -> None:
        """Start a controller, in place of one that was killed."""
        self.loop = RoleLoop(
            self.reader,
            RoleController(GOALS),
            ControllerMemory(self.leadership, ("a-token",)),
            self.order,
            lambda: self.reader.scripted.now_s + self.late_s,
            acts=self.acts,
            sizes=self.size_loop(),
        )

    async def order(self, step: RoleStep, term: int) -> None:
        assert term == self.leadership.term > 0
        self.ordered.append(step)
        if self.refusal is not None:
            raise self.refusal
        self.reader.scripted.change(step)

    async def overload(self, seconds: int = 15) -> list[Decision]:
        for _ in range(30):
            await self.loop.tick()
        self.reader.scripted.rate = 30.0
        return await self.pass_by(seconds)

    async def pass_by(self, seconds: int) -> list[Decision]:
        found = []
        for _ in range(seconds):
            self.leadership.now_s += 1.0
            if (decision := await self.loop.tick()) is not None:
                found.append(decision)
        return found
