"""Two steps on an engine: one runs, and the next one is planned and submitted while it does.

    step k      ├───────── runs ─────────┤
    step k+1          plan, submit ─▶ ...├───────── runs ─────────┤
    step k                               │ commit
                            LEAD_S ├─────┤

Who has to wait for a step joins the next one that is planned, so that is done as late as is
safe: LEAD_S before the running step should end. One that ends before costs the old gap, no more.
Knows no scheduler and no request; a worker's loop owns it and all its plans.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from baton.engine.batch import Engine, StepBatch, StepHandle, StepResult, forsake
from baton.runtime.errors import EngineError

# For a plan of a large batch (1.5 ms), what the loop is at, and a timer's millisecond.
LEAD_S = 0.005
PATIENCE = 4.0  # times as long as the last two of its kind a step may take, and is not overdue
UNKNOWN_S = 30.0  # nor before this, while fewer than two of its kind have ended


class Planned(Protocol):
    """What a scheduler plans."""

    batch: StepBatch


Plan = TypeVar("Plan", bound=Planned)


@dataclass(frozen=True, slots=True)
class Over(Generic[Plan]):
    """A step that is over; times are of the loop's clock."""

    plan: Plan
    outcome: StepResult | EngineError
    started_s: float  # when it was submitted, or the step before it ended
    ended_s: float


@dataclass(frozen=True, slots=True)
class _Step(Generic[Plan]):
    plan: Plan
    handle: StepHandle
    submitted_s: float

    @property
    def has_chunks(self) -> bool:
        return any(len(piece.tokens) > 1 for piece in self.plan.batch.slices)

    @property
    def size(self) -> int:
        """What its time grows with: tokens, where it has chunks; else with nothing much, since
        reading the weights takes the most of it."""
        pieces = self.plan.batch.slices
        return sum(len(piece.tokens) for piece in pieces) if self.has_chunks else 1


class StepPipeline(Generic[Plan]):
    """At most two steps, which end in the order of their submission."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps: deque[_Step[Plan]] = deque()
        self._result: asyncio.Task[StepResult] | None = None  # of the oldest
        self._asked = False  # for the step after the oldest
        self._last_end_s = 0.0
        # for their size, the last two steps without chunks and the last two with some
        self._last_took_s = {False: (0.0, 0.0), True: (0.0, 0.0)}

    def __len__(self) -> int:
        return len(self._steps)

    def submit(self, plan: Plan) -> None:
        """Raises EngineError if the engine does not take it."""
        handle = self._engine.submit(plan.batch)
        self._steps.append(_Step(plan, handle, asyncio.get_running_loop().time()))

    async def next(self) -> Over[Plan] | None:
        """The oldest step, once it is over. None if a step should be planned now: nothing runs,
        or what runs is about to end; then, whatever came of planning, the oldest step.

        Raises DeviceLost as `StepHandle.result` does.
        """
        if not self._steps:
            return None
        if self._result is None:
            self._result = asyncio.ensure_future(self._steps[0].handle.result())
        if not self._asked:
            self._asked = True
            if not await self._over_within(self._plan_at() - asyncio.get_running_loop().time()):
                return None
        await asyncio.wait({self._result})
        return self._take(self._result)

    def due_s(self) -> float | None:
        """When the oldest step should long have been over, on the loop's clock."""
        if not self._steps:
            return None
        step = self._steps[0]
        last_s = self._last_took_s[step.has_chunks]
        allowed_s = PATIENCE * max(last_s) * step.size if all(last_s) else UNKNOWN_S
        return self._started_s() + allowed_s

    def close(self) -> None:
        """Nobody waits for the steps under way any more, nor hears of their errors."""
        if self._result is not None:
            self._result.cancel()
            forsake(self._result)
        for step in self._steps:
            step.handle.forsake()

    async def _over_within(self, seconds: float) -> bool:
        assert self._result is not None
        if seconds > 0:
            await asyncio.wait({self._result}, timeout=seconds)
        return self._result.done()

    def _plan_at(self) -> float:
        """Steps of one kind are alike, but for the length of chunks: planned too early, somebody
        waits longer; too late, the device does."""
        step = self._steps[0]
        expected_s = min(self._last_took_s[step.has_chunks]) * step.size
        return self._started_s() + expected_s - LEAD_S

    def _started_s(self) -> float:
        return max(self._steps[0].submitted_s, self._last_end_s)

    def _take(self, result: asyncio.Task[StepResult]) -> Over[Plan]:
        started, now = self._started_s(), asyncio.get_running_loop().time()
        step = self._steps.popleft()
        self._result, self._asked = None, False
        _, before_s = self._last_took_s[step.has_chunks]
        self._last_took_s[step.has_chunks] = before_s, (now - started) / step.size
        self._last_end_s = now
        outcome: StepResult | EngineError
        try:
            outcome = result.result()
        except EngineError as error:
            outcome = error
        return Over(step.plan, outcome, started, now)
