"""The times of Llama 3.1 70B in FP8 on four H200, from the tables that docs/planning.md names."""

from __future__ import annotations

from baton.planner.timing_model import (
    AttentionTiming,
    ChunkTiming,
    StepTiming,
    TimingModel,
    TransferTiming,
)

TIMING = TimingModel(
    "Llama 3.1 70B FP8, four H200",
    163_840.0,
    ChunkTiming(0.0360, 5.28e-5),
    StepTiming(0.0094, 1.64e-5),
    AttentionTiming(0.0, 4.24e-8),
    TransferTiming(0.002, 1 / 40e9),
)
