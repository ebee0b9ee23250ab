"""The layout of a step as arrays: the position of each token, and the block for its KV.

Rows are the tokens of a step: first the slices of one token (decode) and those that verify
proposals, then the longer ones (chunks), each in the order of the batch. Each token of a verifying
slice is a decode row: all KV of a step is written before any row attends, and a row attends to
the tokens up to its own, so its bits equal those of a slice of one token. The module checks all
input from the caller before a kernel follows a block table. It knows no model and no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.scheduling.batch import Slice, StepBatch
from baton.engine.scheduling.verification import check_proposals
from baton.runtime.errors import EngineError

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The rows `first` to `end` of one slice, after `start` tokens that are in `blocks`."""

    first: int
    end: int
    start: int
    blocks: Tensor  # int64, the blocks that hold start + rows tokens


@dataclass(frozen=True, slots=True)
class StepLayout:
    tokens: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    write_blocks: Tensor  # int64 [rows]: the block that takes the row's KV
    write_slots: Tensor  # int64 [rows]: the token's index in it
    decode_tables: Tensor  # int32 [decode rows, longest table], padded with a valid block
    decode_lengths: Tensor  # int32 [decode rows]: tokens to attend to, the own one included
    chunks: tuple[ChunkRows, ...]
    spans: tuple[tuple[int, int], ...]  # rows of each slice, in the order of the batch

    def to(self, device: torch.device) -> StepLayout:
        """Copy the layout to `device`, except the chunks' tables, which the host plans with."""
        moved = {
            name: getattr(self, name).to(device)
            for name in (
                "tokens",
                "positions",
                "write_blocks",
                "write_slots",
                "decode_tables",
                "decode_lengths",
            )
        }
        return replace(self, **moved)

    @property
    def decode_rows(self) -> int:
        return self.decode_lengths.shape[0]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of every slice."""

    blocks: int
    block_size: int
    vocab_size: int
    max_context: int  # tokens


def lay_out(batch: StepBatch, bounds: Bounds) -> StepLayout:
    """Return the layout of `batch`. Raises EngineError with the slice that exceeds its bounds."""
    slices = batch.slices
    if not slices:
        raise EngineError("a step needs at least one slice")
    check_proposals(batch)
    decodes = [i for i, item in enumerate(slices) if len(item.tokens) == 1 or item.proposed]
    longer = [i for i, item in enumerate(slices) if len(item.tokens) != 1 and not item.proposed]
    first = _decodes(slices, decodes, bounds)
    rest = [_chunk(index, slices[index], bounds) for index in longer]
    spans = _spans(slices, decodes + longer)
    return _assemble(first, rest, spans, bounds.block_size)


def _spans(slices: Sequence[Slice], order: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the rows of each slice, for slices in this order."""
    spans = [(0, 0)] * len(slices)
    row = 0
    for index in order:
        spans[index] = row, row + len(slices[index].tokens)
        row = spans[index][1]
    return tuple(spans)


@dataclass(frozen=True, slots=True)
class _Rows:
    """All decode rows, or one chunk."""

    tokens: Ints
    positions: Ints
    blocks: Ints  # the block of each position
    tables: NDArray[np.int32]  # [rows, longest]; of a chunk [1, blocks]


def _assemble(
    decodes: _Rows, chunks: list[_Rows], spans: tuple[tuple[int, int], ...], block_size: int
) -> StepLayout:
    parts = [decodes, *chunks]
    positions = np.concatenate([part.positions for part in parts])
    rows: list[ChunkRows] = []
    row = len(decodes.tokens)
    for chunk in chunks:
        end = row + len(chunk.tokens)
        blocks = torch.from_numpy(chunk.tables[0].astype(np.int64))
        rows.append(ChunkRows(row, end, int(chunk.positions[0]), blocks))
        row = end
    return StepLayout(
        tokens=torch.from_numpy(np.concatenate([part.tokens for part in parts])),
        positions=torch.from_numpy(positions),
        write_blocks=torch.from_numpy(np.concatenate([part.blocks for part in parts])),
        write_slots=torch.from_numpy(positions % block_size),
        decode_tables=torch.from_numpy(decodes.tables),
        decode_lengths=torch.from_numpy(decodes.positions.astype(np.int32) + 1),
        chunks=tuple(rows),
        spans=spans,
    )


def _decodes(slices: Sequence[Slice], decodes: Sequence[int], bounds: Bounds) -> _Rows:
    """Lay out all decode rows at once, since a batch has hundreds of them in every step."""
    items = [slices[index] for index in decodes]
    if any(item.proposed for item in items):
        items = [row for item in items for row in _single_rows(item)]
    count = len(items)
    tokens = np.fromiter((item.tokens[0] for item in items), np.int64, count)
    starts = np.fromiter((item.start for item in items), np.int64, count)
    size = bounds.block_size
    needed = starts // size + 1
    tables = [
        item.blocks if len(item.blocks) == length else item.blocks[:length]
        for item, length in zip(items, needed.tolist(), strict=True)
    ]
    lengths = np.fromiter(map(len, tables), np.int64, count)
    flat = np.fromiter(chain.from_iterable(tables), np.int64, int(lengths.sum()))
    within_bounds = bool(
        (starts >= 0).all()
        and (starts < bounds.max_context).all()
        and (tokens >= 0).all()
        and (tokens < bounds.vocab_size).all()
        and (lengths == needed).all()
        and (flat >= 0).all()
        and (flat < bounds.blocks).all()
    )
    if not within_bounds:  # find the slice at fault
        for index in decodes:
            _check(index, slices[index], bounds)
    padded = np.zeros((count, int(needed.max(initial=0))), dtype=np.int32)
    padded[np.arange(padded.shape[1]) < needed[:, None]] = flat
    last = np.cumsum(lengths) - 1
    return _Rows(tokens, starts, flat[last], padded)


def _single_rows(item: Slice) -> list[Slice]:
    """Divide a slice into slices of one token."""
    if len(item.tokens) == 1:
        return [item]
    start, blocks = item.start, item.blocks
    return [Slice((token,), start + row, blocks) for row, token in enumerate(item.tokens)]


def _chunk(index: int, item: Slice, bounds: Bounds) -> _Rows:
    tokens, table = _check(index, item, bounds)
    positions = np.arange(item.start, item.start + len(tokens), dtype=np.int64)
    blocks = table[positions // bounds.block_size]
    return _Rows(tokens, positions, blocks, table.astype(np.int32)[None])


def _check(index: int, item: Slice, bounds: Bounds) -> tuple[Ints, Ints]:
    """Check a slice; return its tokens and the used part of its block table."""
    tokens = _ints(item.tokens)
    end = item.start + len(tokens)
    if not len(tokens) or item.start < 0:
        raise EngineError(f"slice {index}: {len(tokens)} tokens from position {item.start}")
    if end > bounds.max_context:
        raise EngineError(f"slice {index}: {end} tokens exceed {bounds.max_context} of context")
    if tokens.min() < 0 or tokens.max() >= bounds.vocab_size:
        raise EngineError(f"slice {index}: a token exceeds the vocabulary of {bounds.vocab_size}")
    needed = -(-end // bounds.block_size)
    blocks = _ints(item.blocks[:needed])
    if len(blocks) < needed:
        raise EngineError(f"slice {index}: {len(blocks)} blocks do not hold {end} tokens")
    if blocks.min() < 0 or blocks.max() >= bounds.blocks:
        raise EngineError(f"slice {index}: a block is outside the pool of {bounds.blocks}")
    return tokens, blocks


def _ints(values: Sequence[int]) -> Ints:
    return np.asarray(values, dtype=np.int64)
