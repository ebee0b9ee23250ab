"""The pipeline of two steps on an engine: the next one is planned while one runs.

    step k      ├───────── runs ─────────┤
    step k+1          plan, submit ─▶ ...├───────── runs ─────────┤
    step k                               │ commit
                            LEAD_S ├─────┤

A request that arrives joins the next planned step, so planning happens as late as is safe:
LEAD_S before the expected end of the running step. If that ends earlier, the device idles while
the next one is planned. Knows no scheduler and no request; the worker's loop owns it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from baton.engine.scheduling.batch import Slice, StepBatch, StepHandle, StepResult, abandon
from baton.engine.scheduling.draw_costs import DrawCosts
from baton.engine.scheduling.engine import Engine
from baton.runtime import waits
from baton.runtime.errors import EngineError

# Covers planning a large batch (1.5 ms), a busy event loop, and a timer's millisecond.
LEAD_S = 0.005
LONG_STEP_S = 0.04  # planning, of 1.5 ms at most, is 4 % of it
KEPT_STEPS = 64  # step times remembered, with and without chunks
OVERDUE_FACTOR = 4.0  # times a similar step's duration that a step may take
# A router waits ROUTER_WAIT_S for an overdue step (`router.hang_s`). A limit above SHORT_LIMIT_S is
# reduced by that wait, but not below SHORT_LIMIT_S.
SHORT_LIMIT_S = 1.0
ROUTER_WAIT_S = 1.5
UNMEASURED_LIMIT_S = 30.0  # before two similar steps have ended, or while one compiles


class Planned(Protocol):
    """The plan of a step, made by a scheduler."""

    batch: StepBatch


Plan = TypeVar("Plan", bound=Planned)


@dataclass(frozen=True, slots=True)
class CompletedStep(Generic[Plan]):
    """A step that has ended; times are on the loop's clock."""

    plan: Plan
    outcome: StepResult | EngineError
    started_s: float  # when it was submitted, or the step before it ended
    ended_s: float


@dataclass(frozen=True, slots=True)
class _StepSize:
    """The quantities that a step's duration depends on: tokens, and pairs of a token and one that
    it attends to, where the step has chunks; else its rows, each of one token, known or proposed,
    since contexts differ too much in length to compare decode steps by pairs. `draws_s` is a
    measured cost."""

    has_chunks: bool
    tokens: int
    pairs: int
    draws_s: float


def _step_size(batch: StepBatch, costs: DrawCosts) -> _StepSize:
    draws_s, slices = costs.batch_s(batch), batch.slices
    counts = [len(item.tokens) + (item.draft.tokens if item.draft else 0) for item in slices]
    tokens = sum(counts)
    if tokens == len(slices) or all(map(_is_decode, slices)):
        return _StepSize(False, tokens, tokens, draws_s)
    pairs = [count * (item.start + count) for count, item in zip(counts, slices, strict=True)]
    return _StepSize(True, tokens, sum(pairs), draws_s)


def _is_decode(piece: Slice) -> bool:
    """Return whether the slice is not a chunk: one known token and the proposals after it."""
    return len(piece.tokens) == piece.proposed + 1


@dataclass(frozen=True, slots=True)
class _SubmittedStep(Generic[Plan]):
    plan: Plan
    handle: StepHandle
    size: _StepSize
    submitted_s: float
    compiled_s: float  # compile time of the engine until submission


@dataclass(frozen=True, slots=True)
class _StepTime:
    """The duration of a step, and whether it exceeded its limit and counts as a hang."""

    seconds: float
    size: _StepSize
    hung: bool

    def growth(self, size: _StepSize) -> float:
        """Return an upper bound on the ratio of another step's duration to this one's. Duration is
        a sum of terms in tokens, in pairs, and constant: it grows no more than its fastest term."""
        return max(1, size.tokens / self.size.tokens, size.pairs / self.size.pairs)

    def scaled_s(self, size: _StepSize) -> float:
        """Return the bound in seconds; the cost of draws beyond that growth is added."""
        growth = self.growth(size)
        return self.seconds * growth + max(0.0, size.draws_s - growth * self.size.draws_s)

    @property
    def tokens_per_s(self) -> float:
        """Return the throughput without draws."""
        return self.size.tokens / max(self.seconds - self.size.draws_s, 1e-6)


def expected_step_s(last: Sequence[tuple[float, int]], tokens: int, *, has_chunks: bool) -> float:
    """Return the time that a step of so many tokens should take by the last two of its kind, each
    (seconds, tokens): the longer one if both are long, else the shorter; 0 if there are fewer. A
    plan that comes too late costs a long step little, and one too early costs each sequence that
    arrives after it such a step."""
    if len(last) < 2:
        return 0.0
    times = [seconds * (tokens / before if has_chunks else 1) for seconds, before in last]
    return max(times) if min(times) >= LONG_STEP_S else min(times)


class StepPipeline(Generic[Plan]):
    """Runs at most two steps, which end in the order of their submission."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps: deque[_SubmittedStep[Plan]] = deque()
        self._result: asyncio.Future[StepResult] | None = None  # of the oldest
        self._asked = False  # whether the step after the oldest was requested
        self._last_end_s = 0.0
        # an engine that may compile during a step reports the seconds so far
        self._compiled_s = engine.compiled_s
        self._compiled_before_s = 0.0  # at the end of the last step
        self._costs = engine.draw_costs
        self._stalled_s = 0.0  # time this process stood still during the oldest step
        # the last steps without chunks, and with
        self._last: dict[bool, deque[_StepTime]] = {
            has_chunks: deque(maxlen=KEPT_STEPS) for has_chunks in (False, True)
        }

    def __len__(self) -> int:
        return len(self._steps)

    def submit(self, plan: Plan) -> None:
        """Submit a planned step. Raises EngineError if the engine rejects it."""
        handle = self._engine.submit(plan.batch)
        now_s = asyncio.get_running_loop().time()
        step = _SubmittedStep(
            plan, handle, _step_size(plan.batch, self._costs), now_s, self._compiled_s()
        )
        self._steps.append(step)

    async def next(self) -> CompletedStep[Plan] | None:
        """Return the oldest step once it has ended, or None if a step should be planned now because
        nothing runs or the running step is about to end. The call after None returns the oldest
        step, whether or not one was planned.

        Raises DeviceLost as `StepHandle.result` does.
        """
        if not self._steps:
            return None
        if self._result is None:
            self._result = asyncio.ensure_future(self._steps[0].handle.result())
        if not self._asked:
            self._asked = True
            left_s = self._plan_at() - asyncio.get_running_loop().time()
            if not await waits.done_within(self._result, left_s):
                return None
        outcome: StepResult | EngineError
        try:
            outcome = await self._result  # a cancelled caller calls `close` next
        except EngineError as error:
            outcome = error
        return self._take(outcome)

    def due_s(self) -> float | None:
        """Return when the oldest step becomes overdue, on the loop's clock. Its compile time, up to
        UNMEASURED_LIMIT_S, and the time that this process stood still do not count."""
        if not self._steps:
            return None
        allowed_s = self._allowed_s(self._steps[0].size)
        compiling_s = min(self._compiling_s(), UNMEASURED_LIMIT_S)
        return self._started_s() + allowed_s + compiling_s + self._stalled_s

    def record_stall(self, seconds: float) -> None:
        """Record that this process, and possibly its device, stood still for `seconds` until now
        (SIGSTOP, no core)."""
        self._stalled_s += min(seconds, self.running_s() or 0.0)

    def tokens_per_s(self) -> float:
        """Return the highest throughput of the last steps with chunks, draws excluded; 0: none."""
        known = [before.tokens_per_s for before in self._last[True] if not before.hung]
        return max(known, default=0.0)

    def running(self) -> Plan | None:
        """Return the plan of the oldest step; None if no step runs."""
        return self._steps[0].plan if self._steps else None

    def running_s(self) -> float | None:
        """Return how long the oldest step has run; None if no step runs."""
        if not self._steps:
            return None
        return asyncio.get_running_loop().time() - self._started_s()

    def close(self) -> None:
        """Abandon the running steps and their errors."""
        if self._result is not None:
            self._result.cancel()
            abandon(self._result)
        for step in self._steps:
            step.handle.abandon()

    def _allowed_s(self, size: _StepSize) -> float:
        """Return the time limit of a step, from the two most similar steps, without hangs, since
        a small step says little about a large one; and from the last two, since the machine may
        have become slow."""
        last = self._last[size.has_chunks]
        measured = [before for before in reversed(last) if not before.hung]
        if len(measured) < 2:
            return UNMEASURED_LIMIT_S
        similar = sorted(measured, key=lambda before: before.growth(size))[:2]
        longest_s = max(before.scaled_s(size) for before in similar)
        limit_s = OVERDUE_FACTOR * max(longest_s, last[-1].seconds, last[-2].seconds)
        return max(min(limit_s, SHORT_LIMIT_S), limit_s - ROUTER_WAIT_S)

    def _plan_at(self) -> float:
        """Return when to plan the next step. Duration varies with the length of chunks and little
        with rows, since reading the weights dominates. Too early a plan delays requests that arrive
        after it; too late a plan leaves the device idle."""
        size = self._steps[0].size
        known = self._last[size.has_chunks]
        last = [
            (known[n].seconds, known[n].size.tokens)
            for n in range(max(0, len(known) - 2), len(known))
        ]
        expected_s = expected_step_s(last, size.tokens, has_chunks=size.has_chunks)
        return self._started_s() + expected_s - LEAD_S

    def _started_s(self) -> float:
        return max(self._steps[0].submitted_s, self._last_end_s)

    def _compiling_s(self) -> float:
        """Return the compile time within the oldest step."""
        before_s = max(self._steps[0].compiled_s, self._compiled_before_s)
        return self._compiled_s() - before_s

    def _take(self, outcome: StepResult | EngineError) -> CompletedStep[Plan]:
        started, now = self._started_s(), asyncio.get_running_loop().time()
        took_s = max(0.0, now - started - self._compiling_s() - self._stalled_s)
        step = self._steps.popleft()
        self._result, self._asked, self._stalled_s = None, False, 0.0
        # A failure may take milliseconds, which says nothing about the steps to come.
        if isinstance(outcome, StepResult) and not outcome.failed:
            hung = took_s > ROUTER_WAIT_S and took_s > ROUTER_WAIT_S + self._allowed_s(step.size)
            self._last[step.size.has_chunks].append(_StepTime(took_s, step.size, hung))
        self._last_end_s = now
        self._compiled_before_s = self._compiled_s()
        return CompletedStep(step.plan, outcome, started, now)
