"""A quantised matrix in the engine's own format: codes, scales and zero points.

    value[o, i] = (code[o, i] - zero[o, i // group]) * scale[o, i // group]

4-bit codes are stored in pairs, the even column in the low half of a byte. The module knows no
files and no products; values are immutable. Rounding is to nearest (Dettmers et al. 2022,
arXiv:2208.07339, for rows; Frantar et al. 2022, arXiv:2210.17323, section 4, for groups).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

CodeDtype = Literal["int4", "int8", "fp8"]
GROUPS = (128, 64, 32)  # group sizes of quantisation at load, by preference
_INT4_ZERO = 8
_INT8_MAX = 127
_PART_ENTRIES = 1 << 18  # converted at a time, so that float32 copies stay small


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantised matrix [out, in]. `zeros` None: 8 for int4, 0 for int8 and fp8. `order` None:
    columns are not permuted; else column j of `codes` is column order[j] of the input."""

    code_dtype: CodeDtype
    codes: Tensor  # int4: uint8 [out, in / 2]; int8: int8 [out, in]; fp8: float8_e4m3fn [out, in]
    scales: Tensor  # float32 [out, groups]
    group: int  # columns; the last group may be shorter
    zeros: Tensor | None = None  # int16 [out, groups]
    order: Tensor | None = None  # int64 [in]

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def columns(self) -> int:
        return self.codes.shape[1] * (2 if self.code_dtype == "int4" else 1)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values [out, in] in the order of the input."""
        out = torch.empty((self.rows, self.columns), dtype=dtype)
        columns = slice(None) if self.order is None else self.order
        for rows in row_parts(self.rows, self.columns):
            out[rows, columns] = self.values(rows).to(dtype)
        return out

    def values(self, rows: slice) -> Tensor:
        """Return the values of some rows as float32, in the order of the codes."""
        codes = self.codes[rows]
        if self.code_dtype == "int4":
            codes = unpack_pairs(codes)
        zeros = self.zeros[rows] if self.zeros is not None else None
        values = codes.to(torch.float32)
        if zeros is not None:
            values -= self._spread(zeros.to(torch.float32))
        elif self.code_dtype == "int4":
            values -= _INT4_ZERO
        return values * self._spread(self.scales[rows])

    def _spread(self, per_group: Tensor) -> Tensor:
        """Repeat numbers per group [rows, groups] for every column [rows, in]."""
        if per_group.shape[1] == 1:
            return per_group
        return per_group.repeat_interleave(self.group, dim=1)[:, : self.columns]


def row_parts(rows: int, columns: int, of: int = 1) -> Iterator[slice]:
    """Divide the rows of a matrix into parts of a few MiB at most. Each part but the last has a
    multiple of `of` rows."""
    step = max(_PART_ENTRIES // columns // of, 1) * of
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def joined(parts: list[QuantizedWeight]) -> QuantizedWeight | None:
    """Concatenate matrices from top to bottom; None if their formats differ."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        same = (part.code_dtype, part.group, part.columns) == (
            first.code_dtype,
            first.group,
            first.columns,
        )
        if not same or (part.zeros is None) != (first.zeros is None):
            return None
        if not _same_order(part.order, first.order):
            return None
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return QuantizedWeight(
        first.code_dtype,
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        first.group,
        torch.cat(zeros) if zeros else None,
        first.order,
    )


def _same_order(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def group_for(columns: int) -> int | None:
    """Return the group size for int4 quantisation at load; None if none divides `columns`."""
    return next((group for group in GROUPS if columns % group == 0), None)


def quantize_int8(weight: Tensor) -> QuantizedWeight:
    """Quantise finite `weight` [out, in] with one scale per row and codes from -127 to 127."""
    scales = torch.empty((weight.shape[0], 1))
    codes = torch.empty(weight.shape, dtype=torch.int8)
    for rows in row_parts(*weight.shape):
        values = weight[rows].to(torch.float32)
        scales[rows] = _scale(values.abs().amax(dim=1, keepdim=True) / _INT8_MAX)
        codes[rows] = (values / scales[rows]).round_().clamp_(-_INT8_MAX, _INT8_MAX)
    return QuantizedWeight("int8", codes, scales, weight.shape[1])


def quantize_int4(weight: Tensor, group: int) -> QuantizedWeight:
    """Quantise finite `weight` [out, in] with a scale and a zero point per row and group, and
    codes from 0 to 15 over the group's range, which always includes 0. `group` divides `in`."""
    count, columns = weight.shape
    groups = columns // group
    scales = torch.empty((count, groups))
    zeros = torch.empty((count, groups), dtype=torch.int16)
    codes = torch.empty((count, columns // 2), dtype=torch.uint8)
    for rows in row_parts(count, columns):
        values = weight[rows].to(torch.float32).view(-1, groups, group)
        low, high = values.amin(dim=2).clamp_(max=0), values.amax(dim=2).clamp_(min=0)
        scales[rows] = _scale((high - low) / 15)
        zeros[rows] = (-low / scales[rows]).round_().clamp_(0, 15).to(torch.int16)
        found = (values / scales[rows, :, None]).round_() + zeros[rows, :, None]
        codes[rows] = pack_pairs(found.clamp_(0, 15).to(torch.uint8).view(-1, columns))
    return QuantizedWeight("int4", codes, scales, group, zeros)


def _scale(scale: Tensor) -> Tensor:
    """Round scales to bfloat16, which the products use. The scale is 1 for groups whose numbers
    are zero or too small to divide by. NaN stays NaN, so that the caller detects it."""
    return scale.masked_fill(scale <= 1e-30, 1.0).to(torch.bfloat16).to(torch.float32)


def pack_pairs(codes: Tensor) -> Tensor:
    """Pack uint8 codes from 0 to 15 [rows, columns] to [rows, columns / 2]."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def unpack_pairs(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)
