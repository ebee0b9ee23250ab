"""A few rows of bfloat16 numbers times a panel of 64 columns, for Numba.

With the instruction of AVX-512 BF16 all sums of six rows stay in registers. With AVX2 alone the
sums of a panel's quarter do: there the rows are made float32 first, a stretch at a time, in a room
on the stack that a core's first cache holds, and each quarter of the panel is multiplied by them.
Knows no model; keeps no state.
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
MOST_ROWS = 6  # of a tile: with 32 registers of 16 numbers, 24 sums and four vectors of weights
_STRETCH = 256  # pairs of each row that are float32 at once: 12 KB of six rows
_FLOAT = ir.FloatType()


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


class _Room(NamedTuple):
    """On the stack: int64 values, addresses."""

    sums: Any  # of float32 [MOST_ROWS, 64]
    numbers: Any  # of float32 [MOST_ROWS, 2 * _STRETCH]


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

        def emit(count: int) -> None:
            _emit_tile(builder, count, lines, wide, at)

        if native():
            by_count(builder, rows, range(1, MOST_ROWS + 1), emit)
            return context.get_dummy_value()
        room, several = _new_room(builder), builder.icmp_unsigned("<=", rows, I64(MOST_ROWS))
        by_count(builder, rows, range(1, 2), emit)
        with builder.if_then(builder.and_(several, builder.icmp_unsigned(">", rows, I64(1)))):
            _emit_stretches(builder, rows, lines, wide, at, room)
        return context.get_dummy_value()

    def typed(  # type: ignore[no-untyped-def] # numba gives and takes its own types
        context, rows, x, x_stride, panel, ahead, pairs, start, out, out_stride
    ):
        return types.void(*[types.int64] * 9), generate

    return intrinsic(typed)


def _emit_tile(builder: Any, rows: int, lines: int, wide: bool, at: _Places) -> None:
    """All sums in registers."""
    x_rows = [builder.add(at.x, builder.mul(at.x_stride, I64(row))) for row in range(rows)]
    starts = [load(builder, at.start, 64 * place, FLOATS) for place in range(_VECTORS)]

    def body(pair: Any, sums: list[Any]) -> list[Any]:
        weights_at = builder.add(at.panel, builder.mul(pair, I64(4 * COLUMNS)))
        weights = [load(builder, weights_at, 64 * place, PAIRS) for place in range(_VECTORS)]
        prefetch(builder, builder.add(at.ahead, builder.mul(pair, I64(64 * lines))), lines)
        found: list[Any] = []
        for row in x_rows:
            both = splat(builder, builder.add(row, builder.mul(pair, I64(4))))
            found += dots(builder, sums[len(found) : len(found) + _VECTORS], both, weights)
        return found

    sums = loop(builder, at.pairs, starts * rows, body)
    for row in range(rows):
        _write(builder, sums[row * _VECTORS : (row + 1) * _VECTORS], I64(row), wide, at)


def _write(builder: Any, sums: list[Any], row: Any, wide: bool, at: _Places) -> None:
    """The sums of one row, where they belong."""
    row_at = builder.add(at.out, builder.mul(at.out_stride, row))
    for place, value in enumerate(sums):
        if wide:
            store(builder, value, row_at, 4 * LANES * place)
        else:
            store(builder, narrowed(builder, value), row_at, 2 * LANES * place)


def _new_room(builder: Any) -> _Room:
    with builder.goto_entry_block():  # where LLVM makes it once, whatever loop this is in
        sums, numbers = (
            builder.alloca(ir.ArrayType(_FLOAT, MOST_ROWS * width))
            for width in (COLUMNS, 2 * _STRETCH)
        )
        return _Room(builder.ptrtoint(sums, I64), builder.ptrtoint(numbers, I64))


def _emit_stretches(
    builder: Any, rows: Any, lines: int, wide: bool, at: _Places, room: _Room
) -> None:
    """Sums of a vector of columns at a time in registers, the others in the room meanwhile. Only
    the innermost loop is written anew for each number of rows: all of it takes LLVM a minute."""
    starts = [load(builder, at.start, 64 * place, FLOATS) for place in range(_VECTORS)]
    with cgutils.for_range(builder, rows) as row:
        own = builder.add(room.sums, builder.mul(row.index, I64(4 * COLUMNS)))
        for place, start in enumerate(starts):
            store(builder, start, own, 64 * place)
    stretches = builder.sdiv(builder.add(at.pairs, I64(_STRETCH - 1)), I64(_STRETCH))
    with cgutils.for_range(builder, stretches) as stretch:
        first = builder.mul(stretch.index, I64(_STRETCH))
        left = builder.sub(at.pairs, first)
        count = builder.select(builder.icmp_signed("<", left, I64(_STRETCH)), left, I64(_STRETCH))
        with cgutils.for_range(builder, rows) as row:
            x = builder.add(at.x, builder.mul(at.x_stride, row.index))
            source = builder.add(x, builder.mul(first, I64(4)))
            target = builder.add(room.numbers, builder.mul(row.index, I64(8 * _STRETCH)))
            _widen(builder, source, count, target)
        with cgutils.for_range(builder, I64(_VECTORS)) as part:
            offset = builder.mul(part.index, I64(64))
            panel = builder.add(at.panel, builder.mul(first, I64(4 * COLUMNS)))
            ahead = builder.add(at.ahead, builder.mul(first, I64(64 * lines)))
            here = at._replace(panel=builder.add(panel, offset), ahead=ahead, pairs=count)
            sums = room._replace(sums=builder.add(room.sums, offset))

            def add(many: int, here: _Places = here, sums: _Room = sums) -> None:
                _add_part(builder, many, lines, here, sums)

            by_count(builder, rows, range(2, MOST_ROWS + 1), add)
    with cgutils.for_range(builder, rows) as row:
        own = builder.add(room.sums, builder.mul(row.index, I64(4 * COLUMNS)))
        total = [load(builder, own, 64 * place, FLOATS) for place in range(_VECTORS)]
        _write(builder, total, row.index, wide, at)


def _widen(builder: Any, source: Any, pairs: Any, target: Any) -> None:
    """Pairs of bfloat16 numbers as float32."""
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


def _add_part(builder: Any, rows: int, lines: int, at: _Places, room: _Room) -> None:
    """Add to the sums of 16 columns the products of the stretch."""

    def body(pair: Any, carried: list[Any]) -> list[Any]:
        totals = list(carried)
        both = load(builder, builder.add(at.panel, builder.mul(pair, I64(4 * COLUMNS))), 0, PAIRS)
        prefetch(builder, builder.add(at.ahead, builder.mul(pair, I64(64 * lines))), lines)
        numbers_at = builder.add(room.numbers, builder.mul(pair, I64(8)))
        for second in range(2):
            column = half_of(builder, both, second)
            for row in range(rows):
                number = load(builder, numbers_at, 8 * _STRETCH * row + 4 * second, _FLOAT)
                own = spread(builder, number)
                fused = call(builder, "llvm.fma.v16f32", FUSED, [own, column, totals[row]])
                totals[row] = fused
        return totals

    starts = [load(builder, room.sums, 4 * COLUMNS * row, FLOATS) for row in range(rows)]
    for row, total in enumerate(loop(builder, at.pairs, starts, body)):
        store(builder, total, room.sums, 4 * COLUMNS * row)
