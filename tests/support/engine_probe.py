"""The runner behind a real engine, for tests that let its steps fail, wait or die with a rank.

An `Engine` answers for its steps and hides what runs them. Only this module reads the runner of a
`TorchEngine`, and replaces how a runner computes.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.execution.runner import ModelRunner
from baton.engine.execution.torch_engine import TorchEngine
from baton.engine.scheduling.batch import StepBatch, StepResult

Compute = Callable[[StepBatch], StepResult]


def runner_of(engine: object) -> ModelRunner:
    """Return the runner of `engine`, which must be a `TorchEngine` on a CPU."""
    assert isinstance(engine, TorchEngine)
    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    return runner


def replace_compute(runner: ModelRunner, make: Callable[[Compute], Compute]) -> None:
    """Let the runner compute each step, and each part of one that memory is too short for, by
    `make(compute)`, where `compute` is its own way."""
    # a stand-in takes the place of a method, and the name of its parameter is its own
    runner._compute = make(runner._compute)  # type: ignore[method-assign, assignment]
