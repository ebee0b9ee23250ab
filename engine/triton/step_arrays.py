"""A step's layout as the GPU's kernels want it: its arrays on the device, tables side by side.

What lies on the device already stays where it is, which a captured CUDA graph relies on; the
rest is copied without waiting. Knows no kernel; whoever asks owns the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.engine.model.step_layout import ChunkRows, StepLayout


@dataclass(frozen=True, slots=True)
class StepArrays:
    layout: StepLayout  # what they were made from
    blocks: Tensor  # int64 [rows]: the block that takes the row's KV; negative: padding
    slots: Tensor  # int64 [rows]
    tables: Tensor  # int32 [decode rows, longest table]
    lengths: Tensor  # int32 [decode rows]; 0: padding
    chunk_tables: Tensor  # int32 [chunks, longest table]


def step_arrays(layout: StepLayout, device: torch.device) -> StepArrays:
    given = (layout.write_blocks, layout.write_slots, layout.decode_tables, layout.decode_lengths)
    moved = [x.to(device, non_blocking=True) for x in (*given, chunk_tables(layout.chunks))]
    return StepArrays(layout, *moved)


def chunk_tables(chunks: Sequence[ChunkRows]) -> Tensor:
    """int32 [chunks, longest table]; what pads a table is never read."""
    tables = [chunk.blocks.numpy() for chunk in chunks]
    padded = np.zeros((len(tables), max(map(len, tables), default=0)), dtype=np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return torch.from_numpy(padded)
