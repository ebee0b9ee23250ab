"""Attention of decode rows over a bfloat16 pool, compiled. Needs numba.

A job is one row and one KV head. It computes the scores of 16 keys at a time, one softmax over all
scores, and the weighted sum of values in float32. While it uses a tile of 16 tokens, it prefetches
the whole next tile, or the first tile of the next job, since blocks of a few KB lie anywhere in the
pool. Threads get ranges of jobs of equal cost. The callers, `BfloatAttention` and `DecodePass`,
own all memory (`DecodeScratch`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from baton.engine.cpu.compiled import compiled
from baton.engine.cpu.decode_ir import narrow_mixed, scores_of_two
from baton.engine.cpu.dot_bf16 import COLUMNS
from baton.engine.cpu.softmax_ir import (
    TOKENS,
    exponentials,
    highest,
    mix,
    scores,
)

_TILES_AHEAD = 1  # prefetched; more are not faster
_JOB_TOKENS = 32  # a job's fixed cost, in tokens


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """The scratch memory of the threads that share a step's jobs, one part for each."""

    tiles: NDArray[np.int64]  # [parts, 2, tiles]: addresses of this job, and of the next
    weights: NDArray[np.float32]  # [parts, group, tokens]
    mixed: NDArray[np.float32]  # [parts, group, dim]


def new_scratch(parts: int, group: int, dim: int, tokens: int) -> DecodeScratch:
    """Allocate scratch memory for sequences of up to `tokens`. Raises like torch if memory runs
    out."""
    tiles = -(-tokens // TOKENS)
    return DecodeScratch(
        torch.empty(parts, 2, tiles, dtype=torch.int64).numpy(),
        torch.empty(parts, group, tiles * TOKENS).numpy(),
        torch.empty(parts, group, dim).numpy(),
    )


def _softmax(values, first, end, scale, soft_cap):  # type: ignore[no-untyped-def] # numba infers types
    """Replace the scores `first` to `end` of float32 `values` by weights, not yet divided by their
    sum, which is returned; the others become 0. The number of scores is a multiple of 16."""
    if soft_cap > 0:
        for index in range(first, end):
            values[index] = soft_cap * math.tanh(values[index] * scale / soft_cap)
        scale = np.float32(1.0)
    values[:first] = -np.inf
    values[end:] = -np.inf
    at, vectors = values.ctypes.data, values.shape[0] // TOKENS
    return exponentials(at, vectors, highest(at, vectors), scale)


def _score_keys(  # type: ignore[no-untyped-def] # numba infers types
    queries, group, dim, keys, by_token, ahead, out, out_stride
):
    """Compute scores of 16 keys for the `group` queries of a KV head; prefetch keys at `ahead`."""
    for g in range(0, group - 1, 2):
        query, to = queries + g * dim * 2, out + g * out_stride
        later = ahead if g == 0 else keys
        scores_of_two(query, dim * 2, keys, by_token, dim // 32, later, to, out_stride)
    if group % 2:
        query, to = queries + (group - 1) * dim * 2, out + (group - 1) * out_stride
        scores(query, keys, by_token, dim // 32, ahead if group == 1 else keys, to)


def _mix_tokens(  # type: ignore[no-untyped-def] # numba infers types
    weights, stride, group, dim, values, by_token, count, ahead, into
):
    """Add to float32 [group, dim] at `into` the values of `count` tokens, by float32 `weights`
    [group, ..], `stride` bytes per row; prefetch a tile at `ahead`."""
    for d in range(0, dim, COLUMNS):
        value, part = values + d * 2, ahead + d * 2 * TOKENS
        for g in range(0, group - 1, 2):
            to, later = into + (g * dim + d) * 4, part if g == 0 else values
            _mix_two(weights + g * stride, stride, value, by_token, count, later, to, dim * 4)
        if group % 2:
            g, later = group - 1, part if group == 1 else values
            to = into + (g * dim + d) * 4
            _mix_one(weights + g * stride, stride, value, by_token, count, later, to, dim * 4)


def _find_tiles(  # type: ignore[no-untyped-def] # numba infers types
    job, pool, strides, kv_heads, size, tables, lengths, window, found
):
    """Write the addresses of a job's tiles into `found`; return their number."""
    row, head, length = job // kv_heads, job % kv_heads, lengths[job // kv_heads]
    start = max(0, length - window) // TOKENS if window else 0
    end = (length + TOKENS - 1) // TOKENS
    for number in range(start, end):
        token = number * TOKENS
        at = pool + tables[row, token // size] * strides[0] + head * strides[1]
        found[number - start] = at + token % size * strides[3]
    return end - start


def _tile_position(  # type: ignore[no-untyped-def] # numba infers types
    job, number, kv_heads, size, tables, lengths, window
):
    """Return block, KV head and slot of the first token of a job's tile `number`. If the job has
    no such tile, all are 0, since the result is only used to prefetch."""
    row, head = job // kv_heads, job % kv_heads
    if row >= lengths.shape[0]:
        return 0, 0, 0
    start = max(0, lengths[row] - window) // TOKENS if window else 0
    token = (start + number) * TOKENS
    if token >= lengths[row]:
        return 0, 0, 0
    return tables[row, token // size], head, token % size


def _first_of_part(lengths, window, kv_heads, part, parts):  # type: ignore[no-untyped-def] # numba infers types
    """Return the first job of a part, where all parts have about the same cost."""
    total = 0
    for length in lengths:
        total += (min(length, window) if window else length) + _JOB_TOKENS
    target = total * kv_heads * part // parts
    passed = 0
    for row in range(lengths.shape[0]):
        cost = (min(lengths[row], window) if window else lengths[row]) + _JOB_TOKENS
        if passed + cost * kv_heads > target:
            return row * kv_heads + (target - passed + cost - 1) // cost
        passed += cost * kv_heads
    return lengths.shape[0] * kv_heads


def _attend(  # type: ignore[no-untyped-def] # numba infers types
    part,
    parts,
    pool,  # address of the layer
    strides,  # bytes from one block, KV head, k to v, token to the next
    kv_heads,
    size,  # tokens of a block
    dim,
    queries,  # address of bfloat16 [rows, heads, dim]
    heads,
    tables,  # int32 [rows, width]
    lengths,  # int32 [rows]
    window,  # tokens; 0: all
    scale,
    soft_cap,  # 0: none
    tiles,  # int64 [2, tiles]
    weights,  # float32 [group, tokens]
    mixed,  # float32 [group, dim]
    out,  # address of bfloat16 [rows, heads, dim]
):
    """Compute the jobs of one part; for `tiles`, `weights` and `mixed` see `DecodeScratch`."""
    group, by_pair, by_token = heads // kv_heads, strides[2], strides[3]
    at, stride, into = weights.ctypes.data, weights.shape[1] * 4, mixed.ctypes.data
    begin = _first(lengths, window, kv_heads, part, parts)
    end = _first(lengths, window, kv_heads, part + 1, parts)
    known = 0  # found tiles of this job
    for job in range(begin, end):
        row, head, here, after = job // kv_heads, job % kv_heads, tiles[job % 2], tiles[1 - job % 2]
        find = (pool, strides, kv_heads, size, tables, lengths, window)
        count = known if known else _find(job, *find, here)
        known = _find(job + 1, *find, after) if job + 1 < end else 0
        length = lengths[row]
        first = max(0, length - window) if window else 0
        offset = (row * heads + head * group) * dim * 2
        for number in range(count):
            ahead, to = number + _TILES_AHEAD, at + number * TOKENS * 4
            later = here[ahead] if ahead < count else here[min(ahead - count, number)] + by_pair
            _score(queries + offset, group, dim, here[number], by_token, later, to, stride)
        skip = first // TOKENS * TOKENS
        for g in range(group):
            found = weights[g, : count * TOKENS]
            found *= np.float32(1.0) / weigh(found, first - skip, length - skip, scale, soft_cap)
        mixed[:] = np.float32(0.0)
        for number in range(count):
            token = max(first - skip, number * TOKENS)
            several = min(length - skip, (number + 1) * TOKENS) - token
            values = here[number] + by_pair + token % TOKENS * by_token
            ahead, later = number + _TILES_AHEAD, here[number] + by_pair
            if ahead < count:
                later = here[ahead] + by_pair
            elif ahead - count < known:
                later = after[ahead - count]
            _mix(at + token * 4, stride, group, dim, values, by_token, several, later, into)
        narrow_mixed(into, out + offset, group * dim // 32, np.float32(1.0))


def _attend_all(  # type: ignore[no-untyped-def] # numba infers types
    pool,
    strides,
    kv_heads,
    size,
    dim,
    queries,
    heads,
    tables,
    lengths,
    window,
    scale,
    soft_cap,
    tiles,  # [parts, ...] of a `DecodeScratch`
    weights,
    mixed,
    out,
):
    """Same as `_attend`, in parts that threads share."""
    parts = tiles.shape[0]
    for part in numba.prange(parts):
        attend_part(
            part,
            parts,
            pool,
            strides,
            kv_heads,
            size,
            dim,
            queries,
            heads,
            tables,
            lengths,
            window,
            scale,
            soft_cap,
            tiles[part],
            weights[part],
            mixed[part],
            out,
        )


_mix_one, _mix_two = mix(1), mix(2)
weigh = compiled(_softmax, strict=True)  # equal bits wherever it is inlined
tile_position = compiled(_tile_position)
_score, _mix = compiled(_score_keys), compiled(_mix_tokens)
_find, _first = compiled(_find_tiles), compiled(_first_of_part)
attend_part = compiled(_attend)
attend_all = compiled(_attend_all, parallel=True)
