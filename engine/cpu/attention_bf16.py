"""Attention over a bfloat16 pool with the processor's bfloat16 instruction. Needs numba.

Decode reads blocks in place (`decode_bf16`). A chunk packs its keys and values once per KV head
for the tiles of `tile_bf16`: queries times keys, a softmax per query, and weights times values.
The weights are rounded to bfloat16 like those of torch's kernel. A row's result depends only on
its own sequence, bit for bit. `NumbaAttention` chooses when to call this backend, which only has
views of the pool.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.cpu.compiled import compiled, keep, take_threads
from baton.engine.cpu.decode_bf16 import attend_all, new_scratch, weigh
from baton.engine.cpu.dot_bf16 import COLUMNS, has_matrix_unit, supported
from baton.engine.cpu.rotation_bf16 import rotate_into
from baton.engine.cpu.softmax_ir import TOKENS, narrow
from baton.engine.cpu.tile_bf16 import MAX_ROWS, tile
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.step_layout import ChunkRows, StepLayout
from baton.engine.spec.model_spec import AttentionSpec

_QUERIES = 48  # of a chunk at once, whose scores fit into a core's cache
_ZEROS = torch.zeros(COLUMNS)


def usable(pool: KvPool) -> bool:
    """Return whether the kernels support this pool and this processor."""
    tensor = pool.tensor
    return (
        tensor.dtype == torch.bfloat16
        and tensor.shape[-1] % COLUMNS == 0
        and tensor.shape[-2] % TOKENS == 0
        and tensor.stride(-1) == 1
        and supported()
    )


def torch_is_faster(spec: AttentionSpec, rows: int, least_rows: int) -> bool:
    """Return whether torch computes a chunk of this many rows faster than a kernel, which it does
    from `least_rows` on with AMX. A soft cap it lacks."""
    return rows >= least_rows and not spec.soft_cap and has_matrix_unit()


class BfloatAttention:
    """The attention of decode rows and chunks over a `usable` pool."""

    def __init__(self, pool: KvPool, spec: AttentionSpec) -> None:
        self._spec = spec
        self._pool = pool.tensor  # [block, kv_head, layer, k|v, token, dim]
        self._bits = pool.tensor.view(torch.int16).numpy().view(np.uint16)
        self._strides = tuple(2 * stride for stride in pool.tensor.stride()[:5])

    def warm_up(self) -> None:
        """Compile before serving, on a copy of the first block."""
        queries = torch.zeros(2, self._pool.shape[1], self._pool.shape[5], dtype=torch.bfloat16)
        table, length = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        self.decode(0, queries[:1], table, length)
        self.chunk(0, queries, ChunkRows(0, 2, 0, torch.zeros(1, dtype=torch.int64)))
        none, no_rows = torch.zeros(0, dtype=torch.int64), queries[:0]
        layout = StepLayout(none, none, none, none, table, length, (), ())
        self.rotate_and_write(0, no_rows, no_rows, no_rows, (no_rows, no_rows), layout)

    def rotate_and_write(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        angles: tuple[Tensor, Tensor],
        layout: StepLayout,
    ) -> Tensor:
        """Same as `RotatingAttention`; rows are bfloat16 [rows, heads or kv_heads, dim]."""
        layer_start = self._pool.data_ptr() + layer * self._strides[2]
        rows = layout.write_blocks, layout.write_slots
        return rotate_into(layer_start, self._strides, (queries, keys, values), angles, rows)

    def decode(self, layer: int, queries: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        """Compute attention of `queries` [rows, heads, dim] over the first `lengths` int32 [rows]
        tokens of the blocks in `tables` int32 [rows, width]. Returns queries' shape."""
        rows, heads, dim = queries.shape
        queries = queries.contiguous()
        out = torch.empty_like(queries)
        block, head, per_layer, pair, token = self._strides
        take_threads()
        tokens = tables.shape[1] * self._pool.shape[4]
        shared = new_scratch(numba.get_num_threads(), heads // self._pool.shape[1], dim, tokens)
        attend_all(
            self._pool.data_ptr() + layer * per_layer,
            (block, head, pair, token),
            self._pool.shape[1],
            self._pool.shape[4],
            dim,
            queries.data_ptr(),
            heads,
            tables.numpy(),
            lengths.numpy(),
            self._spec.windows[layer],
            np.float32(self._spec.scale),
            np.float32(self._spec.soft_cap),
            shared.tiles,
            shared.weights,
            shared.mixed,
            out.data_ptr(),
        )
        return out

    def chunk(self, layer: int, queries: Tensor, chunk: ChunkRows) -> Tensor:
        """Compute attention of one slice's `queries` [tokens, heads, dim]."""
        kv_heads, dim = self._pool.shape[1], queries.shape[2]
        end = chunk.start + len(queries)
        window = self._spec.windows[layer]
        skipped = max(0, chunk.start + 1 - window) // COLUMNS if window else 0
        tiles = -(-end // COLUMNS) - skipped
        keys = np.empty((kv_heads, tiles, dim // 2, COLUMNS), dtype=np.uint32)
        values = np.empty((kv_heads, dim // COLUMNS, tiles * COLUMNS // 2, COLUMNS), np.uint32)
        take_threads()
        _pack(self._bits, layer, chunk.blocks.numpy(), skipped * COLUMNS, end, keys, values)
        packed = (keys, values, skipped)
        return attend_packed(self._spec, layer, queries, chunk.start, packed)


Packed = tuple[NDArray[np.uint32], NDArray[np.uint32], int]  # keys, values, tiles before them


def attend_packed(
    spec: AttentionSpec, layer: int, queries: Tensor, start: int, packed: Packed
) -> Tensor:
    """Compute attention of one slice's `queries` [tokens, heads, dim], after `start` tokens, over
    keys and values from `_pack_walk`. Returns queries' shape."""
    keys, values, skipped = packed
    queries = queries.contiguous()
    out = torch.full_like(queries, torch.nan)  # the result of a job without memory
    _chunk(
        keys,
        values,
        queries.data_ptr(),
        *queries.shape,
        start,
        skipped,
        spec.windows[layer],
        np.float32(spec.scale),
        np.float32(spec.soft_cap),
        _ZEROS.data_ptr(),
        out.data_ptr(),
    )
    return out


def _softmax_narrow(values, first, end, scale, soft_cap, to):  # type: ignore[no-untyped-def] # numba infers types
    """Run `weigh`, and write the weights divided by their sum as bfloat16 to the address `to`.
    `values` stay undivided."""
    total = weigh(values, first, end, scale, soft_cap)
    narrow(values.ctypes.data, to, values.shape[0] // TOKENS, np.float32(1.0) / total)


def _pack_walk(  # type: ignore[no-untyped-def] # numba infers types
    bits,  # uint16 [block, kv_head, layer, k|v, token, dim]
    layer,
    blocks,  # int64 [blocks of the sequence]
    skipped,  # tokens before the first packed one
    end,  # tokens
    keys,  # uint32 [kv_heads, tiles, dim / 2, 64 tokens]: two adjacent numbers of a token
    values,  # uint32 [kv_heads, dim / 64, tokens / 2, 64]: a number of two adjacent tokens
):
    """Pack keys and values for `tile`; tokens beyond `end` become zeros."""
    kv_heads, tiles, pairs, columns = keys.shape
    size = bits.shape[4]
    for job in numba.prange(kv_heads * tiles):
        head, number = job // tiles, job % tiles
        for token in range(columns):
            position = skipped + number * columns + token
            if position >= end:
                keys[head, number, :, token] = 0
                row, parity = (number * columns + token) // 2, token % 2
                if parity == 0:
                    values[head, :, row] = 0
                continue
            tile_ = bits[blocks[position // size], head, layer]
            key = tile_[0, position % size]
            for pair in range(pairs):
                low, high = np.uint32(key[2 * pair]), np.uint32(key[2 * pair + 1])
                keys[head, number, pair, token] = low | (high << np.uint32(16))
            if token % 2:
                continue
            value = tile_[1, position % size]
            row = (number * columns + token) // 2
            after = position + 1
            if after < end:
                following = bits[blocks[after // size], head, layer, 1, after % size]
                for d in range(2 * pairs):
                    low, high = np.uint32(value[d]), np.uint32(following[d])
                    values[head, d // 64, row, d % 64] = low | (high << np.uint32(16))
            else:
                for d in range(2 * pairs):
                    values[head, d // 64, row, d % 64] = value[d]


def _chunk_walk(  # type: ignore[no-untyped-def] # numba infers types
    keys,  # from `_pack_walk`
    values,
    queries,  # address of bfloat16 [tokens, heads, dim]
    count,  # tokens
    heads,
    dim,
    start,  # position of the first query
    skipped,  # tiles before the first packed one
    window,  # tokens; 0: all
    scale,
    soft_cap,  # 0: none
    zeros,  # address of float32 [64]
    out,  # address of bfloat16 [tokens, heads, dim]
):
    """Compute a chunk, with one job per KV head and 48 queries."""
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    parts = (count + _QUERIES - 1) // _QUERIES
    row_bytes = heads * dim * 2
    for job in numba.prange(kv_heads * parts):
        head, part = job // parts, job % parts
        first = part * _QUERIES
        rows = min(_QUERIES, count - first)
        reach = start + first + rows  # tokens visible to the last query
        low = max(0, start + first + 1 - window) // COLUMNS if window else 0
        width = ((reach + COLUMNS - 1) // COLUMNS - low) * COLUMNS
        found = np.empty((rows, width), dtype=np.float32)
        weights = np.empty((rows, width), dtype=np.uint16)
        at, narrowed = found.ctypes.data, weights.ctypes.data
        for g in range(group):
            offset = first * row_bytes + (head * group + g) * dim * 2
            for number in range(width // COLUMNS):
                panel = keys[head, low - skipped + number].ctypes.data
                for row in range(0, rows, MAX_ROWS):
                    many, query = min(MAX_ROWS, rows - row), queries + offset + row * row_bytes
                    to = at + (row * width + number * COLUMNS) * 4
                    _score_tile(
                        many, query, row_bytes, panel, panel, dim // 2, zeros, to, width * 4
                    )
            for row in range(rows):
                end = start + first + row + 1 - low * COLUMNS
                begin = max(0, end - window) if window else 0
                to = narrowed + row * width * 2
                weigh_narrow(found[row], begin, end, scale, soft_cap, to)
            for number in range(dim // COLUMNS):
                panel = values[head, number].ctypes.data + (low - skipped) * COLUMNS * COLUMNS * 2
                for row in range(0, rows, MAX_ROWS):
                    many, weight = min(MAX_ROWS, rows - row), narrowed + row * width * 2
                    to = out + offset + row * row_bytes + number * COLUMNS * 2
                    _mix_tile(
                        many, weight, width * 2, panel, panel, width // 2, zeros, to, row_bytes
                    )
        keep(found)
        keep(weights)


_score_tile, _mix_tile = tile(1, wide=True), tile(1)
weigh_narrow = compiled(_softmax_narrow, strict=True)
_pack = compiled(_pack_walk, parallel=True)
_chunk = compiled(_chunk_walk, parallel=True)
