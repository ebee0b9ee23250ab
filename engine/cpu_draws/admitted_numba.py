"""Passes over the logits of one row, all or those that a grammar admits, compiled. Needs numba.

    logits    0.3   2.1  -1.0   0.7  ..
    bits        1     0     1     0  ..     eight tokens a byte, lowest first
    read as   0.3  -inf  -1.0  -inf  ..

A mask is uint8, a bit for each token, at least as long as the row; one of no bytes admits all. A
masked pass costs little more than a plain one and writes to no logits: it reads the bits beside
them, as vectors of 16, on any processor. Addresses are int64. Called by compiled functions alone.
Keeps no state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped] # numba's own compiler
from numba.core import types

from baton.engine.cpu.compiled import inner
from baton.engine.cpu.dot_bf16 import FLOATS, I64, LANES, call, load, store
from baton.engine.cpu.softmax_ir import emitted, every, highest, loop, spread

BLOCK = 2048  # numbers of one pass that stay in the first cache; whole vectors and bytes of a mask
_BITS = ir.IntType(LANES)  # of one vector
_CHOICE = ir.VectorType(ir.IntType(1), LANES)


@emitted
def highest_admitted(context, at, bits, vectors):  # type: ignore[no-untyped-def] # numba infers types
    """`softmax_ir.highest` of those numbers whose bit is set."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        at, bits, vectors = values

        def body(step: Any, best: list[Any]) -> list[Any]:
            value = _admitted(builder, _numbers(builder, at, step), bits, step)
            above = builder.fcmp_ordered(">", value, best[0])
            return [builder.select(above, value, best[0])]

        (best,) = loop(builder, vectors, [every(float("-inf"))], body)
        kind = ir.FunctionType(ir.FloatType(), [FLOATS])
        return call(builder, "llvm.vector.reduce.fmax.v16f32", kind, [best])

    return types.float32(types.int64, types.int64, types.int64), generate


@emitted
def scale_admitted(context, at, bits, out, vectors, factor):  # type: ignore[no-untyped-def] # numba infers types
    """out = numbers * `factor` + 0, or minus infinity where the bit is not set."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        at, bits, out, vectors, factor = values
        factors = spread(builder, factor)

        def body(step: Any, _carried: list[Any]) -> list[Any]:
            value = builder.fmul(_numbers(builder, at, step), factors)
            value = builder.fadd(value, every(0.0))
            found = _admitted(builder, value, bits, step)
            store(builder, found, builder.add(out, builder.mul(step, I64(4 * LANES))))
            return []

        loop(builder, vectors, [], body)
        return context.get_dummy_value()

    kinds = types.int64, types.int64, types.int64, types.int64, types.float32
    return types.void(*kinds), generate


def _numbers(builder: Any, at: Any, step: Any) -> Any:
    return load(builder, builder.add(at, builder.mul(step, I64(4 * LANES))), 0, FLOATS)


def _admitted(builder: Any, value: Any, bits: Any, step: Any) -> Any:
    word = load(builder, builder.add(bits, builder.mul(step, I64(LANES // 8))), 0, _BITS)
    return builder.select(builder.bitcast(word, _CHOICE), value, every(float("-inf")))


@inner
def admits(mask, token):  # type: ignore[no-untyped-def] # numba infers types
    """Whether the mask admits the token."""
    return len(mask) == 0 or (mask[token >> 3] >> np.uint8(token & 7)) & np.uint8(1) != np.uint8(0)


@inner
def best_index(x, mask):  # type: ignore[no-untyped-def] # numba infers types
    """The token of the highest logit that is admitted, the lowest of equals; 0 if none is."""
    best, at = np.float32(-np.inf), 0
    for first in range(0, len(x), BLOCK):
        found = _highest_part(x[first : first + BLOCK], mask, first)
        if found > best:
            best, at = found, first
    for token in range(at, len(x)):
        if x[token] == best and admits(mask, token):
            return token
    return 0


@inner
def _highest_part(part, mask, first):  # type: ignore[no-untyped-def] # numba infers types
    best, vectors = np.float32(-np.inf), len(part) // LANES
    if vectors and len(mask):
        best = highest_admitted(part.ctypes.data, mask.ctypes.data + first // 8, vectors)
    elif vectors:
        best = highest(part.ctypes.data, vectors)
    for index in range(vectors * LANES, len(part)):
        if part[index] > best and admits(mask, first + index):
            best = part[index]
    return best


@inner
def scale_part(part, mask, first, inverse, out):  # type: ignore[no-untyped-def] # numba infers types
    """Write the logits of the tokens from `first` on over the temperature, minus infinity for those
    not admitted. Minus zero becomes zero, so that equals have one key."""
    if len(mask) == 0:
        for i in range(len(part)):
            out[i] = part[i] * inverse + np.float32(0.0)
        return
    vectors = len(part) // LANES
    if vectors:
        bits = mask.ctypes.data + first // 8
        scale_admitted(part.ctypes.data, bits, out.ctypes.data, vectors, inverse)
    for i in range(vectors * LANES, len(part)):
        scaled = part[i] * inverse + np.float32(0.0)
        out[i] = scaled if admits(mask, first + i) else np.float32(-np.inf)
