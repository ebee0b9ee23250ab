"""Products of bfloat16 numbers in the processor's vectors, for Numba.

One instruction of AVX-512 BF16 multiplies 16 pairs of bfloat16 numbers and adds each pair of
products to a float32. Numba cannot express it, so the inner loop is emitted as LLVM instructions
here. Processors without it that have AVX2 (most laptops) do the same with float32 numbers, which
bfloat16 numbers are the upper halves of: two shifts and two products for each pair.
Knows no model; needs numba, which is optional, and keeps no state.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from llvmlite import binding, ir  # type: ignore[import-untyped] # numba's own compiler
from numba.core import types
from numba.extending import intrinsic

COLUMNS = 64  # of a panel: four vectors of 16
LANES = 16
_VECTORS = COLUMNS // LANES


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
    return dict(binding.get_host_cpu_features())


# Of a tile. With 32 registers of 16 numbers, 24 sums and four vectors of weights; with 16 of
# eight, six sums, two of weights, and room for the halves of both sides.
MOST_ROWS = 6 if native() else 3


class _Places(NamedTuple):
    """What a tile works on: int64 values of LLVM, addresses and strides in bytes."""

    x: Any
    x_stride: Any
    panel: Any
    ahead: Any
    pairs: Any
    start: Any
    out: Any
    out_stride: Any


def tile(lines: int, *, wide: bool = False) -> Any:
    """A Numba function (rows, x, x_stride, panel, ahead, pairs, start, out, out_stride), all
    int64, addresses and strides in bytes, that sets

        out[r, c] = start[c] + sum over k of x[r, k] * panel[k // 2, c, k % 2]

    for 1 to MOST_ROWS `rows` and 64 columns: x bfloat16, start float32 [64], k below 2 * `pairs`,
    summed in an order that does not depend on the number of rows; out float32 if `wide`, else
    bfloat16. Meanwhile `lines` lines of 64 bytes per pair are fetched, from the address `ahead`
    on, into the second-level cache.
    """

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        rows, at = values[0], _Places(*values[1:])
        done = builder.append_basic_block("done")
        choice = builder.switch(rows, done)
        for count in range(1, MOST_ROWS + 1):
            case = builder.append_basic_block(f"rows{count}")
            choice.add_case(I64(count), case)
            builder.position_at_end(case)
            if native():
                _emit_tile(builder, count, _VECTORS, lines, wide, at)
            else:
                _emit_parts(builder, count, max(1, _VECTORS // count), lines, wide, at)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    def typed(  # type: ignore[no-untyped-def]
        context, rows, x, x_stride, panel, ahead, pairs, start, out, out_stride
    ):
        return types.void(*[types.int64] * 9), generate

    return intrinsic(typed)


def _emit_parts(builder: Any, rows: int, vectors: int, lines: int, wide: bool, at: _Places) -> None:
    """A tile whose sums do not fit into the registers: `vectors` of the panel at a time."""
    parts, size = _VECTORS // vectors, 4 if wide else 2
    before, loop, after = builder.block, *(builder.append_basic_block(n) for n in ("part", "all"))
    builder.branch(loop)
    builder.position_at_end(loop)
    part = builder.phi(I64)
    part.add_incoming(I64(0), before)

    def moved(address: Any, bytes_: int) -> Any:
        return builder.add(address, builder.mul(part, I64(bytes_ * LANES * vectors)))

    target = moved(at.out, size)
    own = at._replace(panel=moved(at.panel, 4), start=moved(at.start, 4), out=target)
    _emit_tile(builder, rows, vectors, lines, wide, own)
    following = builder.add(part, I64(1))
    part.add_incoming(following, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, I64(parts)), loop, after)
    builder.position_at_end(after)


def _emit_tile(builder: Any, rows: int, vectors: int, lines: int, wide: bool, at: _Places) -> None:
    """The loop over pairs for a fixed number of rows and of vectors of the panel, its sums in
    registers."""
    places = range(vectors)
    x_rows = [builder.add(at.x, builder.mul(at.x_stride, I64(row))) for row in range(rows)]
    starts = [load(builder, at.start, 4 * LANES * place, FLOATS) for place in places]
    before, loop, after = builder.block, *(builder.append_basic_block(n) for n in ("dot", "done"))
    builder.branch(loop)
    builder.position_at_end(loop)
    pair = builder.phi(I64)
    pair.add_incoming(I64(0), before)
    sums = []
    for _ in range(rows):
        for value in starts:
            sums.append(builder.phi(FLOATS))
            sums[-1].add_incoming(value, before)
    weights_at = builder.add(at.panel, builder.mul(pair, I64(4 * COLUMNS)))
    weights = [load(builder, weights_at, 64 * place, PAIRS) for place in places]
    prefetch(builder, builder.add(at.ahead, builder.mul(pair, I64(64 * lines))), lines)
    new: list[Any] = []
    for some in [[row] for row in x_rows] if native() else [x_rows]:
        boths = [splat(builder, builder.add(row, builder.mul(pair, I64(4)))) for row in some]
        theirs = sums[len(new) : len(new) + len(some) * vectors]
        new += dots(builder, theirs, boths, weights)
    following = builder.add(pair, I64(1))
    pair.add_incoming(following, builder.block)
    for phi, value in zip(sums, new, strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, at.pairs), loop, after)
    builder.position_at_end(after)
    for row in range(rows):
        row_at = builder.add(at.out, builder.mul(at.out_stride, I64(row)))
        for place in places:
            value = new[row * vectors + place]
            if wide:
                store(builder, value, row_at, 4 * LANES * place)
            else:
                store(builder, narrowed(builder, value), row_at, 2 * LANES * place)


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
    return dots(builder, [total], [left], [right])[0]


def dots(builder: Any, totals: list[Any], lefts: list[Any], rights: list[Any]) -> list[Any]:
    """`dot` of each of `lefts` with each of `rights`, the totals in that order."""
    many = len(rights)
    if native():
        kind, name = ir.FunctionType(FLOATS, [FLOATS, PAIRS, PAIRS]), "dpbf16ps.512"
        return [
            call(builder, f"llvm.x86.avx512bf16.{name}", kind, [total, lefts[n // many], right])
            for n, (total, right) in enumerate(zip(totals, rights * len(lefts), strict=True))
        ]
    for half in range(2):  # of all pairs at once, so that few halves are in registers
        own, others = ([_half(builder, pairs, half) for pairs in side] for side in (lefts, rights))
        totals = [
            call(builder, "llvm.fma.v16f32", FUSED, [own[n // many], others[n % many], total])
            for n, total in enumerate(totals)
        ]
    return totals


def _half(builder: Any, pairs: Any, second: int) -> Any:
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
