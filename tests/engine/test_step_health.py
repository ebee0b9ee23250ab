"""What a worker's steps say of it: red at once, failing when it is no accident, well under load."""

from __future__ import annotations

import asyncio

from baton.engine.batch import Slice, StepBatch, StepResult
from baton.engine.blocks import BlockPool, Hold
from baton.engine.probe import FAILURES
from baton.engine.step_health import OVERDUE_S, StepHealth
from baton.runtime.errors import EngineError

STEP = StepBatch((Slice([1], 0, (0,)),))
FINE = StepResult(((),))


class Worker:
    """What a worker's loop gives its health to look at."""

    def __init__(self) -> None:
        self.pool = BlockPool(4, 16)
        self.due: float | None = None
        self.work = False
        self.mover = ""
        self.woken = 0
        self.health = StepHealth(
            self.pool,
            due_s=lambda: self.due,
            has_work=lambda: self.work,
            moves=lambda: self.mover,
            wake=self.wake,
        )

    def wake(self) -> None:
        self.woken += 1

    def fail(self, times: int) -> None:
        for _ in range(times):
            self.health.heard(STEP, EngineError("no device"))


async def test_a_probe_wakes_the_loop_which_makes_a_step_of_it() -> None:
    worker = Worker()
    assert not worker.health.probe_batch().slices
    worker.health.probe()
    batch = worker.health.probe_batch()
    assert worker.woken == 1 and batch.slices
    assert worker.health.heard(batch, FINE) and not worker.health.heard(STEP, FINE)
    assert worker.pool.counts().used == 0


async def test_one_failed_step_is_red_and_several_are_failing() -> None:
    worker = Worker()
    assert worker.health.trouble() == "" == worker.health.failing()
    worker.fail(1)
    assert "no device" in worker.health.trouble() and worker.health.failing() == ""
    worker.fail(FAILURES - 1)
    assert "no device" in worker.health.failing()
    worker.health.heard(STEP, FINE)
    assert worker.health.trouble() == "" == worker.health.failing()


async def test_a_mover_that_has_died_does_not_come_back() -> None:
    worker = Worker()
    worker.mover = "a thread has died"
    assert worker.health.trouble() == worker.health.failing() == "a thread has died"


async def test_an_overdue_step_is_red_and_ends_nobody() -> None:
    """It may be compiling; a device that gives no result at all is DeviceLost."""
    worker = Worker()
    now = asyncio.get_running_loop().time()
    worker.due = now + 60
    assert worker.health.overdue_s() == 0.0 and worker.health.trouble() == ""
    worker.due = now - OVERDUE_S - 1
    assert worker.health.overdue_s() >= OVERDUE_S + 1
    assert "overdue" in worker.health.trouble() and worker.health.failing() == ""
    worker.due, worker.work = None, True
    assert worker.health.overdue_s() == 0.0 and worker.health.trouble() == ""


async def test_load_is_neither() -> None:
    worker = Worker()
    worker.pool.allocate(2, Hold.USED)
    worker.pool.allocate(2, Hold.PINNED)
    worker.health.probe()
    assert not worker.health.probe_batch().slices  # no block is left for one
    assert worker.health.trouble() == "" == worker.health.failing()


async def test_a_pool_in_quarantine_is_red_and_has_its_own_watch() -> None:
    worker = Worker()
    worker.pool.allocate(4, Hold.QUARANTINED)
    assert "quarantine" in worker.health.trouble() and worker.health.failing() == ""
