"""Attention of a bfloat16 model over an eight-bit pool with the processor's bfloat16 instruction.

Same as `attention_bf16`, but codes are decoded in registers, in tiles of 16 tokens. Codes are
exact in bfloat16. The scales of keys multiply the scores of their tokens, and those of values
multiply the weights, so decode rounds no more than over a bfloat16 pool. A chunk's keys and values
are rounded to bfloat16 when they are packed. The module needs numba and only has views of the
pool.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from baton.engine.cpu.attention_bf16 import attend_packed
from baton.engine.cpu.compiled import compiled, keep, take_threads
from baton.engine.cpu.decode_bf16 import tile_position, weigh
from baton.engine.cpu.decode_ir import fetch
from baton.engine.cpu.dot_bf16 import COLUMNS, supported
from baton.engine.cpu.kv_quant_numba import Slabs, decode_row
from baton.engine.cpu.softmax_ir import TOKENS, code_scores, mix, narrow
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.step_layout import ChunkRows
from baton.engine.spec.model_spec import AttentionSpec

_TILES_AHEAD = 4  # prefetched


def usable(pool: KvPool) -> bool:
    """Return whether the kernels support this pool and this processor."""
    return (
        pool.quant is not None
        and pool.dtype == torch.bfloat16
        and pool.tensor.shape[-1] % COLUMNS == 0
        and pool.block_size % TOKENS == 0
        and supported()
    )


class BfloatKvQuantAttention:
    """The attention of decode rows and chunks over a `usable` pool; see `BfloatAttention`."""

    def __init__(self, pool: KvPool, spec: AttentionSpec) -> None:
        self._spec = spec
        self._slabs = Slabs(pool)
        self._kv_heads, self._dim = pool.tensor.shape[1], pool.tensor.shape[-1]

    def warm_up(self) -> None:
        """Compile before serving, on a copy of the first block."""
        queries = torch.zeros(2, self._kv_heads, self._dim, dtype=torch.bfloat16)
        table, length = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        self.decode(0, queries[:1], table, length)
        self.chunk(0, queries, ChunkRows(0, 2, 0, torch.zeros(1, dtype=torch.int64)))

    def decode(self, layer: int, queries: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        """Compute attention of `queries` [rows, heads, dim] over the first `lengths` int32 [rows]
        tokens of the blocks in `tables` int32 [rows, width]. Returns queries' shape."""
        queries = queries.contiguous()
        out = torch.full_like(queries, torch.nan)  # the result of a job without memory
        take_threads()
        _decode(
            self._slabs.of(layer),
            queries.data_ptr(),
            queries.shape[1],
            self._dim,
            tables.numpy(),
            lengths.numpy(),
            self._spec.windows[layer],
            np.float32(self._spec.scale),
            np.float32(self._spec.soft_cap),
            out.data_ptr(),
        )
        return out

    def chunk(self, layer: int, queries: Tensor, chunk: ChunkRows) -> Tensor:
        """Compute attention of one slice's `queries` [tokens, heads, dim]."""
        end, window = chunk.start + len(queries), self._spec.windows[layer]
        skipped = max(0, chunk.start + 1 - window) // COLUMNS if window else 0
        tiles, dim = -(-end // COLUMNS) - skipped, self._dim
        keys = np.empty((self._kv_heads, tiles, dim // 2, COLUMNS), dtype=np.uint32)
        shape = (self._kv_heads, dim // COLUMNS, tiles * COLUMNS // 2, COLUMNS)
        values = np.empty(shape, dtype=np.uint32)
        take_threads()
        _pack(
            self._slabs.of(layer),
            chunk.blocks.numpy(),
            skipped * COLUMNS,
            end,
            keys,
            values,
        )
        return attend_packed(self._spec, layer, queries, chunk.start, (keys, values, skipped))


def _read_scales(codes, given, job, found):  # type: ignore[no-untyped-def] # numba infers types
    """Read the scales of the keys and values of a job's tiles into float32 `found` [2, tokens]."""
    _, words, floating, _, first_scale, size = codes
    stretch = np.float32(256.0 if floating else 1.0)
    for number in range(found.shape[1] // TOKENS):
        block, head, slot = tile_position(job, number, *given)
        for side in range(2):
            at = first_scale + slot + side * size
            for t in range(TOKENS):
                scale = words[block, head, at + t]
                found[side, number * TOKENS + t] = scale * stretch


def _walk(  # type: ignore[no-untyped-def] # numba infers types
    codes,  # from `Slabs.of`
    queries,  # address of bfloat16 [rows, heads, dim]
    heads,
    dim,
    tables,  # int32 [rows, width]
    lengths,  # int32 [rows]
    window,  # tokens; 0: all
    scale,
    soft_cap,  # 0: none
    out,  # address of bfloat16 [rows, heads, dim]
):
    """Compute decode rows, with one job per row and KV head. While a job uses its last tiles, it
    prefetches the next job's first ones; while it uses its keys, the next job's scales, which are
    scattered over cache lines."""
    slabs, words, floating, first_row, first_scale, size = codes
    kv_heads = slabs.shape[1]
    by_block, by_head, _ = slabs.strides  # blocks may hold other slabs between these
    group, by_pair = heads // kv_heads, size * dim
    rows_at, scales_at = slabs.ctypes.data + first_row * dim, words.ctypes.data + first_scale * 4
    given = (kv_heads, size, tables, lengths, window)
    for job in numba.prange(lengths.shape[0] * kv_heads):
        row, head = job // kv_heads, job % kv_heads
        offset = (row * heads + head * group) * dim * 2
        length = lengths[row]
        first = max(0, length - window) if window else 0
        skip = first // TOKENS * TOKENS
        count = (length + TOKENS - 1) // TOKENS - skip // TOKENS
        width = count * TOKENS
        weights = np.empty((group, width), dtype=np.float32)
        sizes = np.empty((2, width), dtype=np.float32)  # scales of keys and values
        mixed = np.zeros((group, dim), dtype=np.float32)
        tiles = np.empty(count + _TILES_AHEAD, dtype=np.int64)
        for number in range(count + _TILES_AHEAD):  # the last are the next job's
            block, slab, slot = tile_position(job + number // count, number % count, *given)
            tiles[number] = rows_at + block * by_block + slab * by_head + slot * dim
        _scales(codes, given, job, sizes)
        for number in range(count):
            block, slab, slot = tile_position(job + 1, number, *given)
            scale_at = scales_at + block * by_block + slab * by_head + slot * 4
            fetch(scale_at)
            fetch(scale_at + size * 4)
            ahead = number + _TILES_AHEAD
            later = tiles[ahead] if ahead < count else tiles[min(ahead - count, number)] + by_pair
            _score_tile(floating, queries + offset, tiles[number], dim, later, weights, number)
        for g in range(group):
            weights[g] *= sizes[0]
            total = weigh(weights[g], first - skip, length - skip, scale, soft_cap)
            for t in range(first - skip, length - skip):
                weights[g, t] *= sizes[1, t] / total
        for number in range(count):
            token = max(first - skip, number * TOKENS)
            several = min(length - skip, (number + 1) * TOKENS) - token
            values = tiles[number] + by_pair + token % TOKENS * dim
            later = tiles[number + _TILES_AHEAD] + (by_pair if number + _TILES_AHEAD < count else 0)
            _add_tile(floating, weights, token, values, several, later, mixed)
        narrow(mixed.ctypes.data, out + offset, group * dim // TOKENS, np.float32(1.0))
        keep(mixed)


def _score(floating, query, keys, dim, ahead, weights, number):  # type: ignore[no-untyped-def] # numba infers types
    """Write the products of a tile's 16 keys with all queries, bfloat16 [group, dim]."""
    group, stride = weights.shape[0], weights.shape[1] * 4
    to, vectors = weights.ctypes.data + number * TOKENS * 4, dim // 32
    for g in range(0, group - 1, 2):
        at, into = query + g * dim * 2, to + g * stride
        if floating:
            _two_fp8(at, dim * 2, keys, dim, vectors, ahead, into, stride)
        else:
            _two_int8(at, dim * 2, keys, dim, vectors, ahead, into, stride)
    if group % 2:
        at, into = query + (group - 1) * dim * 2, to + (group - 1) * stride
        if floating:
            _one_fp8(at, dim * 2, keys, dim, vectors, ahead, into, stride)
        else:
            _one_int8(at, dim * 2, keys, dim, vectors, ahead, into, stride)


def _add(floating, weights, index, values, count, ahead, mixed):  # type: ignore[no-untyped-def] # numba infers types
    """Add the values of a tile, which are codes, to `mixed`, by their weights."""
    group, dim = mixed.shape
    into, stride = mixed.ctypes.data, weights.shape[1] * 4
    at = weights.ctypes.data + index * 4
    for d in range(0, dim, COLUMNS):
        value, later = values + d, ahead + d * TOKENS
        for g in range(0, group - 1, 2):
            to, weight = into + (g * dim + d) * 4, at + g * stride
            if floating:
                _mix_two_fp8(weight, stride, value, dim, count, later, to, dim * 4)
            else:
                _mix_two_int8(weight, stride, value, dim, count, later, to, dim * 4)
        if group % 2:
            to, weight = into + ((group - 1) * dim + d) * 4, at + (group - 1) * stride
            if floating:
                _mix_one_fp8(weight, stride, value, dim, count, later, to, dim * 4)
            else:
                _mix_one_int8(weight, stride, value, dim, count, later, to, dim * 4)


def _pack_walk(  # type: ignore[no-untyped-def] # numba infers types
    codes,  # from `Slabs.of`
    blocks,  # int64 [blocks of the sequence]
    skipped,  # tokens before the first packed one
    end,  # tokens
    keys,  # uint32 [kv_heads, tiles, dim / 2, 64 tokens]: two adjacent numbers of a token
    values,  # uint32 [kv_heads, dim / 64, tokens / 2, 64]: a number of two adjacent tokens
):
    """Pack keys and values for `tile`; tokens beyond `end` become zeros."""
    slabs, words, floating, first_row, first_scale, size = codes
    kv_heads, tiles, pairs, columns = keys.shape
    dim = 2 * pairs
    for job in numba.prange(kv_heads * tiles):
        head, number = job // tiles, job % tiles
        rows = np.zeros((2, columns, dim), dtype=np.uint32)  # bits of bfloat16, keys and values
        for token in range(min(columns, end - skipped - number * columns)):
            position = skipped + number * columns + token
            block, slot = blocks[position // size], position % size
            for side in range(2):
                row = slot + side * size
                given = slabs[block, head, (first_row + row) * dim : (first_row + row + 1) * dim]
                into = rows[side, token]
                decode_row(given, words[block, head, first_scale + row], floating, into)
                for i in range(dim):
                    odd = into[i] >> np.uint32(16) & np.uint32(1)
                    into[i] = into[i] + np.uint32(0x7FFF) + odd >> np.uint32(16)
        for pair in range(pairs):
            for token in range(columns):
                low, high = rows[0, token, 2 * pair], rows[0, token, 2 * pair + 1]
                keys[head, number, pair, token] = low | high << np.uint32(16)
        for token in range(0, columns, 2):
            row = (number * columns + token) // 2
            for d in range(dim):
                low, high = rows[1, token, d], rows[1, token + 1, d]
                values[head, d // 64, row, d % 64] = low | high << np.uint32(16)


_one_int8, _two_int8 = code_scores(1, "int8"), code_scores(2, "int8")
_one_fp8, _two_fp8 = code_scores(1, "fp8"), code_scores(2, "fp8")
_mix_one_int8, _mix_two_int8 = mix(1, "int8"), mix(2, "int8")
_mix_one_fp8, _mix_two_fp8 = mix(1, "fp8"), mix(2, "fp8")
_score_tile, _add_tile = compiled(_score), compiled(_add)
_scales = compiled(_read_scales)
_decode = compiled(_walk, parallel=True)
_pack = compiled(_pack_walk, parallel=True)
