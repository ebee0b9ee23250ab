"""Attention on a GPU: which kernel computes which rows of a step.

Rows of one token go to the split decode, chunks to the prefill, each in one launch for all
sequences. Owns the buffers for the splits' partial results, made once, and the arrays of the
step under way; the pool is another's. Nothing here waits for the device, and a step without
chunks whose layout lies on the device already can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.engine import triton_kv_write
from baton.engine.pool import KvPool
from baton.engine.spec import AttentionSpec
from baton.engine.step_layout import ChunkRows, StepLayout
from baton.engine.triton_decode import (
    Partials,
    Splits,
    choose_splits,
    decode_attention,
    decode_tiles,
    fixed_splits,
)
from baton.engine.triton_prefill import (
    Chunk,
    PrefillPlan,
    device_tiles,
    plan_prefill,
    prefill_attention,
    single_attention,
)
from baton.runtime.errors import ConfigError, EngineError

_KINDS = (torch.bfloat16, torch.float16, torch.float32)
_EMULATED_PROCESSORS = 2  # of triton's interpreter


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What the buffers are made for. `split_tokens` 0: splits by count, which is fastest; else
    splits of that many tokens, so that a row's result does not depend on its batch."""

    rows: int
    longest: int  # tokens of a sequence
    split_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Step:
    """A layout's arrays on the device."""

    layout: StepLayout
    blocks: Tensor
    slots: Tensor
    tables: Tensor
    lengths: Tensor
    chunks: PrefillPlan


class TritonAttention:
    """An `Attention` for a pool on a GPU (or on the CPU, under triton's interpreter).

    `deterministic`: one kernel for all rows, so that a token's result is the same bits in a
    chunk of whatever length, alone, and in every batch; long sequences decode slower.
    """

    def __init__(
        self,
        pool: KvPool,
        spec: AttentionSpec,
        heads: int,
        limits: DecodeLimits,
        *,
        deterministic: bool = False,
    ) -> None:
        """`heads`: query heads. Raises ConfigError if the pool's numbers are of a kind that the
        kernels do not read, or the buffers do not fit."""
        _, kv_heads, _, _, _, dim = pool.tensor.shape
        if pool.tensor.dtype not in _KINDS:
            kinds = ", ".join(str(kind).removeprefix("torch.") for kind in _KINDS)
            raise ConfigError(
                f"the KV pool is of {pool.tensor.dtype}: these kernels read {kinds}; "
                "set worker.dtype or pool.dtype to one of them"
            )
        self._pool = pool
        self._spec = spec
        self._limits = limits
        self._deterministic = deterministic
        self._kv_heads, self._group, self._dim = kv_heads, heads // kv_heads, dim
        self._tiles = device_tiles(self._group, dim, pool.tensor.dtype)
        self._decode_tiles = decode_tiles(self._group, dim, pool.tensor.dtype)
        self._processors = _processors(pool.tensor.device)
        self._mixed, self._weights = self._buffers()
        self._step: _Step | None = None

    def write(self, layer: int, keys: Tensor, values: Tensor, layout: StepLayout) -> None:
        """As `Attention.write`; a row whose block is negative is padding and writes nothing."""
        step = self._prepared(layout)
        triton_kv_write.write(keys, values, self._layer(layer), step.blocks, step.slots)

    def rotate_and_write(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        angles: tuple[Tensor, Tensor],
        layout: StepLayout,
    ) -> Tensor:
        """As `Attention.rotate_and_write`, in one pass."""
        step = self._prepared(layout)
        kv = self._layer(layer)
        return triton_kv_write.rotate_and_write(
            queries, keys, values, angles, kv, step.blocks, step.slots
        )

    def attend(self, layer: int, queries: Tensor, layout: StepLayout) -> Tensor:
        """As `Attention.attend`; a row of length 0 is padding, and its result is 0."""
        step, kv, spec = self._prepared(layout), self._layer(layer), self._spec
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        features: dict[str, Any] = {"window": spec.windows[layer], "soft_cap": spec.soft_cap}
        if rows := step.lengths.shape[0]:
            given = (out[:rows], queries[:rows], kv, step.tables, step.lengths)
            if self._deterministic:
                single_attention(*given, spec.scale, tiles=self._tiles, **features)
            else:
                splits, partials = self.splits(rows), self._partials(rows)
                tiles = self._decode_tiles
                decode_attention(*given, splits, partials, spec.scale, tiles=tiles, **features)
        prefill_attention(out, queries, kv, step.chunks, spec.scale, tiles=self._tiles, **features)
        return out

    def splits(self, rows: int) -> Splits:
        """How a step's decode rows are cut: by their number alone, never by their lengths, which
        a captured step does not know."""
        given = (rows, self._kv_heads, self._limits.longest, self._processors)
        if self._limits.split_tokens:
            return fixed_splits(*given, self._limits.split_tokens)
        return choose_splits(*given)

    def _layer(self, layer: int) -> Tensor:  # [block, kv_head, k|v, token, dim]
        return self._pool.tensor.select(2, layer)

    def _capacity(self, rows: int) -> int:
        return self.splits(rows).capacity(self._limits.longest, self._decode_tiles.tokens)

    def _buffers(self) -> tuple[Tensor, Tensor]:
        heads, device = self._kv_heads * self._group, self._pool.tensor.device
        cells = 0
        if not self._deterministic:
            counts = range(1, self._limits.rows + 1)
            cells = max(rows * heads * self._capacity(rows) for rows in counts)
        try:
            mixed = torch.empty(cells * self._dim, dtype=torch.float32, device=device)
            return mixed, torch.empty(cells, dtype=torch.float32, device=device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the partial results of {self._limits.rows} rows of {self._limits.longest} "
                f"tokens need {4 * cells * (self._dim + 1)} bytes, which the device does not "
                "have; lower pool.memory_fraction, or the largest batch"
            ) from error

    def _partials(self, rows: int) -> Partials:
        """Room for a step of `rows`. Raises EngineError if they are more than agreed."""
        if rows > self._limits.rows:
            raise EngineError(f"{rows} rows decode at once: buffers are for {self._limits.rows}")
        shape = (rows, self._kv_heads * self._group, self._capacity(rows))
        cells = shape[0] * shape[1] * shape[2]
        return Partials(
            self._mixed[: cells * self._dim].view(*shape, self._dim),
            self._weights[:cells].view(shape),
        )

    def _prepared(self, layout: StepLayout) -> _Step:
        """The arrays of `layout`, made when its first layer asks."""
        if self._step is None or self._step.layout is not layout:
            device = self._pool.tensor.device
            chunks = [
                Chunk(rows.first, rows.end - rows.first, rows.start, index)
                for index, rows in enumerate(layout.chunks)
            ]
            tables = _chunk_tables(layout.chunks).to(device, non_blocking=True)
            self._step = _Step(
                layout,
                layout.write_blocks.to(device, non_blocking=True),
                layout.write_slots.to(device, non_blocking=True),
                layout.decode_tables.to(device, non_blocking=True),
                layout.decode_lengths.to(device, non_blocking=True),
                plan_prefill(chunks, tables, self._group, self._tiles),
            )
        return self._step


def _chunk_tables(chunks: Sequence[ChunkRows]) -> Tensor:
    """int32 [chunks, longest table]; what pads a table is never read."""
    tables = [chunk.blocks.numpy() for chunk in chunks]
    padded = np.zeros((len(tables), max(map(len, tables), default=0)), dtype=np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return torch.from_numpy(padded)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _EMULATED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
