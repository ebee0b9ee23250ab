"""The arrays of a step's layout on a device, for the GPU's kernels.

Arrays that are on the device already are not copied, which captured CUDA graphs rely on; the
others are copied asynchronously. The module knows no kernel; the caller owns the result.
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
    layout: StepLayout  # the source of the arrays
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
    """Return the chunks' tables, int32 [chunks, longest table]; padding is never read."""
    tables = [chunk.blocks.numpy() for chunk in chunks]
    padded = np.zeros((len(tables), max(map(len, tables), default=0)), dtype=np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return torch.from_numpy(padded)
