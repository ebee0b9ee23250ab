"""Attention on a GPU: the choice of the kernel for each row of a step.

The split decode kernel computes decode rows and the prefill kernel computes chunks, each in one
launch for all sequences. The backend owns the buffers of the splits' partial results and the
arrays of the running step, but not the pool. It never waits for the device; a step without chunks
whose layout is on the device can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.attention import HeadNorms
from baton.engine.model.step_layout import StepLayout
from baton.engine.spec.model_spec import AttentionSpec
from baton.engine.triton import kv_write as triton_kv_write
from baton.engine.triton.decode import decode_attention, decode_tiles
from baton.engine.triton.decode_buffers import DecodeBuffers, DecodeLimits, DecodeShape
from baton.engine.triton.prefill import (
    PrefillChunk,
    PrefillPlan,
    device_tiles,
    plan_prefill,
    prefill_attention,
    single_attention,
)
from baton.engine.triton.step_arrays import StepArrays, step_arrays
from baton.runtime.errors import ConfigError

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_readable(pool: KvPool) -> None:
    """Raise ConfigError unless the GPU's kernels support the pool's dtype."""
    if pool.dtype not in _DTYPES:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise ConfigError(
            f"the KV pool has dtype {pool.dtype}: a GPU supports {dtypes}; set worker.dtype to one "
            "of them"
        )


@dataclass(frozen=True, slots=True)
class _AttentionStep:
    arrays: StepArrays
    plan: PrefillPlan


class TritonAttention:
    """The `Attention` backend of a GPU (or of a CPU under Triton's interpreter).

    `deterministic`: one kernel computes all rows, so that a token's result has the same bits in
    every chunk and in every batch; long sequences decode slower.
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
        """Allocate the buffers. `heads`: query heads. Raises ConfigError if the kernels do not
        support the pool's dtype or the buffers do not fit."""
        check_readable(pool)
        _, kv_heads, _, _, _, dim = pool.tensor.shape
        self._pool = pool
        self._spec = spec
        self._group = heads // kv_heads
        self._tiles = device_tiles(self._group, dim, pool.dtype, pool.scales is not None)
        self._decode_tiles = {
            filled: decode_tiles(self._group, dim, pool.dtype, filled=filled)
            for filled in (False, True)
        }
        self._buffers: DecodeBuffers | None = None
        if not deterministic:
            shape = DecodeShape(kv_heads, heads, dim, self._decode_tiles[True].tokens)
            self._buffers = DecodeBuffers(limits, shape, pool.tensor.device)
        self._step: _AttentionStep | None = None

    def write(self, layer: int, keys: Tensor, values: Tensor, layout: StepLayout) -> None:
        """Same as `Attention.write`; a row with a negative block is padding and writes nothing."""
        step, (kv, scales) = self._prepared(layout).arrays, self._layer(layer)
        triton_kv_write.write(keys, values, kv, step.blocks, step.slots, scales)

    def rotate_and_write(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        angles: tuple[Tensor, Tensor],
        layout: StepLayout,
    ) -> Tensor:
        """Same as `RotatingAttention.rotate_and_write`, in one pass."""
        return self._rotate_and_write(layer, (queries, keys, values), None, angles, layout)

    def normalise_rotate_and_write(
        self,
        layer: int,
        heads: tuple[Tensor, Tensor, Tensor],
        norms: HeadNorms,
        angles: tuple[Tensor, Tensor],
        layout: StepLayout,
    ) -> Tensor:
        """Same as `NormalisingAttention.normalise_rotate_and_write`, in one pass."""
        return self._rotate_and_write(layer, heads, norms, angles, layout)

    def attend(self, layer: int, queries: Tensor, layout: StepLayout) -> Tensor:
        """Same as `Attention.attend`; a row of length 0 is padding, and its result is 0."""
        step, (kv, scales), spec = self._prepared(layout), self._layer(layer), self._spec
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        features: dict[str, Any] = {"window": spec.windows[layer], "soft_cap": spec.soft_cap}
        features["scales"] = scales
        rows = step.arrays.lengths.shape[0]
        most = rows if self._buffers is None else self._buffers.limits.rows
        for first in range(0, rows, max(most, 1)):
            part = slice(first, min(first + most, rows))
            tables, lengths = step.arrays.tables[part], step.arrays.lengths[part]
            given = (out[part], queries[part], kv, tables, lengths)
            if self._buffers is None:
                single_attention(*given, spec.scale, tiles=self._tiles, fused=False, **features)
            else:
                buffers = self._buffers.of(len(lengths))
                tiles = self._decode_tiles[self._buffers.fill(len(lengths))]
                decode_attention(*given, *buffers, spec.scale, tiles=tiles, **features)
        features |= {"tiles": self._tiles, "fused": self._buffers is not None}
        prefill_attention(out, queries, kv, step.plan, spec.scale, **features)
        return out

    def _rotate_and_write(
        self,
        layer: int,
        heads: tuple[Tensor, Tensor, Tensor],
        norms: HeadNorms | None,
        angles: tuple[Tensor, Tensor],
        layout: StepLayout,
    ) -> Tensor:
        step, (kv, scales) = self._prepared(layout).arrays, self._layer(layer)
        return triton_kv_write.rotate_and_write(
            *heads, angles, kv, step.blocks, step.slots, scales, norms
        )

    def _layer(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Return a layer of the pool [block, kv_head, k|v, token, dim] and, if it is quantised,
        its scales [block, kv_head, k|v, token]."""
        kv, scales = self._pool.tensor.select(2, layer), self._pool.scales
        return kv, scales if scales is None else scales.select(2, layer)

    def _prepared(self, layout: StepLayout) -> _AttentionStep:
        """Return the arrays of `layout`; the first layer creates them."""
        if self._step is None or self._step.arrays.layout is not layout:
            arrays = step_arrays(layout, self._pool.tensor.device)
            chunks = [
                PrefillChunk(rows.first, rows.end - rows.first, rows.start, index)
                for index, rows in enumerate(layout.chunks)
            ]
            plan = plan_prefill(chunks, arrays.chunk_tables, self._group, self._tiles)
            self._step = _AttentionStep(arrays, plan)
        return self._step
