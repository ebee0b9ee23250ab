"""Eight-bit KV in the GPU's kernels: rows become codes, and codes become numbers in registers.

Codes and scales are those of `KvQuant`, bit for bit, if the launch fuses no product with a sum
(`UNFUSED`). FP8 is handled by its bits: sm_80 has no such kind of number. What the kernels call
CODES is the name of a `KvQuant`, or "" for a pool of plain numbers, whose kernels are compiled
as if this file were not there. Unproven: not yet run on a GPU. Owns nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.memory.kv_quant import FP8_E4M3, INT8, KV_QUANTS, MIN_MAGNITUDE

UNFUSED = {"enable_fp_fusion": False}  # keyword arguments of a launch that encodes

_INT8 = tl.constexpr(INT8.name)
_FP8 = tl.constexpr(FP8_E4M3.name)
_INT8_LARGEST = tl.constexpr(INT8.largest)
_FP8_LARGEST = tl.constexpr(FP8_E4M3.largest)
_LEAST = tl.constexpr(MIN_MAGNITUDE)
_INFINITY = tl.constexpr(0x7F800000)  # its bits
# 1.5 * 2^23: what is added to it is rounded to a whole number, ties to even.
_ROUNDER = tl.constexpr(12582912.0)
_FP8_NORMAL = tl.constexpr((127 - 6) << 23)  # the bits of 2^-6, FP8's least normal number
# 2^14: its last place is 2^-9, FP8's least number, which a sum with it is rounded to.
_FP8_ROUNDER = tl.constexpr(16384.0)
_FP8_ROUNDER_BITS = tl.constexpr((127 + 14) << 23)
_FP8_BIAS = tl.constexpr(120 << 3)  # float32's bias less FP8's, in codes


def codes_name(kv: Tensor) -> str:
    """CODES of a layer of the pool."""
    return next((name for name, codes in KV_QUANTS.items() if codes.dtype == kv.dtype), "")


def stored_bytes(kv: Tensor) -> Tensor:
    """A layer of the pool as kernels take it: FP8 as its bits."""
    return kv.view(torch.uint8) if kv.dtype == FP8_E4M3.dtype else kv


def scale_strides(scales: Tensor | None) -> tuple[Any, Any, Any]:
    """Of a layer's scales [block, kv_head, k|v, token], whose tokens are neighbours."""
    if scales is None:
        return None, None, None
    block, head, side, token = scales.stride()
    assert token == 1
    return block, head, side


@triton.jit
def magnitude(numbers):  # type: ignore[no-untyped-def]
    """Bits of the greatest magnitude of float32 `numbers` [n]; NaN's are above infinity's."""
    return tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)


@triton.jit
def scale_of(highest, CODES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a row whose greatest `magnitude` is given: its scale, and what makes codes of its
    numbers when it multiplies them, 0 where all codes are 0."""
    largest = tl.full([], _INT8_LARGEST if CODES == _INT8 else _FP8_LARGEST, tl.float32)
    finite, most = highest < _INFINITY, highest.to(tl.float32, bitcast=True)
    sound = finite & (most >= _LEAST)
    most = tl.where(sound, most, 1.0)
    scale = tl.where(sound, tl.div_rn(most, largest), 0.0)
    inverse = tl.where(sound, tl.div_rn(largest, most), 0.0)
    return tl.where(finite, scale, float("nan")), inverse


@triton.jit
def encoded(numbers, inverse, CODES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The nearest codes of float32 `numbers` [n], ties to even; `inverse` as of `scale_of`."""
    scaled = tl.where(inverse > 0, numbers * inverse, 0.0)
    if CODES == _INT8:
        return (scaled + _ROUNDER - _ROUNDER).to(tl.int8)
    else:
        bits = scaled.to(tl.int32, bitcast=True)
        rest = bits & 0x7FFFFFFF
        normal = ((rest + 0x7FFFF + ((rest >> 20) & 1)) >> 20) - _FP8_BIAS
        small = (tl.abs(scaled) + _FP8_ROUNDER).to(tl.int32, bitcast=True) - _FP8_ROUNDER_BITS
        code = tl.where(rest >= _FP8_NORMAL, normal, small)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def store_row(cell, scale, numbers, live, CODES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes of float32 `numbers` [n] to `cell` [n] where `live`, elsewhere the numbers are 0;
    their scale to `scale`."""
    found, inverse = scale_of(magnitude(numbers), CODES)
    tl.store(cell, encoded(numbers, inverse, CODES), mask=live)
    tl.store(scale, found)


@triton.jit
def plain(  # type: ignore[no-untyped-def]
    stored, KIND: tl.constexpr, CODES: tl.constexpr, INTERPRETED: tl.constexpr
):
    """What the pool holds as numbers of KIND: codes exactly, in units of `unit`."""
    if CODES == _FP8:  # bits of an E4M3 number are those of a float16 of 1/256 of it
        bits = stored.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(KIND)
    elif CODES == _INT8 and INTERPRETED:  # which makes no bfloat16 of integers
        return stored.to(tl.float32)
    else:
        return stored.to(KIND)


@triton.jit
def unit(scales, CODES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales of what `plain` gives."""
    return scales * 256.0 if CODES == _FP8 else scales
