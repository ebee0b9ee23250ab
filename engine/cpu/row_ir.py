"""Passes over one row of bfloat16 numbers, as LLVM code for Numba: norm, sum, gate, rotation.

Each pass reads a row in vectors of 16, computes in float32 and writes it rounded once. None
allocates memory, so many threads may call them. Addresses are int64; sizes count vectors of 16
numbers. The module knows no model and keeps no state.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped] # numba's own compiler
from numba.core import types

from baton.engine.cpu.dot_bf16 import (
    BFLOATS,
    FLOATS,
    FUSED,
    I64,
    LANES,
    call,
    load,
    narrowed,
    store,
    widened,
)
from baton.engine.cpu.softmax_ir import (
    emitted,
    every,
    lanes_sum,
    loop,
    power_of_two,
    spread,
)

_LOG2_E = 1.4426950408889634
_ZEROS = ir.Constant(FLOATS, [0.0] * LANES)


@emitted
def squares(context, at, vectors):  # type: ignore[no-untyped-def] # numba infers types
    """Return the sum of the squares of 16 * `vectors` bfloat16 numbers, float32."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        at, vectors = values

        def body(step: Any, total: list[Any]) -> list[Any]:
            value = _wide(builder, at, step)
            return [_fused(builder, value, value, total[0])]

        return lanes_sum(builder, loop(builder, vectors, [_ZEROS], body)[0])

    return types.float32(types.int64, types.int64), generate


@emitted
def add_squares(context, left, right, out, vectors):  # type: ignore[no-untyped-def] # numba infers types
    """Write out = left + right, bfloat16; return `squares` of `out`."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        left, right, out, vectors = values

        def body(step: Any, total: list[Any]) -> list[Any]:
            both = builder.fadd(_wide(builder, left, step), _wide(builder, right, step))
            rounded = narrowed(builder, both)
            store(builder, rounded, _address(builder, out, step))
            value = widened(builder, rounded)
            return [_fused(builder, value, value, total[0])]

        return lanes_sum(builder, loop(builder, vectors, [_ZEROS], body)[0])

    return types.float32(*[types.int64] * 4), generate


@emitted
def scale(context, at, weights, out, vectors, factor):  # type: ignore[no-untyped-def] # numba infers types
    """Write out[i] = x[i] * (factor * weights[i]); x and out are bfloat16, weights float32."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        at, weights, out, vectors, factor = values
        factor = spread(builder, factor)

        def body(step: Any, _: list[Any]) -> list[Any]:
            weight = load(builder, builder.add(weights, builder.mul(step, I64(64))), 0, FLOATS)
            value = builder.fmul(_wide(builder, at, step), builder.fmul(factor, weight))
            _narrow(builder, value, out, step)
            return []

        loop(builder, vectors, [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, types.float32), generate


@emitted
def gate_row(context, gate, up, out, vectors):  # type: ignore[no-untyped-def] # numba infers types
    """Write out = gate / (1 + e^-gate) * up, all bfloat16."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        gate, up, out, vectors = values

        def body(step: Any, _: list[Any]) -> list[Any]:
            value = _wide(builder, gate, step)
            power = power_of_two(builder, builder.fmul(value, every(-_LOG2_E)))
            share = builder.fdiv(_wide(builder, up, step), builder.fadd(power, every(1.0)))
            _narrow(builder, builder.fmul(value, share), out, step)
            return []

        loop(builder, vectors, [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@emitted
def rotate_row(context, at, cos, sin, out, half):  # type: ignore[no-untyped-def] # numba infers types
    """Rotate 32 * `half` bfloat16 numbers by `cos` and `sin` (`Rotary.angles`): each number of the
    first half with the number at the same index of the second."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        at, cos, sin, out, half = values

        def body(step: Any, _: list[Any]) -> list[Any]:
            beyond = builder.add(step, half)
            low, high = _wide(builder, at, step), _wide(builder, at, beyond)
            for index, own, other in ((step, low, high), (beyond, high, low)):
                turned = builder.fmul(own, _wide(builder, cos, index))
                turned = _fused(builder, other, _wide(builder, sin, index), turned)
                _narrow(builder, turned, out, index)
            return []

        loop(builder, half, [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@emitted
def copy_row(context, at, out, vectors):  # type: ignore[no-untyped-def] # numba infers types
    """Copy 16 * `vectors` bfloat16 numbers, bit for bit."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        at, out, vectors = values

        def body(step: Any, _: list[Any]) -> list[Any]:
            value = load(builder, _address(builder, at, step), 0, BFLOATS)
            store(builder, value, _address(builder, out, step))
            return []

        loop(builder, vectors, [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


def _address(builder: Any, at: Any, step: Any) -> Any:
    """Return the address of vector `step` of a row of bfloat16 numbers."""
    return builder.add(at, builder.mul(step, I64(2 * LANES)))


def _wide(builder: Any, at: Any, step: Any) -> Any:
    """Load vector `step` of a row of bfloat16 numbers as float32."""
    return widened(builder, load(builder, _address(builder, at, step), 0, BFLOATS))


def _narrow(builder: Any, value: Any, out: Any, step: Any) -> None:
    store(builder, narrowed(builder, value), _address(builder, out, step))


def _fused(builder: Any, left: Any, right: Any, more: Any) -> Any:
    return call(builder, "llvm.fma.v16f32", FUSED, [left, right, more])
