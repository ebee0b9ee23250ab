"""Multi-head latent attention on a GPU: absorbed rows by the split kernel, long chunks expanded.

One launch computes decode rows and the rows of short chunks, as many as the buffers hold; torch's
attention computes chunks for which expansion pays, one by one. The backend owns the buffers of the
splits and the arrays of the running step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.mla import NORM_EPS, LatentAttention, absorb, expand_values, expansion_pays
from baton.engine.model.step_layout import ChunkRows, StepLayout
from baton.engine.spec.moe_spec import LatentSpec
from baton.engine.triton.attention_backend import check_readable
from baton.engine.triton.decode import Partials, Splits
from baton.engine.triton.decode_buffers import DecodeBuffers, DecodeLimits, DecodeShape
from baton.engine.triton.linear import fixed_products
from baton.engine.triton.mla import latent_attention, latent_tiles, write_latents
from baton.engine.triton.norm import rms_norm
from baton.engine.triton.step_arrays import StepArrays, step_arrays


@dataclass(frozen=True, slots=True)
class _Absorbed:
    """The rows for the split kernel: those in `rows`; None: the first rows of the step."""

    tables: Tensor  # int32 [sequences, longest table]
    sequences: Tensor  # int32 [absorbed rows]: rows of `tables`
    lengths: Tensor  # int32 [absorbed rows]
    rows: Tensor | None  # int64 [absorbed rows]


@dataclass(frozen=True, slots=True)
class _MlaStep:
    arrays: StepArrays
    absorbed: _Absorbed
    expanded: tuple[tuple[ChunkRows, Tensor], ...]  # chunks, and their blocks on the device


class TritonLatentAttention(LatentAttention):
    """`LatentAttention` for a pool on a GPU (or on a CPU under Triton's interpreter).

    With `limits.split_tokens` a row's result has the same bits in every batch; `deterministic`: in
    every chunk too, since no chunk is expanded, so that long chunks are slower. `deterministic`
    without `split_tokens` splits nothing, so that long sequences decode slower.
    """

    def __init__(
        self,
        pool: KvPool,
        spec: LatentSpec,
        heads: int,
        scale: float,
        limits: DecodeLimits,
        *,
        deterministic: bool = False,
    ) -> None:
        """Allocate the buffers. Raises ConfigError if the kernels do not support the pool's dtype
        or the buffers do not fit."""
        check_readable(pool)
        super().__init__(pool, spec, heads, scale)
        self._always_absorb = deterministic
        self._products = fixed_products if deterministic else torch.bmm
        self._tiles = latent_tiles(heads, pool.dtype, pool.quant is not None)
        self._buffers: DecodeBuffers | None = None
        if limits.split_tokens or not deterministic:
            programs = -(-heads // self._tiles.rows)
            shape = DecodeShape(programs, heads, spec.rank, self._tiles.tokens)
            self._buffers = DecodeBuffers(limits, shape, pool.tensor.device)
        self._step: _MlaStep | None = None

    def attend(self, layer: int, queries: Tensor, up: Tensor, layout: StepLayout) -> Tensor:
        """Same as `LatentAttention.attend`; a row of length 0 is padding, and its result is 0."""
        step, spec = self._prepared(layout), self._spec
        out = queries.new_empty(*queries.shape[:2], spec.value_dim)
        rows = step.absorbed.rows
        count = step.absorbed.lengths.shape[0]
        if count:
            chosen = queries[:count] if rows is None else queries[rows]
            absorbed = absorb(spec, chosen, up, self._products)
            mixed = self._mixed(layer, absorbed, step.absorbed)
            found = expand_values(spec, mixed, up, self._products)
            out[slice(count) if rows is None else rows] = found
        for chunk, blocks in step.expanded:
            span = slice(chunk.first, chunk.end)
            known = self.latents(layer, blocks, chunk.start + chunk.end - chunk.first)
            out[span] = self._expanded(queries[span], known, up)
        return out

    def write(self, layer: int, latents: Tensor, layout: StepLayout) -> None:
        """Same as `LatentAttention.write`; a row with a negative block writes nothing."""
        arrays = self._prepared(layout).arrays
        write_latents(latents, *self._layer(layer), arrays.blocks, arrays.slots, self._spec.rank)

    def _layer(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Return a layer of the pool [block, token, width] and, if it is quantised, its scales
        [block, token, latent|key]."""
        scales = self._pool.scales
        return self._pool.tensor[:, 0, layer], scales if scales is None else scales[:, 0, layer]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, NORM_EPS)

    def _mixed(self, layer: int, queries: Tensor, absorbed: _Absorbed) -> Tensor:
        """Return weighted latents [rows, heads, rank] for `queries` [rows, heads, width]."""
        spec, buffers = self._spec, self._buffers
        out = queries.new_empty(*queries.shape[:2], spec.rank)
        most = len(queries) if buffers is None else buffers.limits.rows
        latents, scales = self._layer(layer)
        for first in range(0, len(queries), most):
            part = slice(first, first + most)
            whole = Splits(1), Partials(out[part], out[part])  # not written
            latent_attention(
                out[part],
                queries[part],
                latents,
                absorbed.tables,
                absorbed.sequences[part],
                absorbed.lengths[part],
                *(whole if buffers is None else buffers.of(len(queries[part]))),
                self._scale,
                tiles=self._tiles,
                scales=scales,
            )
        return out

    def _prepared(self, layout: StepLayout) -> _MlaStep:
        """Return the arrays of `layout`; the first layer creates them."""
        if self._step is None or self._step.arrays.layout is not layout:
            arrays = step_arrays(layout, self._pool.tensor.device)
            device = self._pool.tensor.device
            short = [item for item in enumerate(layout.chunks) if not self._expands(item[1])]
            expanded = tuple(
                (chunk, chunk.blocks.to(device, non_blocking=True))
                for chunk in layout.chunks
                if self._expands(chunk)
            )
            self._step = _MlaStep(arrays, _absorbed(arrays, short), expanded)
        return self._step

    def _expands(self, chunk: ChunkRows) -> bool:
        rows = chunk.end - chunk.first
        pays = expansion_pays(self._spec, rows, chunk.start + rows)
        return pays and not self._always_absorb


def _absorbed(arrays: StepArrays, short: list[tuple[int, ChunkRows]]) -> _Absorbed:
    """Collect the decode rows, then the rows of the `short` chunks, given as (index, chunk)."""
    device, decodes = arrays.lengths.device, arrays.lengths.shape[0]
    alone = torch.arange(decodes, dtype=torch.int32, device=device)
    if not short:
        return _Absorbed(arrays.tables, alone, arrays.lengths, None)
    width = max(arrays.tables.shape[1], arrays.chunk_tables.shape[1])
    tables = torch.cat(
        [functional.pad(x, (0, width - x.shape[1])) for x in (arrays.tables, arrays.chunk_tables)]
    )
    sequences = [np.full(chunk.end - chunk.first, decodes + index) for index, chunk in short]
    lengths = [1 + chunk.start + np.arange(chunk.end - chunk.first) for _, chunk in short]
    rows = [np.arange(decodes), *(np.arange(chunk.first, chunk.end) for _, chunk in short)]
    return _Absorbed(
        tables,
        torch.cat((alone, _integers(sequences, torch.int32, device))),
        torch.cat((arrays.lengths, _integers(lengths, torch.int32, device))),
        _integers(rows, torch.int64, device),
    )


def _integers(parts: list[NDArray[np.int64]], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(device, dtype, non_blocking=True)
