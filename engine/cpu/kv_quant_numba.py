"""Compiled eight-bit KV: encodes rows as they are written, decodes them as they are read.

The kernels see the pool as slabs, uint8 [block, kv_head, bytes], and the same memory as float32
[block, kv_head, words]; they find rows and scales by their index in the slab. Codes and numbers
equal those of `KvQuant`, bit for bit. The module needs numba, which is optional, and keeps no
state.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from baton.engine.cpu.compiled import compiled, inner, take_threads
from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.kv_quant import FP8_E4M3, MIN_MAGNITUDE

_MIN_MAGNITUDE = np.float32(MIN_MAGNITUDE)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
# 1.5 * 2^23: a float32 sum with it is rounded to an integer, ties to even.
_ROUNDER = np.float32(12582912.0)
_FP8_NORMAL = np.uint32((127 - 6) << 23)  # the bits of 2^-6, FP8's smallest normal number
# 2^14: its last bit is 2^-9, FP8's smallest number, so a sum with it is rounded to that.
_FP8_ROUNDER = np.float32(16384.0)
_FP8_ROUNDER_BITS = np.uint32((127 + 14) << 23)
# FP8's exponents, read as a float32's, are too small by the difference of the two biases.
_FP8_BIAS = np.float32(2.0**120)


Stored = tuple[NDArray[np.uint8], NDArray[np.float32], bool, int, int, int]


class Slabs:
    """The memory of an eight-bit pool, in the form that the kernels read."""

    def __init__(self, pool: KvPool) -> None:
        assert pool.quant is not None and pool.memory.device.type == "cpu"
        self._slabs = pool.memory.numpy()
        self._words = pool.memory.view(torch.float32).numpy()
        self._floating = pool.quant is FP8_E4M3
        self._largest = np.float32(pool.quant.largest)
        self._layers, _, self._size, self._dim = pool.tensor.shape[2:]

    def of(self, layer: int) -> Stored:
        """Return the kernels' arguments for a layer: slabs, slabs as words, whether codes are FP8,
        the index of the layer's first key in rows of a slab, the index of its scale in words, and
        the tokens of a block, which is the distance from keys to values."""
        first = 2 * layer * self._size
        scales = 2 * self._layers * self._size * self._dim // 4
        return self._slabs, self._words, self._floating, first, scales + first, self._size

    def write(
        self, layer: int, blocks: torch.Tensor, slots: torch.Tensor, kv: torch.Tensor
    ) -> None:
        """Same as `KvPool.put`, for contiguous `kv` in float32 or bfloat16."""
        wide = kv.dtype == torch.float32
        bits = kv.view(torch.int32 if wide else torch.int16).numpy()
        take_threads()
        encode_rows(
            bits.view(np.uint32 if wide else np.uint16),
            np.uint32(1 if wide else 1 << 16),  # a bfloat16 is the upper half of a float32
            self.of(layer),
            self._largest,
            blocks.numpy(),
            slots.numpy(),
        )


@inner
def _encode(words, inverse, floating, codes):  # type: ignore[no-untyped-def] # numba infers types
    """Encode `words` [dim], bits of float32, times `inverse`, as codes; overwrites `words`."""
    numbers = words.view(np.float32)
    if not floating:
        for i in range(numbers.shape[0]):
            codes[i] = np.uint8(np.int32(numbers[i] * inverse + _ROUNDER - _ROUNDER))
        return
    for i in range(numbers.shape[0]):
        numbers[i] *= inverse
    for i in range(numbers.shape[0]):
        sign, rest = words[i] >> np.uint32(24) & np.uint32(0x80), words[i] & _MAGNITUDE
        words[i] = rest
        small = numbers[i] + _FP8_ROUNDER
        odd = rest >> np.uint32(20) & np.uint32(1)
        code = (rest + np.uint32(0x7FFFF) + odd >> np.uint32(20)) - np.uint32(120 << 3)
        numbers[i] = small
        code = code if rest >= _FP8_NORMAL else words[i] - _FP8_ROUNDER_BITS
        codes[i] = np.uint8(sign | code)


def _encode_walk(  # type: ignore[no-untyped-def] # numba infers types
    bits,  # uint16 or uint32 [rows, kv_heads, k|v, dim]
    widen,  # uint32: the factor from `bits` to those of a float32
    codes,  # from `Slabs.of`
    largest,  # of all codes
    blocks,  # int64 [rows]
    slots,
):
    slabs, scales, floating, first, first_scale, apart = codes
    rows, heads, sides, dim = bits.shape
    parts = min(rows, 16)
    for part in numba.prange(parts):
        words = np.empty(dim, dtype=np.uint32)
        top = np.empty(1, dtype=np.uint32)
        for row in range(part * rows // parts, (part + 1) * rows // parts):
            for head in range(heads):
                for side in range(sides):
                    given = bits[row, head, side]
                    highest = np.uint32(0)
                    for i in range(dim):
                        words[i] = given[i] * widen
                        highest = max(highest, words[i] & _MAGNITUDE)
                    top[0] = highest
                    most = top.view(np.float32)[0]
                    at = slots[row] + side * apart
                    out = slabs[blocks[row], head, (first + at) * dim : (first + at + 1) * dim]
                    scale = most / largest
                    if most >= _MIN_MAGNITUDE and highest < _INFINITY:
                        _encode(words, largest / most, floating, out)
                    else:
                        out[:] = 0
                        scale = np.float32(0.0 if highest < _INFINITY else np.nan)
                    scales[blocks[row], head, first_scale + at] = scale


@inner
def decode_row(codes, scale, floating, words):  # type: ignore[no-untyped-def] # numba infers types
    """Write `codes` uint8 [dim] times `scale` into `words` uint32 [dim], as bits of float32."""
    numbers = words.view(np.float32)
    if not floating:
        for i in range(codes.shape[0]):
            numbers[i] = np.float32(np.int8(codes[i])) * scale
        return
    for i in range(codes.shape[0]):
        code = np.uint32(codes[i])
        words[i] = (code & np.uint32(0x7F)) << np.uint32(20)
        words[i] |= (code & np.uint32(0x80)) << np.uint32(24)
    for i in range(codes.shape[0]):
        numbers[i] = numbers[i] * _FP8_BIAS * scale


encode_rows = compiled(_encode_walk, parallel=True, strict=True)
