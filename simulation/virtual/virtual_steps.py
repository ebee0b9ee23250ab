"""Steps of a simulated device on the loop's time: when they end, and how they fail.

    submit ─▶ waits for the steps before ─▶ step_s(batch) passes ─▶ computed, all at once

A `Device` says what a step computes; it knows no time. Steps run one after the other, whether
a caller waits for them or not, and write at their end. Plain callbacks and no tasks: a lab's
processes run a hundred steps a second. Faults are set from outside, and are the next steps'.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.engine.scheduling.batch import (
    Drawn,
    Slice,
    StepBatch,
    StepResult,
    abandon,
    failed_result,
    resolve_feeds,
)
from baton.engine.scheduling.draw_costs import ZERO_COSTS, DrawCosts
from baton.engine.scheduling.verification import with_drafts
from baton.runtime.errors import DeviceLost, EngineError, OutOfMemory


class Device(Protocol):
    def copy_block(self, source: int, target: int) -> None: ...

    def compute(self, slices: Sequence[Slice]) -> list[tuple[Drawn, ...]]:
        """Write the slices' KV, and draw what they ask for, in their order."""
        ...

    def propose(self, slices: Sequence[Slice]) -> dict[int, tuple[int, ...]]:
        """Compute what slices ask of a draft model; its proposals, by the slice's index."""
        ...

    def compute_partly(self, slices: Sequence[Slice]) -> None:
        """Write a part of the slices' KV, as ranks do while one of them is missing."""
        ...


class VirtualSteps:
    """Implements `Engine`; a step takes `step_s(batch)` of the loop's time."""

    def __init__(self, device: Device, step_s: Callable[[StepBatch], float]) -> None:
        self.draw_costs: DrawCosts = ZERO_COSTS  # `step_s` has all of a step's time
        self._device = device
        self.step_s = step_s  # may change between two steps
        self.fail_steps = 0  # the next steps that fail, as a device would
        self.break_slices: set[int] = set()  # slices of the next step with numbers not finite
        self.memory_tokens = sys.maxsize  # slices of more do not fit into memory
        self.steps = 0
        self.under_way: list[StepBatch] = []  # submitted and not over
        self._results: deque[asyncio.Future[StepResult]] = deque()  # theirs
        self._last: StepResult | None = None  # of the step before
        self._stalled = False
        self._held_s: float | None = None  # of the step that would be over
        self._patience: tuple[float, DeviceLost] | None = None  # with a device that stands still
        self._lost: DeviceLost | None = None
        self._idle: asyncio.Future[None] | None = None  # a task waits for it

    def compiled_s(self) -> float:
        return 0.0  # nothing is compiled

    def submit(self, batch: StepBatch) -> VirtualStep:
        result: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        if self._lost is not None:
            result.set_exception(self._lost)
            return VirtualStep(result)
        self.under_way.append(batch)
        self._results.append(result)
        if len(self.under_way) == 1:
            self._begin()
        return VirtualStep(result)

    def stall(self, lost_after_s: float = math.inf, error: DeviceLost | None = None) -> None:
        """Let no step end from now on, until `go_on`; a step that waits for `lost_after_s` raises
        `error`, and the device is lost."""
        self._stalled = True
        self._patience = None if error is None else (lost_after_s, error)

    def go_on(self) -> None:
        self._stalled, self._patience = False, None
        held_s, self._held_s = self._held_s, None
        if held_s is not None:
            self._end(held_s)

    def lose(self, error: DeviceLost) -> None:
        """Break off the steps under way with `error`, which all later ones raise too."""
        self._lost = error
        if self.under_way:
            known = [piece for piece in self.under_way[0].slices if piece.feed is None]
            self._device.compute_partly(known)
        self.under_way.clear()
        results, self._results = list(self._results), deque()
        for result in results:
            if not result.done():
                result.set_exception(error)
        self._rest()

    @property
    def stands(self) -> bool:
        """Whether no step ends: now, or ever again."""
        return self._stalled or self._lost is not None

    async def close(self) -> None:
        if self.under_way:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle

    def _begin(self) -> None:
        step_s, loop = self.step_s(self.under_way[0]), asyncio.get_running_loop()
        if step_s > 0:
            loop.call_later(step_s, self._end, step_s)
        else:
            loop.call_soon(self._end, step_s)

    def _end(self, step_s: float) -> None:
        if self._lost is not None:
            return
        if self._stalled:
            self._held_s = step_s
            if self._patience is not None:
                after_s, error = self._patience
                asyncio.get_running_loop().call_later(after_s, self._give_up, error)
            return
        batch, result = self.under_way[0], self._results.popleft()
        try:
            self._last = self._computed(batch, self._last, step_s)
        except EngineError as error:
            self._last = failed_result(batch)
            if not result.done():  # else no task waits any more
                result.set_exception(error)
        else:
            if not result.done():
                result.set_result(self._last)
        del self.under_way[0]
        if self.under_way:
            self._begin()
        else:
            self._rest()

    def _give_up(self, error: DeviceLost) -> None:
        if self._held_s is not None:
            self.lose(error)

    def _rest(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _computed(self, batch: StepBatch, last: StepResult | None, step_s: float) -> StepResult:
        for source, target in batch.copies:
            self._device.copy_block(source, target)
        slices = resolve_feeds(batch, last).slices
        self.steps += 1
        if self.fail_steps:
            self.fail_steps -= 1
            raise EngineError("the simulated device failed")
        proposed: dict[int, tuple[int, ...]] = {}
        if any([piece.draft is not None and piece.draft.tokens for piece in slices]):
            proposed = self._device.propose(slices)
            slices = with_drafts(StepBatch(slices), proposed).slices
        broken, self.break_slices = frozenset(self.break_slices), set()
        if not broken and self.memory_tokens == sys.maxsize:
            drawn_all = tuple(self._device.compute(slices))
            return StepResult(drawn_all, step_s, proposed=proposed)
        failed: dict[int, EngineError] = {
            index: OutOfMemory("the simulated device has no memory for a slice")
            for index, piece in enumerate(slices)
            if len(piece.tokens) - piece.proposed > self.memory_tokens
        }
        fitting = [piece for index, piece in enumerate(slices) if index not in failed]
        drawn = iter(self._device.compute(fitting))
        every = [() if index in failed else next(drawn) for index in range(len(slices))]
        kept = tuple([() if index in broken else draws for index, draws in enumerate(every)])
        return StepResult(kept, step_s, broken - failed.keys(), failed, len(failed), {}, proposed)


class VirtualStep:
    """The handle of one step. Cancelling what `result` returns drops the result and not the
    step."""

    def __init__(self, result: asyncio.Future[StepResult]) -> None:
        self._result = result

    def result(self) -> asyncio.Future[StepResult]:
        return self._result

    def abandon(self) -> None:
        abandon(self._result)
