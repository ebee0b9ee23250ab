"""Multiplication by a quantised weight matrix on the CPU.

    few rows (decode):    torch's kernels, which read only the codes
    many rows (prefill):  dequantise a part of the matrix, multiply by it, and go on with the next

The row counts at which the faster method changes were measured (docs/quantization.md). Codes are
held once. If torch has no kernel for this processor, or nothing is compiled, the second method in
torch computes all rows. Values are immutable.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as functional
from torch import Tensor

from baton.engine.model.linear import product
from baton.engine.model.quantized_weight import GROUPS, QuantizedWeight, row_parts, unpack_pairs

_PART_ROWS = 1024  # of the matrix, unpacked at a time; with 256, products on AMX take twice as long
_MAX_FUSED_ROWS_INT8 = 32  # of a step; for more, unpacking is faster
_MAX_FUSED_ROWS_INT4 = 80
_TILES = (64, 32)  # rows per tile of torch's int4 kernel, on AVX-512 and AVX2

Product = Callable[[Tensor], Tensor]


class QuantizedMatrix:
    """The `Linear` of a quantised weight and an optional `bias` [out], for rows of `dtype`.
    `compiled`: use numba, which has to be installed, where it has a kernel."""

    switches_by_rows = True  # see `SwitchingLinear`

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        *,
        compiled: bool = True,
    ) -> None:
        self._order = weight.order
        self._bias = bias
        self._rows = weight.rows
        self.kernel = _product(weight, dtype or torch.bfloat16, compiled)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` [rows, in]; returns [rows, out]. The methods for few and for many rows
        differ by rounding."""
        if self._order is not None:
            x = x.index_select(1, self._order)
        out = self.kernel(x.contiguous())[:, : self._rows]
        return out.contiguous() if self._bias is None else out + self._bias


def _product(weight: QuantizedWeight, dtype: torch.dtype, compiled: bool) -> Product:
    if dtype == torch.bfloat16 and weight.code_dtype == "int8" and weight.scales.shape[1] == 1:
        if weight.zeros is None:
            return Int8Rows(weight)
    elif dtype == torch.bfloat16 and weight.code_dtype == "int4" and compiled:
        group, tile = _tile_group(weight), int4_tile_rows()
        if group and tile:
            return Int4Tiles(weight, group, tile)
    elif dtype == torch.bfloat16 and weight.code_dtype == "fp8" and compiled:
        return CompiledFp8(weight)
    return DequantizedProduct(weight)


class DequantizedProduct:
    """The product with any format, in torch."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty((x.shape[0], self._weight.rows))
        for first in range(0, self._weight.rows, _PART_ROWS):
            rows = slice(first, first + _PART_ROWS)
            out[:, rows] = product(x, self._weight.values(rows).to(x.dtype))
        return out


class Int8Rows:
    """The product with int8 and one scale per row. Codes are exact in bfloat16, and scales
    multiply the result. torch's kernel needs bfloat16 scales. If that rounds them (those of files;
    the engine's own are bfloat16), the kernel gets ones, and the exact scales multiply its
    result."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self._codes = weight.codes
        self._exact = weight.scales[:, 0].contiguous()
        narrow = self._exact.to(torch.bfloat16)
        self._finer = not torch.equal(narrow.to(torch.float32), self._exact)
        self._scales = torch.ones_like(narrow) if self._finer else narrow

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= _MAX_FUSED_ROWS_INT8:
            few: Tensor = torch.ops.aten._weight_int8pack_mm(x, self._codes, self._scales)
            return torch.mul(few, self._exact, out=few) if self._finer else few
        count, columns = self._codes.shape
        out = x.new_empty((x.shape[0], count))
        part = x.new_empty((min(_PART_ROWS, count), columns))
        for first in range(0, count, _PART_ROWS):
            rows = slice(first, min(first + _PART_ROWS, count))
            plain = part[: rows.stop - first].copy_(self._codes[rows])
            torch.mul(product(x, plain), self._exact[rows], out=out[:, rows])
        return out


class CompiledFp8:
    """The product with FP8, which a compiled kernel unpacks part by part."""

    def __init__(self, weight: QuantizedWeight) -> None:
        _compile_now()
        self._codes = weight.codes.view(torch.uint8)
        self._scales = weight.scales
        self._group = weight.group

    def __call__(self, x: Tensor) -> Tensor:
        from baton.engine.cpu.compiled import take_threads
        from baton.engine.cpu.unpack_numba import unpack_fp8

        take_threads()
        count, columns = self._codes.shape
        out = x.new_empty((x.shape[0], count))
        part = x.new_empty((min(_PART_ROWS, count), columns))
        for first in range(0, count, _PART_ROWS):
            rows = slice(first, min(first + _PART_ROWS, count))
            plain = part[: rows.stop - first]
            codes, scales = self._codes[rows].numpy(), self._scales[rows].numpy()
            unpack_fp8(codes, scales, self._group, _bits(plain))
            out[:, rows] = product(x, plain)
        return out


class Int4Tiles:
    """The product with int4 in the order of torch's kernel, which `unpack_numba` also reads."""

    def __init__(self, weight: QuantizedWeight, group: int, tile: int) -> None:
        self._group = group
        self._tile = tile
        spare = -weight.rows % tile
        repeat = min(weight.group, weight.columns) // group
        scales = weight.scales.repeat_interleave(repeat, dim=1)
        shifts = torch.zeros_like(scales)
        if weight.zeros is not None:
            shifts = (8 - weight.zeros.to(torch.float32)).repeat_interleave(repeat, dim=1) * scales
        pairs = torch.stack((scales.t(), shifts.t()), dim=-1)  # [groups, rows, 2]
        pairs = functional.pad(pairs, (0, 0, 0, spare))
        self._pairs = pairs.to(torch.bfloat16)
        packed = [
            _pack_tiles(weight.codes[rows], tile)
            for rows in row_parts(weight.rows, weight.columns, tile)
        ]
        self._packed = torch.cat(packed)  # uint8 [rows, in / 2], tile by tile
        _compile_now()

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= _MAX_FUSED_ROWS_INT4:
            out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x, self._packed, self._group, self._pairs
            )
            return out
        from baton.engine.cpu.compiled import take_threads
        from baton.engine.cpu.unpack_numba import unpack_tiles

        take_threads()
        columns, count = x.shape[1], self._packed.shape[0]
        tiles = self._packed.view(count // self._tile, columns, self._tile // 2)
        out = x.new_empty((x.shape[0], count))
        part = x.new_empty((columns, min(_PART_ROWS, count)))
        for first in range(0, count, _PART_ROWS):
            rows = slice(first, min(first + _PART_ROWS, count))
            if rows.stop - first < part.shape[1]:
                part = x.new_empty((columns, rows.stop - first))
            pairs = self._pairs[:, rows].to(torch.float32)
            scales, shifts = (pairs[:, :, which].contiguous().numpy() for which in range(2))
            own = tiles[first // self._tile : rows.stop // self._tile].numpy()
            unpack_tiles(own, scales, shifts, self._group, _bits(part))
            out[:, rows] = product(x, part.t())
        return out


@cache
def _compile_now() -> None:
    """Compile while the model loads, before serving."""
    from baton.engine.cpu.unpack_numba import unpack_fp8, unpack_tiles

    out, scales = torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(64, 64).numpy()
    codes = torch.zeros(1, 64, 32, dtype=torch.uint8).numpy()
    unpack_tiles(codes, scales, scales, 64, _bits(out))
    unpack_fp8(codes[0], scales, 32, _bits(out))


def _bits(plain: Tensor) -> object:
    """View a bfloat16 tensor as a numpy array of uint16."""
    return plain.view(torch.int16).numpy().view("uint16")


def _tile_group(weight: QuantizedWeight) -> int | None:
    """Return the group size for torch's kernel: 32, 64, 128 or 256; None: not supported."""
    if weight.columns % 2 or weight.columns % weight.group:
        return None
    if weight.group == 256:
        return 256
    return next((group for group in GROUPS if weight.group % group == 0), None)


def _pack_tiles(codes: Tensor, tile: int) -> Tensor:
    """Convert pairs of codes, uint8 [rows, in / 2], to the tiles of torch's kernel."""
    codes = functional.pad(codes, (0, 0, 0, -codes.shape[0] % tile))
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        unpack_pairs(codes).to(torch.int32), 1
    )
    return packed


@cache
def int4_tile_rows() -> int | None:
    """Return how many rows a tile of torch's kernel has, None if there is no such kernel, or
    `unpack_numba` cannot read its order: byte i of a column has rows i and tile / 2 + i."""
    operators = torch.ops.aten
    if not hasattr(operators, "_weight_int4pack_mm_for_cpu"):
        return None
    codes = torch.arange(2 * max(_TILES) * 32).mul(7).remainder(16).to(torch.uint8).view(-1, 32)
    try:
        packed = operators._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    except RuntimeError:  # torch was built without it
        return None
    for tile in _TILES:
        halves = codes.view(-1, 2, tile // 2, 32).permute(1, 0, 3, 2)  # [half, tile, in, row]
        if torch.equal(packed.flatten(), (halves[0] | (halves[1] << 4)).flatten()):
            return tile
    return None
