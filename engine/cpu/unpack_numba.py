"""Dequantises codes to bfloat16 with Numba, for products with many rows.

Each function fills a part of a matrix that fits into a core's cache, as bits of bfloat16, rounded
to nearest. The module needs numba, which is optional, and keeps no state.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from baton.engine.cpu.compiled import compiled, inner


@inner(inline="always")
def _bfloat16(bits):  # type: ignore[no-untyped-def]  # uint32 of a float32
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


def _tiles(  # type: ignore[no-untyped-def] # numba infers types
    tiles,  # uint8 [tile, in, rows / 2]: rows of the matrix, packed by `linear_quantized`
    scales,  # float32 [groups, rows]
    shifts,  # float32 [groups, rows]: value = (code - 8) * scale + shift
    group,
    out,  # uint16 [in, tiles * rows]
):
    columns, half = tiles.shape[1], tiles.shape[2]
    rows = 2 * half
    for job in numba.prange(tiles.shape[0] * (columns // group)):
        tile, g = job % tiles.shape[0], job // tiles.shape[0]
        first = tile * rows
        scale, shift = scales[g, first : first + rows], shifts[g, first : first + rows]
        values = np.empty(rows, dtype=np.float32)
        bits = values.view(np.uint32)
        for column in range(g * group, (g + 1) * group):
            pairs = tiles[tile, column]
            # The compiler vectorises short loops with one operation each.
            for i in range(half):
                values[i] = np.float32(np.int32(pairs[i]) & 15)
            for i in range(half):
                values[half + i] = np.float32(np.int32(pairs[i]) >> 4)
            for i in range(rows):
                values[i] = (values[i] - np.float32(8)) * scale[i] + shift[i]
            target = out[column, first : first + rows]
            for i in range(rows):
                target[i] = _bfloat16(bits[i])


def _fp8(  # type: ignore[no-untyped-def] # numba infers types
    codes,  # uint8 [rows, in]: E4M3, without NaN
    scales,  # float32 [rows, groups]
    group,
    out,  # uint16 [rows, in]
):
    """Decode FP8 by shifting sign, exponent and fraction into a float32, whose exponent is then
    120 too small."""
    rows, columns = codes.shape
    for row in numba.prange(rows):
        values = np.empty(group, dtype=np.float32)
        bits = values.view(np.uint32)
        for g in range(scales.shape[1]):
            first, end = g * group, min((g + 1) * group, columns)
            scale = scales[row, g] * np.float32(2.0**120)
            for i in range(end - first):
                code = np.uint32(codes[row, first + i])
                bits[i] = ((code & np.uint32(0x80)) << np.uint32(24)) | (
                    (code & np.uint32(0x7F)) << np.uint32(20)
                )
            for i in range(end - first):
                values[i] *= scale
            for i in range(end - first):
                out[row, first + i] = _bfloat16(bits[i])


unpack_tiles: Any = compiled(_tiles, parallel=True)
unpack_fp8: Any = compiled(_fp8, parallel=True)
