"""Times of the 0.45 B-parameter model on one core, and a pair of such workers.

For benchmarks on virtual time: 400 tokens of prompt a second, a decode step of 50 ms.
"""

from __future__ import annotations

from baton.planner.timing_model import (
    AttentionTiming,
    ChunkTiming,
    StepTiming,
    TimingModel,
    TransferTiming,
)
from baton.simulation.capacity.layout import Layout

TIMING = TimingModel(
    "0.45 B parameters, one core",
    114_688.0,
    ChunkTiming(0.03, 1 / 400),
    StepTiming(0.045, 4e-3),
    AttentionTiming(1e-7, 1e-6),
    TransferTiming(0.003, 2e-10),
)
LAYOUT = Layout(
    prefill=1,
    decode=1,
    pool_tokens=65_536,
    chunk_tokens=256,
    local_chunk_tokens=128,
    max_sequences=64,
    block_tokens=16,
)
