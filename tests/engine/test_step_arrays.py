"""A layout's arrays for the kernels: nothing copied that is there, tables side by side."""

from __future__ import annotations

import torch

from baton.engine.model.step_layout import Bounds, lay_out
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.engine.triton.step_arrays import chunk_tables, step_arrays

BOUNDS = Bounds(12, 8, 9, 100)


def test_what_is_on_the_device_stays_where_it_is() -> None:
    layout = lay_out(StepBatch((Slice([1], 3, [7]), Slice([1], 9, [2, 4]))), BOUNDS)
    arrays = step_arrays(layout, torch.device("cpu"))
    assert arrays.layout is layout
    assert arrays.blocks is layout.write_blocks
    assert arrays.slots is layout.write_slots
    assert arrays.tables is layout.decode_tables
    assert arrays.lengths is layout.decode_lengths
    assert arrays.chunk_tables.shape == (0, 0)


def test_what_is_elsewhere_is_moved() -> None:
    layout = lay_out(StepBatch((Slice([1], 3, [7]), Slice([1] * 9, 0, [2, 4]))), BOUNDS)
    arrays = step_arrays(layout, torch.device("meta"))
    moved = (arrays.blocks, arrays.slots, arrays.tables, arrays.lengths, arrays.chunk_tables)
    assert {each.device.type for each in moved} == {"meta"}
    assert arrays.tables.shape == (1, 1) and arrays.chunk_tables.shape == (1, 2)


def test_tables_of_chunks_are_padded() -> None:
    batch = StepBatch((Slice([1] * 9, 0, [4, 2]), Slice([1] * 20, 2, [7, 1, 3])))
    tables = chunk_tables(lay_out(batch, BOUNDS).chunks)
    assert tables.tolist() == [[4, 2, 0], [7, 1, 3]]
    assert tables.dtype == torch.int32
