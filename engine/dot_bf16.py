"""Products of bfloat16 numbers by the processor's own instruction (AVX-512 BF16), for Numba.

One instruction multiplies 16 pairs of bfloat16 numbers and adds each pair of products to a
float32. Numba cannot express it, so the inner loop is emitted as LLVM instructions here.
Knows no model; needs numba, which is optional, and keeps no state.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped] # numba's own compiler
from numba.core import types
from numba.extending import intrinsic

COLUMNS = 64  # of a panel: four vectors of 16
MOST_ROWS = 6  # of a tile: 24 sums of 16 in registers, beside four vectors of weights
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


@cache
def supported() -> bool:
    """Whether this processor has the instruction."""
    return _features().get("avx512bf16", False)


def has_matrix_unit() -> bool:
    """Whether this processor multiplies whole tiles of bfloat16 (AMX), as oneDNN lets it: with
    many rows several times as fast as this instruction."""
    return _features().get("amx-bf16", False)


@cache
def _features() -> dict[str, bool]:
    return dict(binding.get_host_cpu_features())


def tile(lines: int, *, wide: bool = False) -> Any:
    """A Numba function (rows, x, x_stride, panel, ahead, pairs, start, out, out_stride), all
    int64, addresses and strides in bytes, that sets

        out[r, c] = start[c] + sum over k of x[r, k] * panel[k // 2, c, k % 2]

    for 1 to 6 `rows` and 64 columns: x bfloat16, start float32 [64], k below 2 * `pairs`, summed
    in order of k whatever the number of rows; out float32 if `wide`, else bfloat16. Meanwhile
    `lines` lines of 64 bytes per pair are fetched, from the address `ahead` on, into the
    second-level cache.
    """

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        rows, *others = values
        done = builder.append_basic_block("done")
        choice = builder.switch(rows, done)
        for count in range(1, MOST_ROWS + 1):
            case = builder.append_basic_block(f"rows{count}")
            choice.add_case(I64(count), case)
            builder.position_at_end(case)
            _emit_tile(builder, count, lines, wide, *others)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    def typed(  # type: ignore[no-untyped-def]
        context, rows, x, x_stride, panel, ahead, pairs, start, out, out_stride
    ):
        return types.void(*[types.int64] * 9), generate

    return intrinsic(typed)


def _emit_tile(
    builder: Any,
    rows: int,
    lines: int,
    wide: bool,
    x: Any,
    x_stride: Any,
    panel: Any,
    ahead: Any,
    pairs: Any,
    start: Any,
    out: Any,
    out_stride: Any,
) -> None:
    """The loop over pairs for a fixed number of rows, its sums in registers."""
    x_rows = [builder.add(x, builder.mul(x_stride, I64(row))) for row in range(rows)]
    starts = [load(builder, start, 4 * LANES * place, FLOATS) for place in range(_VECTORS)]
    before, loop, after = builder.block, *(builder.append_basic_block(n) for n in ("dot", "done"))
    builder.branch(loop)
    builder.position_at_end(loop)
    pair = builder.phi(I64)
    pair.add_incoming(I64(0), before)
    sums = []
    for _ in range(rows):
        for place in range(_VECTORS):
            sums.append(builder.phi(FLOATS))
            sums[-1].add_incoming(starts[place], before)
    weights_at = builder.add(panel, builder.mul(pair, I64(4 * COLUMNS)))
    weights = [load(builder, weights_at, 64 * place, PAIRS) for place in range(_VECTORS)]
    prefetch(builder, builder.add(ahead, builder.mul(pair, I64(64 * lines))), lines)
    new = []
    for row in range(rows):
        both = splat(builder, builder.add(x_rows[row], builder.mul(pair, I64(4))))
        for place in range(_VECTORS):
            new.append(dot(builder, sums[row * _VECTORS + place], both, weights[place]))
    following = builder.add(pair, I64(1))
    pair.add_incoming(following, builder.block)
    for phi, value in zip(sums, new, strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, pairs), loop, after)
    builder.position_at_end(after)
    for row in range(rows):
        row_at = builder.add(out, builder.mul(out_stride, I64(row)))
        for place in range(_VECTORS):
            value = new[row * _VECTORS + place]
            if wide:
                store(builder, value, row_at, 4 * LANES * place)
            else:
                store(builder, builder.fptrunc(value, BFLOATS), row_at, 2 * LANES * place)


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
    words = ir.VectorType(I32, LANES)
    one = builder.insert_element(ir.Constant(words, ir.Undefined), word, I32(0))
    zeros = ir.Constant(words, [0] * LANES)
    return builder.bitcast(
        builder.shuffle_vector(one, ir.Constant(words, ir.Undefined), zeros), PAIRS
    )


def dot(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """`total` plus the products of 16 pairs."""
    kind = ir.FunctionType(FLOATS, [FLOATS, PAIRS, PAIRS])
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", kind, [total, left, right])


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
