"""Compiled arithmetic whose every bit follows from the source code, not from the compiler.

Numba code without fast math keeps each operation as written in vectors of any length, so a value
does not depend on the number of values beside it, on threads or on the processor. Multiply-add and
the exponential are defined here, because a compiler may fuse the former and a library may have
several versions of the latter. Everything is in one file, because the cache of compiled code only
checks a function's own file. The module needs numba and keeps no state.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped] # numba's own compiler
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from baton.engine.cpu.compiled import compiled, inner, take_threads
from baton.engine.cpu.kv_quant_numba import decode_row
from baton.engine.spec.families import Activation

# These two decide the order of sums, and thus the results.
_TILE = 64  # tokens of a sequence with one softmax update
_LANES = 16  # partial sums of the weights
_UNROLL = 8  # products added while a sum is in a register; the order stays
_ZERO = np.float32(0.0)
_LOWEST = np.float32(-np.inf)

_MIN_EXPONENT = np.float32(-87.0)  # e^-87 is the smallest normal float32 of them
_MAX_EXPONENT = np.float32(88.0)
_LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts: the first has few bits, so that its product with an integer is exact.
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_ROUNDER = np.float32(12582912.0)  # 1.5 * 2^23: a sum with it has an integer in its low bits
_ONE_BITS = np.int32(0x3F800000)
_C2, _C3, _C4, _C5, _C6 = (np.float32(1 / n) for n in (2, 6, 24, 120, 720))
_ONE = np.float32(1.0)
_INFINITY = np.float32(np.inf)
# Both activations are x * sigmoid(f(x)), with f(x) = x for SiLU (Elfwing et al. 2017,
# arXiv:1702.03118) and f(x) = sqrt(8 / pi) * (x + 0.044715 x^3) for the tanh form of GELU
# (Hendrycks and Gimpel 2016, arXiv:1606.08415): the factors of x and of x^3.
_SLOPES = {"silu": (1.0, 0.0), "gelu_tanh": (1.5957691216057308, 0.07135481627159119)}


def _fma(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c in float32, rounded once."""
    return types.float32(types.float32, types.float32, types.float32), (
        lambda _context, builder, _signature, values: builder.fma(*values)
    )


def _bits(_typing: Any, x: Any) -> Any:
    """Return the bits of a float32 as int32."""
    return types.int32(types.float32), (
        lambda _context, builder, _signature, values: builder.bitcast(values[0], ir.IntType(32))
    )


def _float(_typing: Any, bits: Any) -> Any:
    """Return the float32 with these bits."""
    return types.float32(types.int32), (
        lambda _context, builder, _signature, values: builder.bitcast(values[0], ir.FloatType())
    )


fma: Any = intrinsic(_fma)
_bits_of: Any = intrinsic(_bits)
_float_of: Any = intrinsic(_float)


@inner(forceinline=True)
def exp(x):  # type: ignore[no-untyped-def] # numba infers types
    """Return e^x of a float32, within 3 units in the last place. Below -87 the result is e^-87,
    above 88 infinity; NaN stays NaN.

    x = n ln 2 + r with integer n and |r| <= ln 2 / 2 (Cody and Waite 1980); e^r is a series to the
    sixth power, and 2^n sets the exponent's bits.
    """
    x = _MIN_EXPONENT if x < _MIN_EXPONENT else x
    high = x > _MAX_EXPONENT
    rounded = fma(x, _LOG2_E, _ROUNDER)
    n = rounded - _ROUNDER
    r = fma(n, -_LN2_LOW, fma(n, -_LN2_HIGH, x))
    power = fma(fma(fma(_C6, r, _C5), r, _C4), r, _C3)
    power = fma(fma(fma(power, r, _C2), r, _ONE), r, _ONE)
    power *= _float_of((_bits_of(rounded) << np.int32(23)) + _ONE_BITS)
    return _INFINITY if high else power


@inner(forceinline=True)
def tanh(x):  # type: ignore[no-untyped-def] # numba infers types
    """Return tanh(x) of a float32, with an absolute error below 2e-7; NaN stays NaN."""
    return _ONE - np.float32(2.0) / (exp(np.float32(2.0) * x) + _ONE)


@inner
def _load_numbers(numbers, location, tables, base, count, keys, values):  # type: ignore[no-untyped-def] # numba infers types
    (bits, widen), (head, layer, table) = numbers, location
    size = bits.shape[4]
    for token in range(count):
        block = tables[table + (base + token) // size]
        slot = (base + token) % size
        stored = bits[block, head, layer, 0, slot]
        for i in range(stored.shape[0]):
            keys[token, i] = stored[i] * widen
        stored = bits[block, head, layer, 1, slot]
        for i in range(stored.shape[0]):
            values[token, i] = stored[i] * widen


@inner
def _load_codes(codes, location, tables, base, count, keys, values):  # type: ignore[no-untyped-def] # numba infers types
    head, _, table = location
    slabs, words, floating, first, first_scale, size = codes
    dim = keys.shape[1]
    for token in range(count):
        block = tables[table + (base + token) // size]
        row = (base + token) % size
        slab, scales = slabs[block, head], words[block, head, first_scale:]
        at = (first + row) * dim
        decode_row(slab[at : at + dim], scales[row], floating, keys[token])
        at, row = at + size * dim, row + size
        decode_row(slab[at : at + dim], scales[row], floating, values[token])


@inner
def _load(numbers, codes, location, tables, base, count, keys, values, turned):  # type: ignore[no-untyped-def] # numba infers types
    """Load a tile as float32 `keys` [dim, tile] and `values` [tile, dim]: the tokens `base` to
    `base + count` of `location` = (head, layer, start in `tables`)."""
    if numbers is not None:  # decided at compile time
        _load_numbers(numbers, location, tables, base, count, turned, values)
    if codes is not None:
        _load_codes(codes, location, tables, base, count, turned, values)
    for i in range(keys.shape[0]):
        for token in range(_TILE):
            keys[i, token] = turned[token, i]


@inner
def _add_products(factors, first, end, matrix, sums):  # type: ignore[no-untyped-def] # numba infers types
    """Add factors[k] * matrix[k, :] to `sums` for k from `first` to `end`, in this order: the only
    sum of products here, for queries and keys and for weights and values."""
    whole = first + (end - first) // _UNROLL * _UNROLL
    width = sums.shape[0]
    for k in range(first, whole, _UNROLL):
        a, b, c, d = factors[k], factors[k + 1], factors[k + 2], factors[k + 3]
        e, f, g, h = factors[k + 4], factors[k + 5], factors[k + 6], factors[k + 7]
        for i in range(width):
            x = fma(b, matrix[k + 1, i], fma(a, matrix[k, i], sums[i]))
            x = fma(d, matrix[k + 3, i], fma(c, matrix[k + 2, i], x))
            x = fma(f, matrix[k + 5, i], fma(e, matrix[k + 4, i], x))
            sums[i] = fma(h, matrix[k + 7, i], fma(g, matrix[k + 6, i], x))
    for k in range(whole, end):
        factor = factors[k]
        for i in range(width):
            sums[i] = fma(factor, matrix[k, i], sums[i])


@inner
def _weigh(scores, first, end, scale, cap, best, total, mixed):  # type: ignore[no-untyped-def] # numba infers types
    """Replace products [tile] by weights, and those outside `first` to `end` by 0. Returns the
    highest score so far, to which `total` and `mixed` are rescaled."""
    for token in range(_TILE):
        score = scores[token] * scale
        if cap != _ZERO:
            score = cap * tanh(score / cap)
        scores[token] = score if first <= token < end else _LOWEST
    highest = best
    for token in range(_TILE):
        highest = scores[token] if scores[token] > highest else highest
    for token in range(_TILE):
        weight = exp(scores[token] - highest)
        scores[token] = weight if first <= token < end else _ZERO
    if highest > best:
        shrink = exp(best - highest)
        for lane in range(_LANES):
            total[lane] *= shrink
        for i in range(mixed.shape[0]):
            mixed[i] *= shrink
    for start in range(0, _TILE, _LANES):
        for lane in range(_LANES):
            total[lane] += scores[start + lane]
    return highest


def _attend(  # type: ignore[no-untyped-def] # numba infers types
    numbers,  # None, or uint16 or uint32 [block, kv_head, layer, k|v, token, dim], and the
    # uint32 factor from them to the bits of a float32
    codes,  # None, or the layer from `Slabs.of`
    kv_heads,
    layer,
    queries,  # float32 [rows, heads, dim]
    runs,  # int32 [runs, 4]: first row, rows, position of the first, index in `tables`
    tables,  # int32
    scale,
    cap,  # 0: none
    window,  # 0: none
    out,  # float32 [rows, heads, dim]
):
    """Compute attention, with one job per range of rows and KV head and an online softmax over
    tiles (Milakov and Gimelshein 2018, arXiv:1805.02867). A row skips tiles without visible
    tokens."""
    heads, dim = queries.shape[1], queries.shape[2]
    count_runs, group = runs.shape[0], heads // kv_heads
    for job in numba.prange(kv_heads * count_runs):
        head, run = job // count_runs, job % count_runs
        first, rows, start = runs[run, 0], runs[run, 1], runs[run, 2]
        keys_bits = np.zeros((dim, _TILE), dtype=np.uint32)
        values_bits = np.zeros((_TILE, dim), dtype=np.uint32)
        turned = np.zeros((_TILE, dim), dtype=np.uint32)
        keys, values = keys_bits.view(np.float32), values_bits.view(np.float32)
        scores = np.empty((rows * group, _TILE), dtype=np.float32)
        best = np.full(rows * group, _LOWEST, dtype=np.float32)
        total = np.zeros((rows * group, _LANES), dtype=np.float32)
        mixed = np.zeros((rows * group, dim), dtype=np.float32)
        lowest = max(0, start + 1 - window) if window else 0
        for base in range(lowest // _TILE * _TILE, start + rows, _TILE):
            count = min(_TILE, start + rows - base)
            location = (head, layer, runs[run, 3])
            _load(numbers, codes, location, tables, base, count, keys_bits, values_bits, turned)
            for m in range(rows * group):
                own = start + m // group + 1 - base  # tokens up to the row's own
                end, begin = min(count, own), max(0, own - window) if window else 0
                if begin < end:
                    row = queries[first + m // group, head * group + m % group]
                    scores[m, :] = _ZERO
                    _add_products(row, 0, dim, keys, scores[m])
                    best[m] = _weigh(scores[m], begin, end, scale, cap, best[m], total[m], mixed[m])
            for m in range(rows * group):
                own = start + m // group + 1 - base
                end, begin = min(count, own), max(0, own - window) if window else 0
                if begin < end:
                    _add_products(scores[m], begin, end, values, mixed[m])
        for m in range(rows * group):
            whole = _ZERO
            for lane in range(_LANES):
                whole += total[m, lane]
            row = out[first + m // group, head * group + m % group]
            for i in range(dim):
                row[i] = mixed[m, i] / whole


def _gate(gate_up, linear, cubic, out):  # type: ignore[no-untyped-def] # numba infers types
    ffn = out.shape[1]
    for row in numba.prange(out.shape[0]):
        for i in range(ffn):
            x = gate_up[row, i]
            slope = fma(cubic * x, x, linear)
            out[row, i] = x / (_ONE + exp(-slope * x)) * gate_up[row, ffn + i]


attend_rows = compiled(_attend, parallel=True, strict=True)
gate_rows = compiled(_gate, parallel=True, strict=True)


def strict_gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return act(gate) * up, [rows, ffn], of `gate_up` [rows, 2 ffn]: computed in float32, rounded
    once to the dtype of `gate_up`.

    torch's kernels use one exponential for whole vectors and another for the remainder of a
    thread's share, so that a value depends on the number of rows.
    """
    wide = gate_up.to(torch.float32).contiguous()
    out = torch.empty(wide.shape[0], wide.shape[1] // 2)
    linear, cubic = _SLOPES[activation]
    take_threads()
    gate_rows(wide.numpy(), np.float32(linear), np.float32(cubic), out.numpy())
    return out.to(gate_up.dtype)
