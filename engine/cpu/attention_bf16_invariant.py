"""Batch-invariant attention over a bfloat16 pool: a row's bits depend only on its own sequence.

A row of a chunk has the same order of sums for every division of the prompt. This module computes
decode rows from the blocks in place in that order, so that a token has the same bits in a chunk
and alone. Up to rounding, the results equal those of `NumbaAttention`; the speed is nearly the
same. It needs numba and only has views of the pool.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from baton.engine.cpu.attention_bf16 import weigh_narrow
from baton.engine.cpu.attention_numba import NumbaAttention
from baton.engine.cpu.chunk_order_ir import MAX_QUERIES, finish, mix_in_order, scores_in_order
from baton.engine.cpu.compiled import compiled, keep, take_threads
from baton.engine.cpu.decode_bf16 import tile_position
from baton.engine.cpu.dot_bf16 import COLUMNS
from baton.engine.cpu.softmax_ir import TOKENS
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.step_layout import ChunkRows, StepLayout
from baton.engine.spec.model_spec import AttentionSpec

_TILES_AHEAD = 2  # prefetched, since blocks of a few KB lie anywhere in the pool


class InvariantBfloatAttention(NumbaAttention):
    """`NumbaAttention` over a `usable` pool that sums decode rows like rows of chunks."""

    def __init__(self, pool: KvPool, spec: AttentionSpec) -> None:
        super().__init__(pool, spec)
        self._strides = tuple(2 * stride for stride in pool.tensor.stride()[:5])
        self._zeros = torch.zeros(COLUMNS, dtype=pool.tensor.dtype)
        # Compile before serving, on a copy of the first block.
        queries = torch.zeros(1, pool.tensor.shape[1], pool.tensor.shape[5], dtype=torch.bfloat16)
        none, table = torch.zeros(0, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32)
        length = torch.ones(1, dtype=torch.int32)
        self.decode(0, queries, StepLayout(none, none, none, none, table, length, (), ()))

    def chunk(self, layer: int, queries: Tensor, chunk: ChunkRows) -> Tensor:
        assert self._fast is not None
        return self._fast.chunk(layer, queries, chunk)

    def decode(self, layer: int, queries: Tensor, layout: StepLayout) -> Tensor:
        rows, heads, dim = queries.shape
        pool, queries = self._pool.tensor, queries.contiguous()
        out = torch.full_like(queries, torch.nan)  # the result of a job without memory
        block, head, per_layer, pair, token = self._strides
        take_threads()
        _decode(
            pool.data_ptr() + layer * per_layer,
            (block, head, pair, token),
            (heads, pool.shape[1], pool.shape[4], dim),
            queries.data_ptr(),
            layout.decode_tables.numpy(),
            layout.decode_lengths.numpy(),
            self._spec.windows[layer],
            np.float32(self._spec.scale),
            np.float32(self._spec.soft_cap),
            self._zeros.data_ptr(),
            out.data_ptr(),
        )
        return out


def decode_walk(  # type: ignore[no-untyped-def] # numba infers types
    pool,  # address of the layer
    strides,  # bytes from one block, KV head, k to v, token to the next
    sizes,  # heads, KV heads, tokens of a block, numbers of a head
    queries,  # address of bfloat16 [rows, heads, dim]
    tables,  # int32 [rows, width]
    lengths,  # int32 [rows]
    window,  # tokens; 0: all
    scale,
    soft_cap,  # 0: none
    zeros,  # address of 64 zeros
    out,  # address of bfloat16 [rows, heads, dim]
):
    """Compute one job per row and KV head; its last values prefetch the next job's first keys."""
    heads, kv_heads, size, dim = sizes
    by_block, by_head, by_pair, by_token = strides
    group, given = heads // kv_heads, (kv_heads, size, tables, lengths, window)
    for job in numba.prange(lengths.shape[0] * kv_heads):
        row, head = job // kv_heads, job % kv_heads
        offset = (row * heads + head * group) * dim * 2
        length = lengths[row]
        first = max(0, length - window) if window else 0
        skip = first // TOKENS * TOKENS
        count = (length + TOKENS - 1) // TOKENS - skip // TOKENS
        width = count * TOKENS
        found = np.empty((group, width), dtype=np.float32)
        weights = np.empty((group, width), dtype=np.uint16)
        mixed = np.zeros((group, dim), dtype=np.float32)
        tiles = np.empty(count + _TILES_AHEAD, dtype=np.int64)
        at, narrowed, sums = found.ctypes.data, weights.ctypes.data, mixed.ctypes.data
        for number in range(count + _TILES_AHEAD):  # the last are the next job's
            block, slab, slot = tile_position(job + number // count, number % count, *given)
            tiles[number] = pool + block * by_block + slab * by_head + slot * by_token
        for number in range(count):
            ahead = number + _TILES_AHEAD
            later = tiles[ahead] if ahead < count else tiles[min(ahead - count, number)] + by_pair
            for g in range(0, group, MAX_QUERIES):
                many, query = min(MAX_QUERIES, group - g), queries + offset + g * dim * 2
                keys, to = tiles[number], at + (g * width + number * TOKENS) * 4
                rest = (dim // 32, later, to, width * 4)
                scores_in_order(many, query, dim * 2, keys, by_token, *rest)
        for g in range(group):
            to = narrowed + g * width * 2
            weigh_narrow(found[g], first - skip, length - skip, scale, soft_cap, to)
        for number in range(count):
            token = max(first - skip, number * TOKENS) // 2 * 2
            several = min(length - skip, (number + 1) * TOKENS) - token
            values = tiles[number] + by_pair + token % TOKENS * by_token
            tile = tiles[number + _TILES_AHEAD] + (by_pair if number + _TILES_AHEAD < count else 0)
            for g in range(0, group, MAX_QUERIES):
                many, weight = min(MAX_QUERIES, group - g), narrowed + (g * width + token) * 2
                for d in range(0, dim, COLUMNS):
                    value, later = values + d * 2, tile + d * 2 * TOKENS
                    rest = (zeros, later, sums + (g * dim + d) * 4, dim * 4)
                    mix_in_order(many, weight, width * 2, value, by_token, several, *rest)
        for d in range(0, group * dim, COLUMNS):
            finish(sums + d * 4, out + offset + d * 2)
        keep(found)
        keep(weights)
        keep(mixed)


_decode = compiled(decode_walk, parallel=True, strict=True)
