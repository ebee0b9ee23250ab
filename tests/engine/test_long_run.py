"""A worker that runs for weeks: ten thousand steps leave the process as large as it was.

400 steps by default, so that the test is short; BATON_LONG_RUN_STEPS=10000 runs them all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.runtime import process_memory
from tests.support.small_models import Reference

STORY = Path(__file__).with_name("long_run_story.py")
STEPS = int(os.environ.get("BATON_LONG_RUN_STEPS", "400"))
LIMIT_BYTES = 1 << 20
SECONDS = 100 + STEPS // 10

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not process_memory.HEAP_IS_REPORTED,
        reason="needs glibc 2.33",
    ),
    pytest.mark.timeout(SECONDS + 20),
]


@pytest.fixture
def growth(
    references: Callable[[str], Reference], own_process: Callable[..., str]
) -> Callable[[str], int]:
    """By how many bytes a process grows in STEPS steps of a story."""
    folder = references("llama-biased").folder
    return lambda name: int(own_process(STORY, folder, name, STEPS, within_s=SECONDS))


def test_what_each_step_leaves_behind_is_seen(growth: Callable[[str], int]) -> None:
    assert growth("leak") > LIMIT_BYTES


@pytest.mark.parametrize("name", ["plain", "deterministic"])
def test_steps_leave_nothing_behind(growth: Callable[[str], int], name: str) -> None:
    assert growth(name) < LIMIT_BYTES


def test_steps_of_a_gpus_runner_leave_nothing_on_the_host(growth: Callable[[str], int]) -> None:
    assert growth("gpu") < LIMIT_BYTES
