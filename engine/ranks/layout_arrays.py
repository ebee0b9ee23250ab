"""Converts a step's layout to arrays for the ranks, and back."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from baton.engine.model.step_layout import ChunkRows, StepLayout

_TENSORS = (
    "tokens",
    "positions",
    "write_blocks",
    "write_slots",
    "decode_tables",
    "decode_lengths",
)


def to_arrays(layout: StepLayout) -> list[NDArray[Any]]:
    """Return the layout's tensors, then [chunks, 4] of first row, end, start and number of blocks,
    then the blocks of all chunks, then the spans."""
    heads = [[each.first, each.end, each.start, len(each.blocks)] for each in layout.chunks]
    tables = [each.blocks.numpy() for each in layout.chunks]
    return [
        *(getattr(layout, name).numpy() for name in _TENSORS),
        np.array(heads, dtype=np.int64).reshape(-1, 4),
        np.concatenate(tables) if tables else np.zeros(0, dtype=np.int64),
        np.array(layout.spans, dtype=np.int64).reshape(-1, 2),
    ]


def from_arrays(arrays: list[NDArray[Any]]) -> StepLayout:
    *tensors, heads, tables, spans = arrays
    ends = [0, *accumulate(int(count) for count in heads[:, 3])]
    chunks = [
        ChunkRows(int(first), int(end), int(start), torch.from_numpy(tables[low:high]))
        for (first, end, start, _), (low, high) in zip(heads, pairwise(ends), strict=True)
    ]
    fields = dict(zip(_TENSORS, map(torch.from_numpy, tensors), strict=True))
    return StepLayout(
        **fields, chunks=tuple(chunks), spans=tuple((int(a), int(b)) for a, b in spans)
    )
