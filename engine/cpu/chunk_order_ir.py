"""Scores and weighted sums of values in the order of `tile_bf16.tile`, as LLVM code for Numba.

In `tile`, a score is one sum over pairs of numbers, and a result one sum over pairs of tokens,
from packed keys and values. The functions here read keys and values in the layout of the pool:
they transpose 16 keys and pair the values of two tokens in registers. Addresses and strides are
int64, in bytes. The module knows no pool and no model and keeps no state.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped] # numba's own compiler
from numba.core import types
from numba.extending import intrinsic

from baton.engine.cpu.dot_bf16 import (
    COLUMNS,
    FLOATS,
    I32,
    I64,
    LANES,
    PAIRS,
    dot,
    load,
    narrowed,
    prefetch,
    splat,
    store,
)
from baton.engine.cpu.softmax_ir import TOKENS, by_count, loop

MAX_QUERIES = 4  # of a KV head at once: their sums and 16 keys fill the registers
_COUNTS = range(1, MAX_QUERIES + 1)
_WORDS = ir.VectorType(I32, LANES)
_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)
_PARTS = COLUMNS // LANES


def _scores(  # type: ignore[no-untyped-def] # numba infers types
    _typing, queries, query, query_stride, keys, token_stride, vectors, ahead, out, out_stride
):
    """Set out[q, t] = sum over pairs of d, in order, of query[q, d] * keys[t, d]: float32, for 1 to
    4 `queries`, 16 tokens, d below 32 * `vectors`. At the same time, prefetch as many cache lines
    from the address `ahead` on as `softmax_ir.scores`."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        queries, query, query_stride, keys, token_stride, vectors, ahead, out, out_stride = given

        def emit(count: int) -> None:
            rows = [builder.add(query, builder.mul(query_stride, I64(q))) for q in range(count)]

            def body(step: Any, carried: list[Any]) -> list[Any]:
                sums = list(carried)
                offset = builder.mul(step, I64(64))
                at = builder.add(keys, offset)
                later = builder.add(ahead, builder.mul(offset, I64(TOKENS)))
                words = []
                for _ in range(TOKENS):
                    words.append(load(builder, at, 0, _WORDS))
                    prefetch(builder, later, 1, level=1)
                    at, later = builder.add(at, token_stride), builder.add(later, I64(64))
                for pair, column in enumerate(_transposed(builder, words)):
                    both = builder.bitcast(column, PAIRS)
                    for q, row in enumerate(rows):
                        part = splat(builder, builder.add(row, builder.add(offset, I64(4 * pair))))
                        sums[q] = dot(builder, sums[q], part, both)
                return sums

            zero = ir.Constant(FLOATS, [0.0] * LANES)
            for q, total in enumerate(loop(builder, vectors, [zero] * count, body)):
                store(builder, total, builder.add(out, builder.mul(out_stride, I64(q))))

        by_count(builder, queries, _COUNTS, emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


def _mix(  # type: ignore[no-untyped-def] # numba infers types
    _typing,
    queries,
    weights,
    weights_stride,
    values,
    token_stride,
    tokens,
    zeros,
    ahead,
    sums,
    sums_stride,
):
    """Add to sums[q, d] the sum over pairs of t, in order, of weights[q, t] * values[t, d], for 1
    to 4 `queries` and 64 numbers d; weights and values are bfloat16, sums float32 in the order
    that `finish` reads. The last of an odd number of values is paired with `zeros`. For each pair,
    four cache lines are prefetched in sequence from the address `ahead` on."""

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        queries, weights, weights_stride, values, stride, tokens, zeros, ahead, *to = given
        pairs = builder.ashr(builder.add(tokens, I64(1)), I64(1))

        def emit(count: int) -> None:
            rows = [builder.add(weights, builder.mul(weights_stride, I64(q))) for q in range(count)]
            addresses = [builder.add(to[0], builder.mul(to[1], I64(q))) for q in range(count)]
            starts = [load(builder, at, 64 * part, FLOATS) for at in addresses for part in range(4)]

            def body(pair: Any, carried: list[Any]) -> list[Any]:
                totals, token = list(carried), builder.shl(pair, I64(1))
                offset, after = builder.mul(token, stride), builder.add(token, I64(1))
                even, later = builder.add(values, offset), builder.mul(pair, I64(256))
                there = builder.icmp_signed("<", after, tokens)
                odd = builder.select(there, builder.add(even, stride), zeros)
                prefetch(builder, builder.add(ahead, later), 4, level=1)
                columns = [c for half in (0, 64) for c in _interleaved(builder, even, odd, half)]
                for q, row in enumerate(rows):
                    both = splat(builder, builder.add(row, builder.shl(pair, I64(2))))
                    for part, column in enumerate(columns):
                        index = _PARTS * q + part
                        totals[index] = dot(builder, totals[index], both, column)
                return totals

            for index, total in enumerate(loop(builder, pairs, starts, body)):
                store(builder, total, addresses[index // _PARTS], 64 * (index % _PARTS))

        by_count(builder, queries, _COUNTS, emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), generate


def _finish(_typing, sums, out):  # type: ignore[no-untyped-def] # numba infers types
    """Round 64 sums of `mix_in_order` to bfloat16 and restore the order of their numbers."""
    first = [*range(4), *range(16, 20), *range(4, 8), *range(20, 24)]

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        sums, out = given
        for half in range(2):
            low, high = (load(builder, sums, 128 * half + 64 * n, FLOATS) for n in range(2))
            for part in range(2):
                order = ir.Constant(_WORDS, [index + 8 * part for index in first])
                ordered = builder.shuffle_vector(low, high, order)
                rounded = narrowed(builder, ordered)
                store(builder, rounded, out, 64 * half + 32 * part)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose 16 rows of 16 words: swap pairs of words, then pairs of pairs, then quarters. A
    vector has four quarters of four words."""

    def shuffled(left: Any, right: Any, indices: list[int]) -> Any:
        return builder.shuffle_vector(left, right, ir.Constant(_WORDS, indices))

    def quarters(one: int, other: int, third: int, fourth: int) -> list[int]:
        return [4 * quarter + n for quarter in (one, other, third, fourth) for n in range(4)]

    words = [[4 * q + n + 16 * side for q in range(4) for n in at for side in (0, 1)]
             for at in ((0, 1), (2, 3))]  # fmt: skip
    pairs = [[4 * q + n + 16 * side for q in range(4) for side in (0, 1) for n in at]
             for at in ((0, 1), (2, 3))]  # fmt: skip
    columns: list[Any] = [None] * LANES
    fours = []  # [4 k + j]: in quarter q, the words of rows 4 k to 4 k + 3 in column 4 q + j
    for first in range(0, LANES, 4):
        a, b, c, d = rows[first : first + 4]
        twos = [shuffled(*both, indices) for indices in words for both in ((a, b), (c, d))]
        for one, other in (twos[:2], twos[2:]):
            fours += [shuffled(one, other, indices) for indices in pairs]
    even, odd = quarters(0, 2, 4, 6), quarters(1, 3, 5, 7)
    for j in range(4):
        a, b, c, d = fours[j::4]
        for parity, indices in ((0, even), (1, odd)):
            left, right = shuffled(a, b, indices), shuffled(c, d, indices)
            columns[4 * parity + j] = shuffled(left, right, even)
            columns[4 * (parity + 2) + j] = shuffled(left, right, odd)
    return columns


def _interleaved(builder: Any, even: Any, odd: Any, offset: int) -> tuple[Any, Any]:
    """Interleave 32 numbers of two tokens: of each 8 numbers the first 4, then the others."""
    one, other = (load(builder, at, offset, _HALVES) for at in (even, odd))
    found = []
    for start in (0, 4):
        indices = [8 * q + start + n + 32 * side for q in range(4) for n in range(4)
                  for side in (0, 1)]  # fmt: skip
        order = ir.Constant(ir.VectorType(I32, 2 * LANES), indices)
        found.append(builder.bitcast(builder.shuffle_vector(one, other, order), PAIRS))
    return found[0], found[1]


scores_in_order: Any = intrinsic(_scores)
mix_in_order: Any = intrinsic(_mix)
finish: Any = intrinsic(_finish)
