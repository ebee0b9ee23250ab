"""A timing model of round numbers, and a file of one, for commands that plan."""

from __future__ import annotations

from pathlib import Path

from baton.planner.timing_file import write_fit
from baton.planner.timing_fit import Fit, FitError
from baton.planner.timing_model import (
    AttentionTiming,
    ChunkTiming,
    StepTiming,
    TimingModel,
    TransferTiming,
)

BY_HAND = TimingModel(
    "by hand",
    kv_bytes_per_token=1e5,
    chunk=ChunkTiming(0.004, 5e-5),
    step=StepTiming(0.008, 1e-4),
    attention=AttentionTiming(0.0, 2e-8),
    transfer=TransferTiming(0.0005, 2e-11),
)


def write_timing(folder: Path) -> Path:
    """Write a model whose steps are wrong by a tenth, and return its file."""
    steps = ChunkTiming(0.004, 5e-5), StepTiming(0.008, 1e-4), AttentionTiming(1e-9, 2e-8)
    errors = {"chunk": FitError(9, 0.05, 0.2), "step": FitError(9, 0.10, 0.2)}
    file = folder / "timing.json"
    write_fit(Fit(TimingModel("test", 1e5, *steps), errors), file)
    return file
