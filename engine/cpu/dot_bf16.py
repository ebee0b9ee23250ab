"""Products of bfloat16 numbers in the processor's vectors, for Numba.

One instruction of AVX-512 BF16 multiplies 16 pairs of bfloat16 numbers and adds each pair of
products to a float32. Numba cannot express it, so the inner loop is emitted as LLVM instructions
here. Processors without it that have AVX2 (most laptops) do the same with float32 numbers, which
bfloat16 numbers are the upper halves of: two shifts and two products for each pair.
Knows no model; needs numba, which is optional, and keeps no state.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped] # numba's own compiler

COLUMNS = 64  # of a panel: four vectors of 16
LANES = 16


class Bfloat16(ir.Type):  # type: ignore[misc]
    """LLVM's `bfloat`, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bfloat16)

    def __hash__(self) -> int:
        return hash(Bfloat16)


I32, I64, _POINTER = ir.IntType(32), ir.IntType(64), ir.PointerType()
FLOATS = ir.VectorType(ir.FloatType(), LANES)
BFLOATS = ir.VectorType(Bfloat16(), LANES)
PAIRS = ir.VectorType(Bfloat16(), 2 * LANES)
FUSED = ir.FunctionType(FLOATS, [FLOATS, FLOATS, FLOATS])
_WORDS = ir.VectorType(I32, LANES)


@cache
def supported() -> bool:
    """Whether this processor's vectors are long enough for these kernels to be worth it."""
    found = _features()
    return native() or (found.get("avx2", False) and found.get("fma", False))


@cache
def native() -> bool:
    """Whether this processor has the instruction."""
    return _features().get("avx512bf16", False)


def has_matrix_unit() -> bool:
    """Whether this processor multiplies whole tiles of bfloat16 (AMX), as oneDNN lets it: with
    many rows several times as fast as this instruction."""
    return _features().get("amx-bf16", False)


@cache
def _features() -> dict[str, bool]:
    """Return what the code that Numba compiles may use: this processor's features, or those of
    `NUMBA_CPU_FEATURES` ("+avx2,+fma") where that restricts them."""
    restricted = os.environ.get("NUMBA_CPU_FEATURES")
    if restricted is None:
        return dict(binding.get_host_cpu_features())
    return {each[1:]: each.startswith("+") for each in restricted.split(",") if each}


def load(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    """What lies `offset` bytes after `address`; any alignment."""
    pointer = builder.inttoptr(builder.add(address, I64(offset)), _POINTER)
    return builder.load(pointer, typ=kind, align=1)


def store(builder: Any, value: Any, address: Any, offset: int = 0) -> None:
    pointer = builder.inttoptr(builder.add(address, I64(offset)), _POINTER)
    builder.store(value, pointer, align=1)


def splat(builder: Any, address: Any) -> Any:
    """Two neighbouring bfloat16 numbers, sixteen times."""
    word = builder.load(builder.inttoptr(address, _POINTER), typ=I32, align=2)
    nothing = ir.Constant(_WORDS, ir.Undefined)
    one = builder.insert_element(nothing, word, I32(0))
    return builder.bitcast(builder.shuffle_vector(one, nothing, _every(0)), PAIRS)


def dot(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """`total` plus the products of 16 pairs."""
    return dots(builder, [total], left, [right])[0]


def dots(builder: Any, totals: list[Any], left: Any, rights: list[Any]) -> list[Any]:
    """`dot` of `left` with each of `rights`."""
    if native():
        kind, name = ir.FunctionType(FLOATS, [FLOATS, PAIRS, PAIRS]), "dpbf16ps.512"
        return [
            call(builder, f"llvm.x86.avx512bf16.{name}", kind, [total, left, right])
            for total, right in zip(totals, rights, strict=True)
        ]
    for half in range(2):  # of all pairs at once, so that few halves are in registers
        own = half_of(builder, left, half)
        totals = [
            call(builder, "llvm.fma.v16f32", FUSED, [own, half_of(builder, right, half), total])
            for total, right in zip(totals, rights, strict=True)
        ]
    return totals


def half_of(builder: Any, pairs: Any, second: int) -> Any:
    """The first or the second number of each of 16 pairs, as float32."""
    words = builder.bitcast(pairs, _WORDS)
    if second:
        return builder.bitcast(builder.and_(words, _every(0xFFFF0000)), FLOATS)
    return builder.bitcast(builder.shl(words, _every(16)), FLOATS)


def _every(word: int) -> Any:
    return ir.Constant(_WORDS, [word] * LANES)


def narrowed(builder: Any, value: Any) -> Any:
    """float32 numbers rounded to bfloat16: to the nearest, ties to even; NaN stays NaN."""
    lanes = value.type.count
    kind = ir.VectorType(Bfloat16(), lanes)
    if native():
        return builder.fptrunc(value, kind)
    words = ir.VectorType(I32, lanes)

    def every(word: int) -> Any:
        return ir.Constant(words, [word] * lanes)

    bits = builder.bitcast(value, words)
    odd = builder.and_(builder.lshr(bits, every(16)), every(1))
    rounded = builder.add(bits, builder.add(odd, every(0x7FFF)))
    quiet = builder.or_(bits, every(0x400000))
    kept = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    halves = builder.trunc(builder.lshr(kept, every(16)), ir.VectorType(ir.IntType(16), lanes))
    return builder.bitcast(halves, kind)


def widened(builder: Any, value: Any) -> Any:
    """16 bfloat16 numbers as float32."""
    if native():
        return builder.fpext(value, FLOATS)
    halves = builder.bitcast(value, ir.VectorType(ir.IntType(16), LANES))
    return builder.bitcast(builder.shl(builder.zext(halves, _WORDS), _every(16)), FLOATS)


def call(builder: Any, name: str, kind: Any, arguments: list[Any]) -> Any:
    """An instruction that LLVM knows by this name."""
    known = builder.module.globals.get(name)
    return builder.call(known or ir.Function(builder.module, kind, name), arguments)


def prefetch(builder: Any, address: Any, lines: int, level: int = 2) -> None:
    """Fetch lines of 64 bytes into the cache of this level; any address will do."""
    kind = ir.FunctionType(ir.VoidType(), [_POINTER, I32, I32, I32])
    for line in range(lines):
        pointer = builder.inttoptr(builder.add(address, I64(64 * line)), _POINTER)
        reading = [pointer, I32(0), I32(4 - level), I32(1)]  # data, not to be written
        call(builder, "llvm.prefetch.p0", kind, reading)
