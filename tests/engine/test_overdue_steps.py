"""Overdue steps: those that the device does not end, and those that the loop does not plan."""

from __future__ import annotations

import asyncio
import math

import pytest

from baton.engine.scheduling.step_health import OVERDUE_S
from tests.support.step_health_scene import StepHealthScene
from tests.support.virtual_time import on_virtual_time


def past_due_s(scene: StepHealthScene) -> float:
    """Below 0 while a step is not due yet, which `overdue_s` does not show."""
    return OVERDUE_S - scene.health.red_in_s()


def now_s() -> float:
    return asyncio.get_running_loop().time()


@on_virtual_time
async def test_a_step_is_overdue_from_its_due_time_on() -> None:
    scene = StepHealthScene()
    scene.work, scene.due = True, now_s() + 1.0
    assert past_due_s(scene) == pytest.approx(-1.0)
    await asyncio.sleep(3.5)
    assert past_due_s(scene) == pytest.approx(2.5)
    scene.due = now_s() + 1.0  # the next one runs
    assert past_due_s(scene) == pytest.approx(-1.0)
    scene.work = False  # its requests were cancelled
    await asyncio.sleep(3.0)
    assert past_due_s(scene) == pytest.approx(2.0)


@on_virtual_time
async def test_unplanned_work_counts_from_the_first_look() -> None:
    scene = StepHealthScene()
    scene.work = True
    assert past_due_s(scene) == 0.0
    await asyncio.sleep(2.5)
    assert past_due_s(scene) == pytest.approx(2.5)
    scene.due = now_s() + 1.0
    assert past_due_s(scene) == pytest.approx(-1.0)
    await asyncio.sleep(2.0)
    scene.due = None
    assert past_due_s(scene) == 0.0  # from the beginning, after a step


@on_virtual_time
async def test_an_idle_worker_is_never_overdue() -> None:
    scene = StepHealthScene()
    scene.work = True
    assert past_due_s(scene) == 0.0
    scene.work = False
    await asyncio.sleep(500.0)
    assert past_due_s(scene) == -math.inf
    scene.work = True
    await asyncio.sleep(1.0)
    assert past_due_s(scene) == 0.0
