"""Passes over a row of logits that read a grammar's bits beside them, as vectors of 16 for Numba.

    logits    0.3   2.1  -1.0   0.7  ..
    bits        1     0     1     0  ..     eight tokens a byte, lowest first
    read as   0.3  -inf  -1.0  -inf  ..

A masked pass costs little more than a plain one and writes to no logits. Addresses are int64;
sizes count vectors of 16 numbers, at least one. Any processor can run them. Knows no draw; keeps
no state.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped] # numba's own compiler
from numba.core import types

from baton.engine.cpu.dot_bf16 import FLOATS, I64, LANES, call, load, store
from baton.engine.cpu.softmax_ir import emitted, every, loop, spread

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
