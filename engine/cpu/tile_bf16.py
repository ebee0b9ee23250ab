"""The product of a few bfloat16 rows with a panel of 64 columns, as LLVM code for Numba.

With AVX-512 BF16, all sums of six rows stay in registers. With AVX2 alone, the sums of a quarter of
the panel do: a stretch of each row is first converted to float32 in scratch memory on the stack,
which fits into the first-level cache, and then multiplied by each quarter of the panel. The module
knows no model and keeps no state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir  # type: ignore[import-untyped] # numba's own compiler
from numba.core import cgutils, types
from numba.extending import intrinsic

from baton.engine.cpu.dot_bf16 import (
    BFLOATS,
    COLUMNS,
    FLOATS,
    FUSED,
    I64,
    LANES,
    PAIRS,
    call,
    dots,
    half_of,
    load,
    narrowed,
    native,
    prefetch,
    splat,
    store,
    widened,
)
from baton.engine.cpu.softmax_ir import by_count, loop, spread

_VECTORS = COLUMNS // LANES
MAX_ROWS = 6  # of a tile: 24 sums and four vectors of weights fit into 32 registers
STRETCH_PAIRS = 256  # pairs of each row in float32 at once: 12 KB for six rows
_FLOAT = ir.FloatType()


class _TileArguments(NamedTuple):
    """The arguments of a tile: int64 values of LLVM, addresses and strides in bytes."""

    x: Any
    x_stride: Any
    panel: Any
    ahead: Any
    pairs: Any
    start: Any
    out: Any
    out_stride: Any


class _Scratch(NamedTuple):
    """The scratch memory on the stack: addresses as int64 values of LLVM."""

    sums: Any  # of float32 [MAX_ROWS, 64]
    numbers: Any  # of float32 [MAX_ROWS, 2 * STRETCH_PAIRS]


def tile(lines: int, *, wide: bool = False) -> Any:
    """Return a Numba function (rows, x, x_stride, panel, ahead, pairs, start, out, out_stride), all
    int64, addresses and strides in bytes, that sets

        out[r, c] = start[c] + sum over k of x[r, k] * panel[k // 2, c, k % 2]

    for 1 to MAX_ROWS `rows` and 64 columns: x bfloat16, start float32 [64], k below 2 * `pairs`,
    summed in an order that does not depend on the number of rows; out float32 if `wide`, else
    bfloat16. For each pair, it prefetches `lines` cache lines from the address `ahead` on into the
    second-level cache.
    """

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        rows, at = values[0], _TileArguments(*values[1:])

        def emit(count: int) -> None:
            _emit_tile(builder, count, lines, wide, at)

        if native():
            by_count(builder, rows, range(1, MAX_ROWS + 1), emit)
            return context.get_dummy_value()
        scratch, several = _new_scratch(builder), builder.icmp_unsigned("<=", rows, I64(MAX_ROWS))
        by_count(builder, rows, range(1, 2), emit)
        with builder.if_then(builder.and_(several, builder.icmp_unsigned(">", rows, I64(1)))):
            _emit_stretches(builder, rows, lines, wide, at, scratch)
        return context.get_dummy_value()

    def typed(  # type: ignore[no-untyped-def] # numba gives and takes its own types
        context, rows, x, x_stride, panel, ahead, pairs, start, out, out_stride
    ):
        return types.void(*[types.int64] * 9), generate

    return intrinsic(typed)


def _emit_tile(builder: Any, rows: int, lines: int, wide: bool, at: _TileArguments) -> None:
    """Emit a tile whose sums stay in registers."""
    x_rows = [builder.add(at.x, builder.mul(at.x_stride, I64(row))) for row in range(rows)]
    starts = [load(builder, at.start, 64 * index, FLOATS) for index in range(_VECTORS)]

    def body(pair: Any, sums: list[Any]) -> list[Any]:
        weights_at = builder.add(at.panel, builder.mul(pair, I64(4 * COLUMNS)))
        weights = [load(builder, weights_at, 64 * index, PAIRS) for index in range(_VECTORS)]
        prefetch(builder, builder.add(at.ahead, builder.mul(pair, I64(64 * lines))), lines)
        found: list[Any] = []
        for row in x_rows:
            both = splat(builder, builder.add(row, builder.mul(pair, I64(4))))
            found += dots(builder, sums[len(found) : len(found) + _VECTORS], both, weights)
        return found

    sums = loop(builder, at.pairs, starts * rows, body)
    for row in range(rows):
        _write(builder, sums[row * _VECTORS : (row + 1) * _VECTORS], I64(row), wide, at)


def _write(builder: Any, sums: list[Any], row: Any, wide: bool, at: _TileArguments) -> None:
    """Write the sums of one row."""
    row_at = builder.add(at.out, builder.mul(at.out_stride, row))
    for index, value in enumerate(sums):
        if wide:
            store(builder, value, row_at, 4 * LANES * index)
        else:
            store(builder, narrowed(builder, value), row_at, 2 * LANES * index)


def _new_scratch(builder: Any) -> _Scratch:
    with builder.goto_entry_block():  # allocated once, outside loops
        sums, numbers = (
            builder.alloca(ir.ArrayType(_FLOAT, MAX_ROWS * width))
            for width in (COLUMNS, 2 * STRETCH_PAIRS)
        )
        return _Scratch(builder.ptrtoint(sums, I64), builder.ptrtoint(numbers, I64))


def _emit_stretches(
    builder: Any, rows: Any, lines: int, wide: bool, at: _TileArguments, scratch: _Scratch
) -> None:
    """Emit a tile for AVX2: the sums of one vector of columns are in registers, the others in
    scratch memory. Only the innermost loop is emitted per number of rows, since LLVM takes a minute
    to compile the whole for each."""
    starts = [load(builder, at.start, 64 * index, FLOATS) for index in range(_VECTORS)]
    with cgutils.for_range(builder, rows) as row:
        own = builder.add(scratch.sums, builder.mul(row.index, I64(4 * COLUMNS)))
        for index, start in enumerate(starts):
            store(builder, start, own, 64 * index)
    stretches = builder.sdiv(builder.add(at.pairs, I64(STRETCH_PAIRS - 1)), I64(STRETCH_PAIRS))
    with cgutils.for_range(builder, stretches) as stretch:
        first = builder.mul(stretch.index, I64(STRETCH_PAIRS))
        left = builder.sub(at.pairs, first)
        count = builder.select(
            builder.icmp_signed("<", left, I64(STRETCH_PAIRS)), left, I64(STRETCH_PAIRS)
        )
        with cgutils.for_range(builder, rows) as row:
            x = builder.add(at.x, builder.mul(at.x_stride, row.index))
            source = builder.add(x, builder.mul(first, I64(4)))
            target = builder.add(scratch.numbers, builder.mul(row.index, I64(8 * STRETCH_PAIRS)))
            _widen(builder, source, count, target)
        with cgutils.for_range(builder, I64(_VECTORS)) as part:
            offset = builder.mul(part.index, I64(64))
            panel = builder.add(at.panel, builder.mul(first, I64(4 * COLUMNS)))
            ahead = builder.add(at.ahead, builder.mul(first, I64(64 * lines)))
            here = at._replace(panel=builder.add(panel, offset), ahead=ahead, pairs=count)
            sums = scratch._replace(sums=builder.add(scratch.sums, offset))

            def add(many: int, here: _TileArguments = here, sums: _Scratch = sums) -> None:
                _add_part(builder, many, lines, here, sums)

            by_count(builder, rows, range(2, MAX_ROWS + 1), add)
    with cgutils.for_range(builder, rows) as row:
        own = builder.add(scratch.sums, builder.mul(row.index, I64(4 * COLUMNS)))
        total = [load(builder, own, 64 * index, FLOATS) for index in range(_VECTORS)]
        _write(builder, total, row.index, wide, at)


def _widen(builder: Any, source: Any, pairs: Any, target: Any) -> None:
    """Convert pairs of bfloat16 numbers to float32."""
    vectors = builder.sdiv(pairs, I64(LANES // 2))
    with cgutils.for_range(builder, vectors) as step:
        value = load(builder, builder.add(source, builder.mul(step.index, I64(32))), 0, BFLOATS)
        to = builder.add(target, builder.mul(step.index, I64(64)))
        store(builder, widened(builder, value), to)
    with cgutils.for_range(builder, pairs, start=builder.mul(vectors, I64(LANES // 2))) as pair:
        both = splat(builder, builder.add(source, builder.mul(pair.index, I64(4))))
        to = builder.add(target, builder.mul(pair.index, I64(8)))
        for second in range(2):
            number = builder.extract_element(half_of(builder, both, second), I64(0))
            store(builder, number, to, 4 * second)


def _add_part(builder: Any, rows: int, lines: int, at: _TileArguments, scratch: _Scratch) -> None:
    """Add the products of a stretch to the sums of 16 columns."""

    def body(pair: Any, carried: list[Any]) -> list[Any]:
        totals = list(carried)
        both = load(builder, builder.add(at.panel, builder.mul(pair, I64(4 * COLUMNS))), 0, PAIRS)
        prefetch(builder, builder.add(at.ahead, builder.mul(pair, I64(64 * lines))), lines)
        numbers_at = builder.add(scratch.numbers, builder.mul(pair, I64(8)))
        for second in range(2):
            column = half_of(builder, both, second)
            for row in range(rows):
                number = load(builder, numbers_at, 8 * STRETCH_PAIRS * row + 4 * second, _FLOAT)
                own = spread(builder, number)
                fused = call(builder, "llvm.fma.v16f32", FUSED, [own, column, totals[row]])
                totals[row] = fused
        return totals

    starts = [load(builder, scratch.sums, 4 * COLUMNS * row, FLOATS) for row in range(rows)]
    for row, total in enumerate(loop(builder, at.pairs, starts, body)):
        store(builder, total, scratch.sums, 4 * COLUMNS * row)
