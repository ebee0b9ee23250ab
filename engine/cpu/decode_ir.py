"""Decode attention in LLVM code beyond `softmax_ir`: pairs of queries, rounding, prefetching.

Addresses and strides are int64, in bytes. The module knows no model and keeps no state.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped] # numba's own compiler
from numba.core import types

from baton.engine.cpu.dot_bf16 import (
    FLOATS,
    I64,
    LANES,
    PAIRS,
    dot,
    load,
    narrowed,
    prefetch,
    store,
)
from baton.engine.cpu.softmax_ir import TOKENS, emitted, lanes, loop, spread, transposed_sums


@emitted
def scores_of_two(  # type: ignore[no-untyped-def] # numba infers types
    context, query, query_stride, keys, token_stride, vectors, ahead, out, out_stride
):
    """Compute `scores` of two queries, a stride apart, into two rows of `out`. Each key is read
    once, and the same lines are prefetched. The bits equal those of two calls of `scores`."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        query, query_stride, keys, token_stride, vectors, ahead, out, out_stride = values
        second, second_out = builder.add(query, query_stride), builder.add(out, out_stride)
        zero = ir.Constant(FLOATS, [0.0] * LANES)
        half = TOKENS // 2  # 16 sums and two queries in registers

        def body(step: Any, sums: list[Any]) -> list[Any]:
            offset = builder.mul(step, I64(64))
            parts = [load(builder, builder.add(q, offset), 0, PAIRS) for q in (query, second)]
            at = builder.add(keys, offset)
            later = builder.add(ahead, builder.mul(offset, I64(half)))
            found = list(sums)
            for token in range(half):
                key = load(builder, at, 0, PAIRS)
                prefetch(builder, later, 1, level=1)
                for index, part in ((token, parts[0]), (token + half, parts[1])):
                    found[index] = dot(builder, sums[index], part, key)
                at, later = builder.add(at, token_stride), builder.add(later, I64(64))
            return found

        skipped = builder.mul(token_stride, I64(half))
        fetched = builder.mul(vectors, I64(64 * half))
        for index in range(2):
            found = transposed_sums(builder, loop(builder, vectors, [zero] * TOKENS, body))
            store(builder, lanes(builder, found, range(half)), out, 4 * half * index)
            rest = lanes(builder, found, range(half, TOKENS))
            store(builder, rest, second_out, 4 * half * index)
            keys, ahead = builder.add(keys, skipped), builder.add(ahead, fetched)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate


@emitted
def fetch(context, address):  # type: ignore[no-untyped-def] # numba infers types
    """Prefetch the cache line at `address`, which may be invalid, into the second-level cache."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        prefetch(builder, values[0], 1)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@emitted
def narrow_mixed(context, at, out, parts, factor):  # type: ignore[no-untyped-def] # numba infers types
    """Same as `narrow`, for 32 * `parts` numbers in the order of `mix`; writes them in ascending
    order."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        at, out, parts, factor = values
        factor = spread(builder, factor)

        def body(step: Any, _: list[Any]) -> list[Any]:
            address = builder.add(at, builder.mul(step, I64(128)))
            halves = [builder.fmul(load(builder, address, of, FLOATS), factor) for of in (0, 64)]
            even, odd = (narrowed(builder, half) for half in halves)
            zipped = [lane for pair in zip(range(16), range(16, 32), strict=True) for lane in pair]
            ordered = lanes(builder, even, zipped, odd)
            store(builder, ordered, builder.add(out, builder.mul(step, I64(64))))
            return []

        loop(builder, parts, [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32), generate
