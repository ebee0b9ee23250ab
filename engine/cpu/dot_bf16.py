"""Products of bfloat16 vectors, as LLVM code for Numba.

One instruction of AVX-512 BF16 multiplies 16 pairs of bfloat16 numbers and adds each pair of
products to a float32. Numba cannot express it, so this module emits it as LLVM instructions. With
AVX2 alone (most laptops), it emits the same with float32 numbers, whose upper halves are bfloat16
numbers: two shifts and two products for each pair. The module knows no model, needs numba, which
is optional, and keeps no state.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped] # numba's own compiler

COLUMNS = 64  # of a panel: four vectors of 16
LANES = 16


class Bfloat16(ir.Type):  # type: ignore[misc] # llvmlite declares no types
    """LLVM's type `bfloat`, which llvmlite lacks."""

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
    """Return whether this processor's vectors are long enough for these kernels to be fast."""
    found = _features()
    return native() or (found.get("avx2", False) and found.get("fma", False))


@cache
def native() -> bool:
    """Return whether this processor has the AVX-512 BF16 instruction."""
    return _features().get("avx512bf16", False)


def has_matrix_unit() -> bool:
    """Return whether oneDNN uses this processor's bfloat16 matrix unit (AMX), which multiplies
    many rows several times as fast as the AVX-512 instruction."""
    return _features().get("amx-bf16", False)


@cache
def _features() -> dict[str, bool]:
    """Return the features that Numba's code may use: those of this processor, unless
    `NUMBA_CPU_FEATURES` ("+avx2,+fma") restricts them."""
    restricted = os.environ.get("NUMBA_CPU_FEATURES")
    if restricted is None:
        return dict(binding.get_host_cpu_features())
    return {each[1:]: each.startswith("+") for each in restricted.split(",") if each}


def load(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    """Load the value `offset` bytes after `address`, with any alignment."""
    pointer = builder.inttoptr(builder.add(address, I64(offset)), _POINTER)
    return builder.load(pointer, typ=kind, align=1)


def store(builder: Any, value: Any, address: Any, offset: int = 0) -> None:
    pointer = builder.inttoptr(builder.add(address, I64(offset)), _POINTER)
    builder.store(value, pointer, align=1)


def splat(builder: Any, address: Any) -> Any:
    """Load two adjacent bfloat16 numbers and repeat them sixteen times."""
    word = builder.load(builder.inttoptr(address, _POINTER), typ=I32, align=2)
    nothing = ir.Constant(_WORDS, ir.Undefined)
    one = builder.insert_element(nothing, word, I32(0))
    return builder.bitcast(builder.shuffle_vector(one, nothing, _every(0)), PAIRS)


def dot(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """Return `total` plus the products of 16 pairs."""
    return dots(builder, [total], left, [right])[0]


def dots(builder: Any, totals: list[Any], left: Any, rights: list[Any]) -> list[Any]:
    """Return `dot` of `left` with each of `rights`."""
    if native():
        kind, name = ir.FunctionType(FLOATS, [FLOATS, PAIRS, PAIRS]), "dpbf16ps.512"
        return [
            call(builder, f"llvm.x86.avx512bf16.{name}", kind, [total, left, right])
            for total, right in zip(totals, rights, strict=True)
        ]
    for half in range(2):  # one half of all pairs at a time saves registers
        own = half_of(builder, left, half)
        totals = [
            call(builder, "llvm.fma.v16f32", FUSED, [own, half_of(builder, right, half), total])
            for total, right in zip(totals, rights, strict=True)
        ]
    return totals


def half_of(builder: Any, pairs: Any, second: int) -> Any:
    """Return the first or the second number of each of 16 pairs, as float32."""
    words = builder.bitcast(pairs, _WORDS)
    if second:
        return builder.bitcast(builder.and_(words, _every(0xFFFF0000)), FLOATS)
    return builder.bitcast(builder.shl(words, _every(16)), FLOATS)


def _every(word: int) -> Any:
    return ir.Constant(_WORDS, [word] * LANES)


def narrowed(builder: Any, value: Any) -> Any:
    """Round float32 numbers to bfloat16, to nearest, ties to even; NaN stays NaN."""
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
    """Convert 16 bfloat16 numbers to float32."""
    if native():
        return builder.fpext(value, FLOATS)
    halves = builder.bitcast(value, ir.VectorType(ir.IntType(16), LANES))
    return builder.bitcast(builder.shl(builder.zext(halves, _WORDS), _every(16)), FLOATS)


def call(builder: Any, name: str, kind: Any, arguments: list[Any]) -> Any:
    """Call the LLVM intrinsic `name`."""
    known = builder.module.globals.get(name)
    return builder.call(known or ir.Function(builder.module, kind, name), arguments)


def prefetch(builder: Any, address: Any, lines: int, level: int = 2) -> None:
    """Prefetch cache lines into the cache of this level; the address may be invalid."""
    kind = ir.FunctionType(ir.VoidType(), [_POINTER, I32, I32, I32])
    for line in range(lines):
        pointer = builder.inttoptr(builder.add(address, I64(64 * line)), _POINTER)
        reading = [pointer, I32(0), I32(4 - level), I32(1)]  # for reading, data cache
        call(builder, "llvm.prefetch.p0", kind, reading)
