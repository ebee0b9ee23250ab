"""A step, laid out as arrays: where each token stands, and where its KV goes.

Rows are the tokens of a step: first the slices of one token (decode), then the longer ones
(chunks), each in the order of the batch. Everything from the caller is checked here, before
a kernel follows a block table. Knows no model and no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.batch import Slice, StepBatch
from baton.runtime.errors import EngineError

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The rows `first` to `end` are one slice, after `start` tokens already in `blocks`."""

    first: int
    end: int
    start: int
    blocks: Tensor  # int64, the blocks that hold start + rows tokens


@dataclass(frozen=True, slots=True)
class StepLayout:
    tokens: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    write_blocks: Tensor  # int64 [rows]: the block that takes the row's KV
    write_slots: Tensor  # int64 [rows]: the token's place in it
    decode_tables: Tensor  # int32 [decode rows, longest table], padded with a valid block
    decode_lengths: Tensor  # int32 [decode rows]: tokens to attend to, the own one included
    chunks: tuple[ChunkRows, ...]
    spans: tuple[tuple[int, int], ...]  # rows of each slice, in the order of the batch

    @property
    def decode_rows(self) -> int:
        return self.decode_lengths.shape[0]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a slice must keep to."""

    blocks: int
    block_size: int
    vocab_size: int
    max_context: int  # tokens


def lay_out(batch: StepBatch, bounds: Bounds) -> StepLayout:
    """Arrays for `batch`. Raises EngineError naming the slice that breaks its bounds."""
    if not batch.slices:
        raise EngineError("a step needs at least one slice")
    checked = [_check(index, item, bounds) for index, item in enumerate(batch.slices)]
    order = sorted(range(len(checked)), key=lambda index: len(checked[index][0]) > 1)
    spans: list[tuple[int, int]] = [(0, 0)] * len(checked)
    positions: list[Ints] = []
    blocks: list[Ints] = []
    chunks: list[ChunkRows] = []
    decodes: list[int] = []
    row = 0
    for index in order:
        tokens, table = checked[index]
        start = batch.slices[index].start
        spans[index] = (row, row + len(tokens))
        places = np.arange(start, start + len(tokens), dtype=np.int64)
        positions.append(places)
        blocks.append(table[places // bounds.block_size])
        if len(tokens) == 1:
            decodes.append(index)
        else:
            chunks.append(ChunkRows(row, row + len(tokens), start, torch.from_numpy(table)))
        row += len(tokens)
    tables, lengths = _decode_tables(
        [checked[index][1] for index in decodes], [batch.slices[index].start for index in decodes]
    )
    position = np.concatenate(positions)
    return StepLayout(
        tokens=torch.from_numpy(np.concatenate([checked[index][0] for index in order])),
        positions=torch.from_numpy(position),
        write_blocks=torch.from_numpy(np.concatenate(blocks)),
        write_slots=torch.from_numpy(position % bounds.block_size),
        decode_tables=tables,
        decode_lengths=lengths,
        chunks=tuple(chunks),
        spans=tuple(spans),
    )


def _check(index: int, item: Slice, bounds: Bounds) -> tuple[Ints, Ints]:
    """Tokens, and the part of the block table in use."""
    tokens = _ints(item.tokens)
    end = item.start + len(tokens)
    if not len(tokens) or item.start < 0:
        raise EngineError(f"slice {index}: {len(tokens)} tokens from position {item.start}")
    if end > bounds.max_context:
        raise EngineError(f"slice {index}: {end} tokens exceed {bounds.max_context} of context")
    if tokens.min() < 0 or tokens.max() >= bounds.vocab_size:
        raise EngineError(f"slice {index}: a token is outside the {bounds.vocab_size} known ones")
    needed = -(-end // bounds.block_size)
    blocks = _ints(item.blocks[:needed])
    if len(blocks) < needed:
        raise EngineError(f"slice {index}: {len(blocks)} blocks do not hold {end} tokens")
    if blocks.min() < 0 or blocks.max() >= bounds.blocks:
        raise EngineError(f"slice {index}: a block is outside the pool of {bounds.blocks}")
    return tokens, blocks


def _decode_tables(tables: list[Ints], starts: Sequence[int]) -> tuple[Tensor, Tensor]:
    width = max((len(table) for table in tables), default=0)
    padded = np.zeros((len(tables), width), dtype=np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    lengths = np.asarray(starts, dtype=np.int32) + 1
    return torch.from_numpy(padded), torch.from_numpy(lengths)


def _ints(values: Sequence[int]) -> Ints:
    return np.asarray(values, dtype=np.int64)
