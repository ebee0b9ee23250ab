"""Eight-bit KV in the GPU's kernels: encodes rows, and decodes codes in registers.

Codes and scales equal those of `KvQuant`, bit for bit, if the launch fuses no product with a sum
(`UNFUSED`). FP8 is handled by its bits, because sm_80 has no such dtype. The kernels' parameter
CODES is the name of a `KvQuant`; it is "" for an unquantised pool, whose kernels contain none of
this code. The module owns nothing.
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
_MIN_MAGNITUDE = tl.constexpr(MIN_MAGNITUDE)
_INFINITY = tl.constexpr(0x7F800000)  # its bits
# 1.5 * 2^23: a float32 sum with it is rounded to an integer, ties to even.
_ROUNDER = tl.constexpr(12582912.0)
_FP8_NORMAL = tl.constexpr((127 - 6) << 23)  # the bits of 2^-6, FP8's smallest normal number
# 2^14: its last bit is 2^-9, FP8's smallest number, so a sum with it is rounded to that.
_FP8_ROUNDER = tl.constexpr(16384.0)
_FP8_ROUNDER_BITS = tl.constexpr((127 + 14) << 23)
_FP8_BIAS = tl.constexpr(120 << 3)  # float32's bias less FP8's, in codes


def codes_name(kv: Tensor) -> str:
    """Return CODES for a layer of the pool."""
    return next((name for name, codes in KV_QUANTS.items() if codes.dtype == kv.dtype), "")


def stored_bytes(kv: Tensor) -> Tensor:
    """Return a layer of the pool for the kernels, with FP8 as bits."""
    return kv.view(torch.uint8) if kv.dtype == FP8_E4M3.dtype else kv


def scale_strides(scales: Tensor | None) -> tuple[Any, Any, Any]:
    """Return the strides of a layer's scales [block, kv_head, k|v, token], except the last, 1."""
    if scales is None:
        return None, None, None
    block, head, side, token = scales.stride()
    assert token == 1
    return block, head, side


@triton.jit
def magnitude(numbers):  # type: ignore[no-untyped-def] # Triton infers types
    """Return the bits of the largest magnitude of float32 `numbers` [n]; NaN exceeds infinity."""
    return tl.max(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)


@triton.jit
def scale_of(highest, CODES: tl.constexpr):  # type: ignore[no-untyped-def] # Triton infers types
    """Return the scale of a row with this largest `magnitude`, and the factor from its numbers to
    codes; the factor is 0 if all codes are 0."""
    largest = tl.full([], _INT8_LARGEST if CODES == _INT8 else _FP8_LARGEST, tl.float32)
    finite, largest_magnitude = highest < _INFINITY, highest.to(tl.float32, bitcast=True)
    scalable = finite & (largest_magnitude >= _MIN_MAGNITUDE)
    largest_magnitude = tl.where(scalable, largest_magnitude, 1.0)
    scale = tl.where(scalable, tl.div_rn(largest_magnitude, largest), 0.0)
    inverse = tl.where(scalable, tl.div_rn(largest, largest_magnitude), 0.0)
    return tl.where(finite, scale, float("nan")), inverse


@triton.jit
def encoded(numbers, inverse, CODES: tl.constexpr):  # type: ignore[no-untyped-def] # Triton infers types
    """Return the nearest codes of float32 `numbers` [n], ties to even; `inverse`: the factor of
    `scale_of`."""
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
def store_row(cell, scale, numbers, live, CODES: tl.constexpr):  # type: ignore[no-untyped-def] # Triton infers types
    """Store the codes of float32 `numbers` [n] at `cell` [n] where `live` (the others are 0), and
    their scale at `scale`."""
    found, inverse = scale_of(magnitude(numbers), CODES)
    tl.store(cell, encoded(numbers, inverse, CODES), mask=live)
    tl.store(scale, found)


@triton.jit
def plain(  # type: ignore[no-untyped-def] # Triton infers types
    stored, KIND: tl.constexpr, CODES: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Convert stored values to the dtype KIND; codes become exact multiples of `unit`."""
    if CODES == _FP8:  # E4M3 bits are those of a float16 256 times smaller
        bits = stored.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(KIND)
    elif CODES == _INT8 and INTERPRETED:  # it cannot convert int8 to bfloat16
        return stored.to(tl.float32)
    else:
        return stored.to(KIND)


@triton.jit
def unit(scales, CODES: tl.constexpr):  # type: ignore[no-untyped-def] # Triton infers types
    """Return the scales of the numbers that `plain` returns."""
    return scales * 256.0 if CODES == _FP8 else scales
