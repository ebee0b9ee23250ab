"""Attention compiled by Numba, whose decode reads blocks in place.

Gathering a sequence's blocks costs several times as much as reading them, so decode gathers none.
`BfloatAttention` computes a bfloat16 pool if it can; `TorchAttention` computes all other chunks,
and on AMX those of many rows. Up to rounding, all results equal those of `TorchAttention`. The
module needs numba, which is optional, and only has views of the pool.
"""

from __future__ import annotations

import math

import numba
import numpy as np
import torch
from torch import Tensor

from baton.engine.cpu.attention_bf16 import BfloatAttention, torch_is_faster, usable
from baton.engine.cpu.compiled import compiled, take_threads
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.attention import TorchAttention
from baton.engine.model.rope import rotate
from baton.engine.model.step_layout import ChunkRows, StepLayout
from baton.engine.spec.model_spec import AttentionSpec

_LEAST_TORCH_ROWS = 64  # of a chunk on AMX: for fewer, torch's gather costs more than it gains


class NumbaAttention(TorchAttention):
    """`TorchAttention` with compiled decode. A decode row's result depends only on its own
    sequence, bit for bit."""

    def __init__(self, pool: KvPool, spec: AttentionSpec) -> None:
        super().__init__(pool, spec)
        bits = torch.int32 if pool.tensor.dtype == torch.float32 else torch.int16
        unsigned = np.uint32 if bits == torch.int32 else np.uint16
        self._bits = pool.tensor.view(bits).numpy().view(unsigned)
        # A bfloat16 is the upper half of a float32: its bits times 2^16 are those of one.
        self._widen = np.uint32(1 if bits == torch.int32 else 1 << 16)
        self._fast = BfloatAttention(pool, spec) if usable(pool) else None
        self._warm_up()

    @property
    def bfloat_pool(self) -> Tensor | None:
        """Return the pool's tensor if `BfloatAttention` reads it."""
        return None if self._fast is None else self._pool.tensor

    def rotate_and_write(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        angles: tuple[Tensor, Tensor],
        layout: StepLayout,
    ) -> Tensor:
        """Same as `RotatingAttention`."""
        if self._fast is not None and angles[0].shape[-1] % 32 == 0:
            return self._fast.rotate_and_write(layer, queries, keys, values, angles, layout)
        self.write(layer, rotate(keys, *angles), values, layout)
        return rotate(queries, *angles)

    def chunk(self, layer: int, queries: Tensor, chunk: ChunkRows) -> Tensor:
        if self._fast is None or torch_is_faster(self._spec, len(queries), _LEAST_TORCH_ROWS):
            return super().chunk(layer, queries, chunk)
        return self._fast.chunk(layer, queries, chunk)

    def decode(self, layer: int, queries: Tensor, layout: StepLayout) -> Tensor:
        if self._fast is not None:
            return self._fast.decode(layer, queries, layout.decode_tables, layout.decode_lengths)
        # A job that gets no scratch memory ends without an error, and its rows stay NaN.
        out = torch.full(queries.shape, torch.nan)
        take_threads()
        lengths = layout.decode_lengths.numpy()
        window = self._spec.windows[layer]
        firsts = np.maximum(lengths - window, 0) if window else np.zeros_like(lengths)
        _decode(
            self._bits,
            layer,
            self._widen,
            queries.to(torch.float32).mul(self._spec.scale).contiguous().numpy(),
            layout.decode_tables.numpy(),
            firsts,
            lengths,
            np.float32(self._spec.soft_cap),
            out.numpy(),
        )
        return out.to(queries.dtype)

    def _warm_up(self) -> None:
        """Compile before serving, on a copy of the first block."""
        if self._fast is not None:
            self._fast.warm_up()
            return
        _, kv_heads, _, _, _, dim = self._bits.shape
        queries = np.zeros((1, kv_heads, dim), dtype=np.float32)
        table = np.zeros((1, 1), dtype=np.int32)
        first, length = np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.int32)
        no_cap, out = np.float32(0.0), np.empty_like(queries)
        _decode(self._bits, 0, self._widen, queries, table, first, length, no_cap, out)


def _walk(  # type: ignore[no-untyped-def] # numba infers types
    bits,  # uint16 or uint32 [block, kv_head, layer, k|v, token, dim]
    layer,
    widen,  # uint32: the factor from `bits` to those of a float32
    queries,  # float32 [rows, heads, dim], scaled
    tables,  # int32 [rows, width]
    firsts,  # int32 [rows]: the first token of the window
    lengths,  # int32 [rows]
    soft_cap,  # float32; 0: none
    out,  # float32 [rows, heads, dim]
):
    """Compute decode rows, with one job per row and KV head and an online softmax over blocks
    (Milakov and Gimelshein 2018, arXiv:1805.02867)."""
    rows, heads, dim = queries.shape
    kv_heads, size = bits.shape[1], bits.shape[4]
    group = heads // kv_heads
    for job in numba.prange(rows * kv_heads):
        row, head = job // kv_heads, job % kv_heads
        query = queries[row, head * group : (head + 1) * group]
        tile_bits = np.empty((size, dim), dtype=np.uint32)
        tile = tile_bits.view(np.float32)
        scores = np.empty(size, dtype=np.float32)
        weights = np.empty((group, size), dtype=np.float32)
        best = np.full(group, -np.inf, dtype=np.float32)
        total = np.zeros(group, dtype=np.float32)
        mixed = np.zeros((group, dim), dtype=np.float32)
        for index in range(firsts[row] // size, (lengths[row] + size - 1) // size):
            block = tables[row, index]
            start = max(0, firsts[row] - index * size)
            count = min(size, lengths[row] - index * size)
            for token in range(start, count):
                for i in range(dim):
                    tile_bits[token, i] = bits[block, head, layer, 0, token, i] * widen
            for g in range(group):
                highest = best[g]
                for token in range(start, count):
                    score = np.float32(0.0)
                    for i in range(dim):
                        score += query[g, i] * tile[token, i]
                    if soft_cap > 0:
                        score = soft_cap * math.tanh(score / soft_cap)
                    scores[token] = score
                    highest = max(highest, scores[token])
                shrink = math.exp(best[g] - highest)
                best[g] = highest
                total[g] *= shrink
                mixed[g] *= shrink
                for token in range(start, count):
                    weights[g, token] = math.exp(scores[token] - highest)
                    total[g] += weights[g, token]
            for token in range(start, count):
                for i in range(dim):
                    tile_bits[token, i] = bits[block, head, layer, 1, token, i] * widen
            for g in range(group):
                for token in range(start, count):
                    weight = weights[g, token]
                    for i in range(dim):
                        mixed[g, i] += weight * tile[token, i]
        for g in range(group):
            out[row, head * group + g] = mixed[g] / total[g]


_decode = compiled(_walk, parallel=True)
