"""A worker as its step health sees it: pool, step clock, work and mover, all set by the test."""

from __future__ import annotations

from baton.engine.scheduling.batch import Slice, StepBatch, StepResult
from baton.engine.scheduling.blocks import BlockPool
from baton.engine.scheduling.step_health import StepHealth
from baton.runtime.errors import EngineError

STEP = StepBatch((Slice([1], 0, (0,)),))
FINE = StepResult(((),))


class StepHealthScene:
    def __init__(self, pool: BlockPool | None = None) -> None:
        self.pool = pool or BlockPool(4, 16)
        self.due: float | None = None
        self.work = False
        self.mover_failure: str | None = None
        self.woken = 0
        self.health = StepHealth(
            self.pool,
            steps=self,
            has_work=lambda: self.work,
            mover_failure=lambda: self.mover_failure,
            wake=self.wake,
        )

    def due_s(self) -> float | None:
        return self.due

    def record_stall(self, seconds: float) -> None:
        if self.due is not None:
            self.due += seconds

    def wake(self) -> None:
        self.woken += 1

    def fail(self, times: int) -> None:
        for _ in range(times):
            self.health.record_step(STEP, EngineError("no device"))
