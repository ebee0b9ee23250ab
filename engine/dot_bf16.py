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
_LANES = 16
_VECTORS = COLUMNS // _LANES


class _Bfloat16(ir.Type):  # type: ignore[misc]
    """LLVM's `bfloat`, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


_I32, _I64, _POINTER = ir.IntType(32), ir.IntType(64), ir.PointerType()
_FLOATS = ir.VectorType(ir.FloatType(), _LANES)
_BFLOATS = ir.VectorType(_Bfloat16(), _LANES)
_PAIRS = ir.VectorType(_Bfloat16(), 2 * _LANES)


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


def tile(prefetch: int) -> Any:
    """A Numba function (rows, x, x_stride, panel, ahead, pairs, start, out, out_stride), all
    int64, addresses and strides in bytes, that sets

        out[r, c] = bfloat16(start[c] + sum over k of x[r, k] * panel[k // 2, c, k % 2])

    for 1 to 6 `rows` and 64 columns: x and out bfloat16, start float32 [64], k below 2 * `pairs`,
    summed in order of k whatever the number of rows. Meanwhile `prefetch` lines of 64 bytes per
    pair are fetched, from the address `ahead` on, into the second-level cache.
    """

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        rows, *others = values
        done = builder.append_basic_block("done")
        choice = builder.switch(rows, done)
        for count in range(1, MOST_ROWS + 1):
            case = builder.append_basic_block(f"rows{count}")
            choice.add_case(_I64(count), case)
            builder.position_at_end(case)
            _emit_tile(builder, count, prefetch, *others)
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
    prefetch: int,
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
    x_rows = [builder.add(x, builder.mul(x_stride, _I64(row))) for row in range(rows)]
    starts = [_load(builder, start, 4 * _LANES * place, _FLOATS) for place in range(_VECTORS)]
    before, loop, after = builder.block, *(builder.append_basic_block(n) for n in ("dot", "done"))
    builder.branch(loop)
    builder.position_at_end(loop)
    pair = builder.phi(_I64)
    pair.add_incoming(_I64(0), before)
    sums = []
    for _ in range(rows):
        for place in range(_VECTORS):
            sums.append(builder.phi(_FLOATS))
            sums[-1].add_incoming(starts[place], before)
    weights_at = builder.add(panel, builder.mul(pair, _I64(4 * COLUMNS)))
    weights = [_load(builder, weights_at, 64 * place, _PAIRS) for place in range(_VECTORS)]
    _emit_prefetch(builder, builder.add(ahead, builder.mul(pair, _I64(64 * prefetch))), prefetch)
    new = []
    for row in range(rows):
        both = _splat(builder, builder.add(x_rows[row], builder.mul(pair, _I64(4))))
        for place in range(_VECTORS):
            new.append(_dot(builder, sums[row * _VECTORS + place], both, weights[place]))
    following = builder.add(pair, _I64(1))
    pair.add_incoming(following, builder.block)
    for phi, value in zip(sums, new, strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, pairs), loop, after)
    builder.position_at_end(after)
    for row in range(rows):
        row_at = builder.add(out, builder.mul(out_stride, _I64(row)))
        for place in range(_VECTORS):
            value = builder.fptrunc(new[row * _VECTORS + place], _BFLOATS)
            at = builder.inttoptr(builder.add(row_at, _I64(2 * _LANES * place)), _POINTER)
            builder.store(value, at, align=2)


def _load(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    pointer = builder.inttoptr(builder.add(address, _I64(offset)), _POINTER)
    return builder.load(pointer, typ=kind, align=4)


def _splat(builder: Any, address: Any) -> Any:
    """Two neighbouring bfloat16 numbers, sixteen times."""
    word = builder.load(builder.inttoptr(address, _POINTER), typ=_I32, align=2)
    words = ir.VectorType(_I32, _LANES)
    one = builder.insert_element(ir.Constant(words, ir.Undefined), word, _I32(0))
    zeros = ir.Constant(words, [0] * _LANES)
    return builder.bitcast(
        builder.shuffle_vector(one, ir.Constant(words, ir.Undefined), zeros), _PAIRS
    )


def _dot(builder: Any, total: Any, left: Any, right: Any) -> Any:
    kind = ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS])
    function = builder.module.globals.get("llvm.x86.avx512bf16.dpbf16ps.512") or ir.Function(
        builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512"
    )
    return builder.call(function, [total, left, right])


def _emit_prefetch(builder: Any, address: Any, lines: int) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_POINTER, _I32, _I32, _I32])
    function = builder.module.globals.get("llvm.prefetch.p0") or ir.Function(
        builder.module, kind, "llvm.prefetch.p0"
    )
    for line in range(lines):
        pointer = builder.inttoptr(builder.add(address, _I64(64 * line)), _POINTER)
        builder.call(function, [pointer, _I32(0), _I32(2), _I32(1)])  # a read, L2, data
