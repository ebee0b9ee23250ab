"""Softmax attention in vectors of 16, as LLVM code for Numba.

The functions compute scores of one query and 16 keys, exponentials, weighted sums of values, and
rounding to bfloat16. Numba would compile them number by number, so they are emitted as LLVM
instructions. Addresses and strides are int64, in bytes. The module knows no model and keeps no
state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from llvmlite import ir  # type: ignore[import-untyped] # numba's own compiler
from numba.core import types
from numba.extending import intrinsic

from baton.engine.cpu.dot_bf16 import (
    FLOATS,
    FUSED,
    I32,
    I64,
    LANES,
    PAIRS,
    call,
    dot,
    load,
    narrowed,
    prefetch,
    store,
)

Codes = Literal["int8", "fp8"]

TOKENS = LANES  # of one call of `scores`
_FLOAT = ir.FloatType()
_WORDS = ir.VectorType(I32, LANES)
_UNARY = ir.FunctionType(FLOATS, [FLOATS])
_LOWEST = -126.0  # exponent of two; smaller weights are 0
_HIGHEST = 127.0
_TERMS = 7  # of the series of 2^f for |f| <= 1/2: an error below 1e-8


def emitted(function: Callable[..., Any]) -> Any:
    """Wrap numba's `intrinsic` for mypy, which would take the decorated function for a call."""
    return intrinsic(function)


@emitted
def scores(  # type: ignore[no-untyped-def] # numba infers types
    context, query, keys, token_stride, vectors, ahead, out
):
    """Set out[t] = sum over d of query[d] * keys[t, d], float32 [16], for d below 32 * `vectors`.
    At the same time, prefetch as many cache lines as the keys have, in sequence from the address
    `ahead` on, which was faster than the order in which keys are used."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        query, keys, token_stride, vectors, ahead, out = values
        zero = ir.Constant(FLOATS, [0.0] * LANES)

        def body(step: Any, sums: list[Any]) -> list[Any]:
            offset = builder.mul(step, I64(64))
            part = load(builder, builder.add(query, offset), 0, PAIRS)
            at = builder.add(keys, offset)
            later = builder.add(ahead, builder.mul(offset, I64(TOKENS)))
            found = []
            for total in sums:
                found.append(dot(builder, total, part, load(builder, at, 0, PAIRS)))
                prefetch(builder, later, 1)
                at, later = builder.add(at, token_stride), builder.add(later, I64(64))
            return found

        store(builder, transposed_sums(builder, loop(builder, vectors, [zero] * TOKENS, body)), out)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@emitted
def highest(context, at, vectors):  # type: ignore[no-untyped-def] # numba infers types
    """Return the highest of 16 * `vectors` float32 numbers."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        at, vectors = values
        start = ir.Constant(FLOATS, [-math.inf] * LANES)

        def body(step: Any, best: list[Any]) -> list[Any]:
            value = load(builder, builder.add(at, builder.mul(step, I64(64))), 0, FLOATS)
            above = builder.fcmp_ordered(">", value, best[0])
            return [builder.select(above, value, best[0])]

        (best,) = loop(builder, vectors, [start], body)
        kind = ir.FunctionType(_FLOAT, [FLOATS])
        return call(builder, "llvm.vector.reduce.fmax.v16f32", kind, [best])

    return types.float32(types.int64, types.int64), generate


@emitted
def exponentials(context, at, vectors, best, scale):  # type: ignore[no-untyped-def] # numba infers types
    """Replace 16 * `vectors` float32 numbers x by exp((x - best) * scale); return their sum.
    Minus infinity becomes 0; NaN stays NaN."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        at, vectors, best, scale = values
        best = spread(builder, best)
        scale = spread(builder, builder.fmul(scale, ir.Constant(_FLOAT, 1 / math.log(2))))

        def body(step: Any, total: list[Any]) -> list[Any]:
            address = builder.add(at, builder.mul(step, I64(64)))
            value = load(builder, address, 0, FLOATS)
            power = power_of_two(builder, builder.fmul(builder.fsub(value, best), scale))
            store(builder, power, address)
            return [builder.fadd(total[0], power)]

        (total,) = loop(builder, vectors, [ir.Constant(FLOATS, [0.0] * LANES)], body)
        return lanes_sum(builder, total)

    return types.float32(types.int64, types.int64, types.float32, types.float32), generate


@emitted
def narrow(context, at, out, vectors, factor):  # type: ignore[no-untyped-def] # numba infers types
    """Set out[i] = bfloat16(x[i] * factor) for 16 * `vectors` float32 numbers x."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        at, out, vectors, factor = values
        factor = spread(builder, factor)

        def body(step: Any, _: list[Any]) -> list[Any]:
            value = load(builder, builder.add(at, builder.mul(step, I64(64))), 0, FLOATS)
            rounded = narrowed(builder, builder.fmul(value, factor))
            store(builder, rounded, builder.add(out, builder.mul(step, I64(32))))
            return []

        loop(builder, vectors, [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32), generate


def code_scores(queries: int, stored: Codes) -> Any:
    """Return a Numba function (query, query_stride, keys, token_stride, vectors, ahead, out,
    out_stride) that sets

        out[q, t] = sum over d of query[q, d] * keys[t, d]

    like `scores`, for one or two queries and keys that are codes: int8, or FP8 times 2^-8. It
    prefetches as many bytes as the keys have, line by line, from the address `ahead` on.
    """
    together = TOKENS // queries  # tokens with sums in registers

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        query, query_stride, keys, token_stride, vectors, ahead, out, out_stride = values
        zero = ir.Constant(FLOATS, [0.0] * LANES)
        for first in range(0, TOKENS, together):

            def body(step: Any, sums: list[Any], first: int = first) -> list[Any]:
                parts = []
                for q in range(queries):
                    at = builder.add(query, builder.mul(query_stride, I64(q)))
                    parts.append(
                        load(builder, builder.add(at, builder.mul(step, I64(64))), 0, PAIRS)
                    )
                at = builder.add(keys, builder.mul(step, I64(32)))
                later = builder.add(ahead, builder.mul(step, I64(32 * TOKENS)))
                found = list(sums)
                for t in range(together):
                    address = builder.add(at, builder.mul(token_stride, I64(first + t)))
                    key = narrowed(builder, _numbers(builder, address, 2 * LANES, stored))
                    for q in range(queries):
                        n = q * together + t
                        found[n] = dot(builder, sums[n], parts[q], key)
                    if t % 2:  # a line has two tokens' 32 codes each
                        prefetch(builder, builder.add(later, I64(32 * (first + t - 1))), 1, level=1)
                return found

            sums = transposed_sums(builder, loop(builder, vectors, [zero] * TOKENS, body))
            for q in range(queries):
                part = lanes(builder, sums, range(q * together, (q + 1) * together))
                store(builder, part, builder.add(out, builder.mul(out_stride, I64(q))), 4 * first)
        return context.get_dummy_value()

    def scored(  # type: ignore[no-untyped-def] # numba infers types
        context, query, query_stride, keys, token_stride, vectors, ahead, out, out_stride
    ):
        return types.void(*[types.int64] * 8), generate

    return intrinsic(scored)


def mix(queries: int, stored: Codes | Literal["bfloat16"] = "bfloat16") -> Any:
    """Return a Numba function (weights, weights_stride, values, token_stride, tokens, ahead, out,
    out_stride) that computes

        out[q, d] += sum over t of weights[q, t] * values[t, d]

    for this number of queries and 64 numbers d: weights and out are float32, values bfloat16. Of
    each 32 in out, the 16 with an even d come first, then those with an odd d; for values that are
    codes (FP8 times 2^-8) the order stays. For each token, it prefetches as many cache lines as a
    token's numbers have, one or two, in sequence from the address `ahead` on.
    """
    lines = 2 if stored == "bfloat16" else 1

    def generate(context: Any, builder: Any, _signature: Any, given: Any) -> Any:
        weights, weights_stride, values, token_stride, tokens, ahead, out, out_stride = given
        rows = [builder.add(out, builder.mul(out_stride, I64(q))) for q in range(queries)]
        starts = [load(builder, row, 64 * part, FLOATS) for row in rows for part in range(4)]

        def body(token: Any, sums: list[Any]) -> list[Any]:
            at = builder.add(values, builder.mul(token, token_stride))
            later = builder.add(ahead, builder.mul(token, I64(64 * lines)))
            prefetch(builder, later, lines, level=1)
            if stored == "bfloat16":
                parts = [p for half in (0, 64) for p in _widened(builder, at, half)]
            else:
                addresses = [builder.add(at, I64(LANES * part)) for part in range(4)]
                parts = [_numbers(builder, address, LANES, stored) for address in addresses]
            found = []
            for q in range(queries):
                address = builder.add(weights, builder.mul(weights_stride, I64(q)))
                address = builder.add(address, builder.mul(token, I64(4)))
                weight = spread(builder, load(builder, address, 0, _FLOAT))
                found += [
                    call(builder, "llvm.fma.v16f32", FUSED, [weight, part, sums[4 * q + i]])
                    for i, part in enumerate(parts)
                ]
            return found

        sums = loop(builder, tokens, starts, body)
        for index, value in enumerate(sums):
            store(builder, value, rows[index // 4], 64 * (index % 4))
        return context.get_dummy_value()

    def mixed(  # type: ignore[no-untyped-def] # numba infers types
        context, weights, weights_stride, values, token_stride, tokens, ahead, out, out_stride
    ):
        return types.void(*[types.int64] * 8), generate

    return intrinsic(mixed)


def loop(
    builder: Any, count: Any, starts: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """Emit `body(step, carried)` for steps 0 to `count` - 1; `count` is at least 1."""
    before, loop, after = builder.block, *(builder.append_basic_block(n) for n in ("loop", "end"))
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(I64)
    step.add_incoming(I64(0), before)
    carried = [builder.phi(start.type) for start in starts]
    for phi, start in zip(carried, starts, strict=True):
        phi.add_incoming(start, before)
    found = body(step, carried)
    following = builder.add(step, I64(1))
    step.add_incoming(following, builder.block)
    for phi, value in zip(carried, found, strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    builder.position_at_end(after)
    return found


def by_count(builder: Any, value: Any, counts: range, emit: Callable[[int], None]) -> None:
    """Emit `emit(count)` for each of `counts`; at run time, `value` selects one."""
    done = builder.append_basic_block("done")
    choice = builder.switch(value, done)
    for count in counts:
        case = builder.append_basic_block(f"count{count}")
        choice.add_case(I64(count), case)
        builder.position_at_end(case)
        emit(count)
        builder.branch(done)
    builder.position_at_end(done)


def transposed_sums(builder: Any, sums: list[Any]) -> Any:
    """Return a vector whose 16 lanes are the sums of 16 vectors."""
    while len(sums) > 1:  # two vectors become one
        sums = [_add_neighbours(builder, *sums[i : i + 2]) for i in range(0, len(sums), 2)]
    return sums[0]


def lanes(builder: Any, value: Any, indices: Sequence[int], other: Any = None) -> Any:
    """Return these lanes of `value`, followed by `other`."""
    mask = ir.Constant(ir.VectorType(I32, len(indices)), list(indices))
    return builder.shuffle_vector(value, value if other is None else other, mask)


def _add_neighbours(builder: Any, left: Any, right: Any) -> Any:
    """Return [l0 + l1, l2 + l3, ..., r0 + r1, ...]."""
    even, odd = (
        builder.shuffle_vector(left, right, ir.Constant(_WORDS, list(range(first, 32, 2))))
        for first in (0, 1)
    )
    return builder.fadd(even, odd)


def lanes_sum(builder: Any, value: Any) -> Any:
    """Return the sum of 16 floats."""
    for _ in range(4):  # sixteen lanes, eight, four, two, one
        value = _add_neighbours(builder, value, value)
    return builder.extract_element(value, I32(0))


def power_of_two(builder: Any, power: Any) -> Any:
    """Return 2^x, at most 2^127: a series for the fraction; the integer part becomes the exponent.
    NaN stays NaN."""
    small = builder.fcmp_ordered("<", power, every(_LOWEST))
    # NaN is neither, and must not reach the conversion to an integer.
    above = builder.fcmp_ordered(">", power, every(_LOWEST))
    below = builder.fcmp_ordered("<", power, every(_HIGHEST))
    kept = builder.select(above, power, every(_LOWEST))
    kept = builder.select(below, kept, every(_HIGHEST))
    whole = call(builder, "llvm.roundeven.v16f32", _UNARY, [kept])
    rest = builder.fsub(kept, whole)
    value = every(math.log(2) ** _TERMS / math.factorial(_TERMS))
    for term in range(_TERMS - 1, -1, -1):
        constant = every(math.log(2) ** term / math.factorial(term))
        value = call(builder, "llvm.fma.v16f32", FUSED, [value, rest, constant])
    exponent = builder.add(builder.fptosi(whole, _WORDS), ir.Constant(_WORDS, [127] * LANES))
    bits = builder.shl(exponent, ir.Constant(_WORDS, [23] * LANES))
    found = builder.fmul(value, builder.bitcast(bits, FLOATS))
    found = builder.select(small, every(0.0), found)
    return builder.select(builder.fcmp_unordered("uno", power, power), power, found)


def _widened(builder: Any, address: Any, offset: int) -> tuple[Any, Any]:
    """Load 32 bfloat16 numbers as float32: those with even indices, then those with odd ones."""
    words = load(builder, address, offset, _WORDS)
    even = builder.shl(words, ir.Constant(_WORDS, [16] * LANES))
    odd = builder.and_(words, ir.Constant(_WORDS, [0xFFFF0000] * LANES))
    return builder.bitcast(even, FLOATS), builder.bitcast(odd, FLOATS)


def _numbers(builder: Any, address: Any, count: int, stored: Codes) -> Any:
    """Load `count` codes as float32. FP8 (E4M3) is read as float16, whose exponent has one bit
    more: the result is the number times 2^-8."""
    codes = load(builder, address, 0, ir.VectorType(ir.IntType(8), count))
    wide = ir.VectorType(_FLOAT, count)
    if stored == "int8":
        return builder.sitofp(codes, wide)
    shorts = ir.VectorType(ir.IntType(16), count)
    high = builder.shl(builder.zext(codes, shorts), ir.Constant(shorts, [8] * count))
    moved = builder.ashr(high, ir.Constant(shorts, [1] * count))  # duplicates the sign
    bits = builder.and_(moved, ir.Constant(shorts, [0xBFFF] * count))
    halves = builder.bitcast(bits, ir.VectorType(ir.HalfType(), count))
    return builder.fpext(halves, wide)


def every(value: float) -> Any:
    """Return a vector of sixteen equal constants."""
    return ir.Constant(FLOATS, [value] * LANES)


def spread(builder: Any, value: Any) -> Any:
    """Return a vector of sixteen equal floats."""
    one = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), value, I32(0))
    nothing = ir.Constant(FLOATS, ir.Undefined)
    return builder.shuffle_vector(one, nothing, ir.Constant(_WORDS, [0] * LANES))
