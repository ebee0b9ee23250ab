"""What a worker's steps say of it: red at once, failing when it is no accident, well under load,
and no less so for what its process stood still."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.engine.scheduling.batch import StepResult
from baton.engine.scheduling.blocks import BlockPool, Hold
from baton.engine.scheduling.step_health import (
    LATE_S,
    OVERDUE_S,
    PERSISTENT_FAILURES,
    PROBE_S,
    StepHealth,
)
from baton.runtime.config import RouterConfig
from tests.support.step_health_scene import FINE, STEP, StepHealthScene
from tests.support.step_pipeline_scene import PipelineScene
from tests.support.virtual_time import on_virtual_time, stand_still

HANG_S = RouterConfig().hang_s


def now_s() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def watched(worker: StepHealthScene) -> AsyncIterator[StepHealthScene]:
    watching = asyncio.create_task(worker.health.watch())
    try:
        # The first probe has to be requested, on virtual time.
        await asyncio.sleep(0.01)
        yield worker
    finally:
        watching.cancel()
        await asyncio.wait({watching})


async def test_a_probe_wakes_the_loop_which_makes_a_step_of_it() -> None:
    worker = StepHealthScene()
    assert not worker.health.probe_batch().slices
    worker.health.request_probe()
    batch = worker.health.probe_batch()
    assert worker.woken == 1 and batch.slices
    assert worker.health.record_step(batch, FINE) and not worker.health.record_step(STEP, FINE)
    assert worker.pool.counts().used == 0


async def test_one_failed_step_is_red_and_several_are_failing() -> None:
    worker = StepHealthScene()
    assert worker.health.not_ready_reason() is None is worker.health.persistent_failure()
    worker.fail(1)
    assert (
        "no device" in (worker.health.not_ready_reason() or "")
        and worker.health.persistent_failure() is None
    )
    worker.fail(PERSISTENT_FAILURES - 1)
    assert "no device" in (worker.health.persistent_failure() or "")
    worker.health.record_step(STEP, FINE)
    assert worker.health.not_ready_reason() is None is worker.health.persistent_failure()


async def test_a_mover_that_has_died_does_not_come_back() -> None:
    worker = StepHealthScene()
    worker.mover_failure = "a thread has died"
    assert (
        worker.health.not_ready_reason()
        == worker.health.persistent_failure()
        == "a thread has died"
    )


async def test_an_overdue_step_is_red_and_ends_no_request() -> None:
    """It may be compiling; a device that gives no result at all is DeviceLost."""
    worker = StepHealthScene()
    now = asyncio.get_running_loop().time()
    assert worker.health.overdue_s() == 0.0 and worker.health.red_in_s() == math.inf
    worker.due = now + 60
    assert worker.health.overdue_s() == 0.0 and worker.health.not_ready_reason() is None
    assert 60 < worker.health.red_in_s() <= 60 + OVERDUE_S
    worker.due = now - OVERDUE_S - 1
    assert worker.health.overdue_s() >= OVERDUE_S + 1
    assert (
        "overdue" in (worker.health.not_ready_reason() or "")
        and worker.health.persistent_failure() is None
    )
    assert worker.health.red_in_s() <= -1
    worker.due, worker.work = None, True
    assert worker.health.overdue_s() == 0.0 and worker.health.not_ready_reason() is None
    assert worker.health.red_in_s() <= OVERDUE_S


@on_virtual_time
async def test_it_is_red_at_the_moment_that_was_foretold() -> None:
    worker = StepHealthScene()
    worker.due = now_s() + 0.3
    while (left_s := worker.health.red_in_s()) > 0:
        assert worker.health.not_ready_reason() is None
        await asyncio.sleep(left_s)
    assert worker.health.not_ready_reason()
    assert now_s() == pytest.approx(worker.due + OVERDUE_S, abs=0.001)


async def test_load_is_neither() -> None:
    worker = StepHealthScene()
    worker.pool.allocate(2, Hold.USED)
    worker.pool.allocate(2, Hold.PINNED)
    worker.health.request_probe()
    assert not worker.health.probe_batch().slices  # no block is left for one
    assert worker.health.not_ready_reason() is None is worker.health.persistent_failure()


async def test_a_pool_in_quarantine_is_red_and_has_its_own_watch() -> None:
    worker = StepHealthScene()
    worker.pool.allocate(4, Hold.QUARANTINED)
    assert (
        "quarantine" in (worker.health.not_ready_reason() or "")
        and worker.health.persistent_failure() is None
    )


@pytest.mark.parametrize("due_in_s", [-0.3, 0.3])
@on_virtual_time
async def test_a_stall_of_its_process_is_no_hang_of_its_device(due_in_s: float) -> None:
    """The step was overdue before it, or became so in between. The first caller after it, before
    the watch has had its turn, hears no more than the last one."""
    async with watched(StepHealthScene()) as worker:
        worker.due = now_s() + due_in_s
        stand_still(60)
        for _ in range(2):
            assert worker.health.not_ready_reason() is None
            assert worker.health.red_in_s() == pytest.approx(OVERDUE_S + due_in_s, abs=PROBE_S)
            await asyncio.sleep(0)
        await asyncio.sleep(OVERDUE_S + due_in_s)  # a hang counts from then on
        assert worker.health.not_ready_reason()


@on_virtual_time
async def test_nor_is_it_one_of_planning() -> None:
    async with watched(StepHealthScene()) as worker:
        worker.work = True
        assert worker.health.overdue_s() == 0.0
        stand_still(60)
        for _ in range(2):
            assert worker.health.not_ready_reason() is None and worker.health.overdue_s() <= PROBE_S
            await asyncio.sleep(0)
        await asyncio.sleep(OVERDUE_S)
        assert worker.health.not_ready_reason()


@on_virtual_time
async def test_a_watch_late_by_a_busy_machine_hides_nothing() -> None:
    async with watched(StepHealthScene()) as worker:
        worker.due = now_s()
        stand_still(LATE_S)
        assert worker.health.overdue_s() == pytest.approx(LATE_S)
        await asyncio.sleep(0.01)
        assert worker.health.overdue_s() == pytest.approx(LATE_S + 0.01, abs=0.001)


@on_virtual_time
async def test_a_watch_that_has_ended_hides_nothing() -> None:
    async with watched(StepHealthScene()) as worker:
        worker.due = now_s()
    await asyncio.sleep(60)
    assert worker.health.overdue_s() == pytest.approx(60, abs=0.001)


@on_virtual_time
async def test_a_red_worker_is_probed_every_half_second() -> None:
    """From the moment that it shows; a well one is left alone for longer."""
    async with watched(StepHealthScene()) as worker:
        for _ in range(2):
            worker.health.record_step(worker.health.probe_batch(), StepResult(((),), device_s=1.0))
            worker.health.request_probe()
        woken = worker.woken
        await asyncio.sleep(4)
        assert worker.woken == woken
        worker.fail(1)
        await asyncio.sleep(4)
        assert worker.woken - woken in (7, 8)


@pytest.mark.parametrize("step_s", [0.0, 0.02, 0.1, 0.25, 0.3, 0.36, 0.5, 0.67, 1.0, 3.0])
@on_virtual_time
async def test_an_endless_step_is_red_in_time_and_a_long_one_is_not(
    step_s: float,
) -> None:
    """Of a healthy worker a step may take 2.8 times as long as the last, and 0.8 s at least: that
    is a loaded machine's chance, and no more than a detour. It may take four times as long, and
    1.5 s, before routers leave it."""
    scene = PipelineScene()
    health = StepHealth(
        BlockPool(4, 16),
        steps=scene.steps,
        has_work=lambda: True,
        mover_failure=lambda: None,
        wake=lambda: None,
    )
    await scene.run([scene.chunk(8)] * 2, step_s)
    began_s = now_s()
    scene.steps.submit(scene.chunk(8))
    await asyncio.sleep(health.red_in_s())
    red_s = now_s() - began_s
    assert health.not_ready_reason() and red_s > max(OVERDUE_S, 2.8 * step_s) - 0.001
    assert red_s < 2.0 or step_s > 0.67
    await asyncio.sleep(HANG_S - health.overdue_s())
    left_s = now_s() - began_s
    assert left_s > max(HANG_S, 4 * step_s) - 0.001
    assert left_s < 3.0 or step_s > 0.67
    scene.steps.close()
