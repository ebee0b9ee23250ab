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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from baton.engine.scheduling.batch import Engine, StepBatch, StepHandle, StepResult, forsake
from baton.engine.scheduling.draw_costs import FREE, DrawCosts
from baton.runtime import waits
from baton.runtime.errors import EngineError

# For a plan of a large batch (1.5 ms), what the loop is at, and a timer's millisecond.
LEAD_S = 0.005
KNOWN = 64  # of each kind of steps, how long the last ones took
PATIENCE = 4.0  # times as long as its like took a step may take
# Where that is more than WHOLE_S, what routers wait for a step that is overdue (`router.hang_s`)
# is a part of it: then it is overdue sooner, but not before WHOLE_S.
WHOLE_S = 1.0
WAIT_S = 1.5
UNKNOWN_S = 30.0  # nor before this, while fewer than two of its kind have ended, or it compiles


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
class _Size:
    """What a step's time may grow with: tokens, and pairs of a token and one that it looks at,
    where it has chunks; else its rows, each of one token. Caches differ too much in length to
    judge those by their pairs. What its draws cost is known from a measurement."""

    has_chunks: bool
    tokens: int
    pairs: int
    draws_s: float


def _size(batch: StepBatch, costs: DrawCosts) -> _Size:
    draws_s = costs.of_batch(batch)
    counts = [len(piece.tokens) for piece in batch.slices]
    tokens, rows = sum(counts), len(counts)
    if tokens == rows:
        return _Size(False, rows, rows, draws_s)
    pairs = [
        count * (piece.start + count) for count, piece in zip(counts, batch.slices, strict=True)
    ]
    return _Size(True, tokens, sum(pairs), draws_s)


@dataclass(frozen=True, slots=True)
class _Step(Generic[Plan]):
    plan: Plan
    handle: StepHandle
    size: _Size
    submitted_s: float
    compiled_s: float  # by the engine, until then


@dataclass(frozen=True, slots=True)
class _Took:
    """How long a step of some size took; whether that was a hang, by what was known then."""

    seconds: float
    size: _Size
    hung: bool

    def growth(self, size: _Size) -> float:
        """How many times as long a step of another size takes at most, if time is a sum of shares
        that grow with tokens, with pairs, and with neither: such a sum grows no more than its
        fastest part."""
        return max(1, size.tokens / self.size.tokens, size.pairs / self.size.pairs)

    def at_most(self, size: _Size) -> float:
        """Seconds, by that growth; draws that cost more than it covers come on top."""
        growth = self.growth(size)
        return self.seconds * growth + max(0.0, size.draws_s - growth * self.size.draws_s)

    @property
    def tokens_per_s(self) -> float:
        """Without its draws."""
        return self.size.tokens / max(self.seconds - self.size.draws_s, 1e-6)


class StepPipeline(Generic[Plan]):
    """At most two steps, which end in the order of their submission."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps: deque[_Step[Plan]] = deque()
        self._result: asyncio.Future[StepResult] | None = None  # of the oldest
        self._asked = False  # for the step after the oldest
        self._last_end_s = 0.0
        # of an engine that may compile in the middle of a step: seconds so far; they grow then
        self._compiled_s: Callable[[], float] = getattr(engine, "compiled_s", _none)
        self._compiled_before_s = 0.0  # the last end
        self._costs: DrawCosts = getattr(engine, "draw_costs", FREE)
        self._stood_s = 0.0  # still, this process, since the oldest step began
        # the last steps without chunks and the last ones with some
        self._last: dict[bool, deque[_Took]] = {
            has_chunks: deque(maxlen=KNOWN) for has_chunks in (False, True)
        }

    def __len__(self) -> int:
        return len(self._steps)

    def submit(self, plan: Plan) -> None:
        """Raises EngineError if the engine does not take it."""
        handle = self._engine.submit(plan.batch)
        now_s = asyncio.get_running_loop().time()
        step = _Step(plan, handle, _size(plan.batch, self._costs), now_s, self._compiled_s())
        self._steps.append(step)

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
            left_s = self._plan_at() - asyncio.get_running_loop().time()
            if not await waits.over(self._result, left_s):
                return None
        outcome: StepResult | EngineError
        try:
            outcome = await self._result  # cancelled with who waits: then `close` is next
        except EngineError as error:
            outcome = error
        return self._take(outcome)

    def due_s(self) -> float | None:
        """When the oldest step should long have been over, on the loop's clock. What it compiles
        meanwhile, for up to UNKNOWN_S, is no part of it, nor what this process stood still."""
        if not self._steps:
            return None
        allowed_s = self._allowed_s(self._steps[0].size)
        compiling_s = min(self._compiling_s(), UNKNOWN_S)
        return self._started_s() + allowed_s + compiling_s + self._stood_s

    def stood_still(self, seconds: float) -> None:
        """So long, until now, this process did nothing (SIGSTOP, no core); nor did its device,
        for all that anybody knows."""
        self._stood_s += min(seconds, self.running_s() or 0.0)

    def tokens_per_s(self) -> float:
        """The most that the last steps with chunks computed, draws aside; 0: none is known."""
        known = [before.tokens_per_s for before in self._last[True] if not before.hung]
        return max(known, default=0.0)

    def running(self) -> Plan | None:
        """The oldest step; None if none is under way."""
        return self._steps[0].plan if self._steps else None

    def running_s(self) -> float | None:
        """For how long the oldest step has run; None if none is under way."""
        if not self._steps:
            return None
        return asyncio.get_running_loop().time() - self._started_s()

    def close(self) -> None:
        """Nobody waits for the steps under way any more, nor hears of their errors."""
        if self._result is not None:
            self._result.cancel()
            forsake(self._result)
        for step in self._steps:
            step.handle.forsake()

    def _allowed_s(self, size: _Size) -> float:
        """By the two steps that are the most like it: what a small one took says little of a
        large one, and a hang nothing. And by the last two, since the machine may have become
        slow."""
        last = self._last[size.has_chunks]
        sound = [before for before in reversed(last) if not before.hung]
        if len(sound) < 2:
            return UNKNOWN_S
        alike = sorted(sound, key=lambda before: before.growth(size))[:2]
        longest_s = max(before.at_most(size) for before in alike)
        whole_s = PATIENCE * max(longest_s, last[-1].seconds, last[-2].seconds)
        return max(min(whole_s, WHOLE_S), whole_s - WAIT_S)

    def _plan_at(self) -> float:
        """Steps of one kind are alike, but for the length of chunks; rows add little, since
        reading the weights takes the most of the time. Planned too early, somebody waits longer;
        too late, the device does."""
        size = self._steps[0].size
        last, expected_s = self._last[size.has_chunks], 0.0
        if len(last) >= 2:
            expected_s = min(
                before.seconds * (size.tokens / before.size.tokens if size.has_chunks else 1)
                for before in (last[-1], last[-2])
            )
        return self._started_s() + expected_s - LEAD_S

    def _started_s(self) -> float:
        return max(self._steps[0].submitted_s, self._last_end_s)

    def _compiling_s(self) -> float:
        """How much of the oldest step's time went into compiling."""
        before_s = max(self._steps[0].compiled_s, self._compiled_before_s)
        return self._compiled_s() - before_s

    def _take(self, outcome: StepResult | EngineError) -> Over[Plan]:
        started, now = self._started_s(), asyncio.get_running_loop().time()
        took_s = max(0.0, now - started - self._compiling_s() - self._stood_s)
        step = self._steps.popleft()
        self._result, self._asked, self._stood_s = None, False, 0.0
        hung = took_s > WAIT_S and took_s > WAIT_S + self._allowed_s(step.size)
        self._last[step.size.has_chunks].append(_Took(took_s, step.size, hung))
        self._last_end_s = now
        self._compiled_before_s = self._compiled_s()
        return Over(step.plan, outcome, started, now)


def _none() -> float:
    return 0.0
