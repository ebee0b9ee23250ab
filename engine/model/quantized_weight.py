"""A quantised matrix in the one form that all of ours take: codes, scales and zero points.

    value[o, i] = (code[o, i] - zero[o, i // group]) * scale[o, i // group]

Codes of 4 bits lie in pairs, the even column in the low half of a byte. Knows no files and
no products; values are immutable. Rounding is to the nearest code (Dettmers et al. 2022,
arXiv:2208.07339, for rows; Frantar et al. 2022, arXiv:2210.17323, section 4, for groups).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["int4", "int8", "fp8"]
GROUPS = (128, 64, 32)  # columns that share a scale where we choose; the first that divides
_MIDDLE = 8  # of 4 bits
_INT8_MOST = 127
_PART = 1 << 18  # entries of a matrix treated at a time, so that float32 copies stay small


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """`zeros` None: 8 for int4, 0 for int8 and fp8. `order` None: columns are not permuted;
    else column j here is column order[j] of the input."""

    kind: Kind
    codes: Tensor  # int4: uint8 [out, in / 2]; int8: int8 [out, in]; fp8: float8_e4m3fn [out, in]
    scales: Tensor  # float32 [out, groups]
    group: int  # columns of a group; the last one may be cut
    zeros: Tensor | None = None  # int16 [out, groups]
    order: Tensor | None = None  # int64 [in]

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def columns(self) -> int:
        return self.codes.shape[1] * (2 if self.kind == "int4" else 1)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values [out, in] in the order of the input."""
        out = torch.empty((self.rows, self.columns), dtype=dtype)
        columns = slice(None) if self.order is None else self.order
        for rows in row_parts(self.rows, self.columns):
            out[rows, columns] = self.values(rows).to(dtype)
        return out

    def values(self, rows: slice) -> Tensor:
        """Of some rows, as float32, in the order of the codes."""
        codes = self.codes[rows]
        if self.kind == "int4":
            codes = unpack_pairs(codes)
        zeros = self.zeros[rows] if self.zeros is not None else None
        values = codes.to(torch.float32)
        if zeros is not None:
            values -= self._spread(zeros.to(torch.float32))
        elif self.kind == "int4":
            values -= _MIDDLE
        return values * self._spread(self.scales[rows])

    def _spread(self, per_group: Tensor) -> Tensor:
        """[rows, groups] to [rows, in]."""
        if per_group.shape[1] == 1:
            return per_group
        return per_group.repeat_interleave(self.group, dim=1)[:, : self.columns]


def row_parts(rows: int, columns: int, of: int = 1) -> Iterator[slice]:
    """The rows of a matrix in parts of a few MiB at most, each but the last a multiple of
    `of`."""
    step = max(_PART // columns // of, 1) * of
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def joined(parts: list[QuantizedWeight]) -> QuantizedWeight | None:
    """One matrix of several, from top to bottom; None where their forms differ."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        same = (part.kind, part.group, part.columns) == (first.kind, first.group, first.columns)
        if not same or (part.zeros is None) != (first.zeros is None):
            return None
        if not _same_order(part.order, first.order):
            return None
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return QuantizedWeight(
        first.kind,
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
    """The group of a matrix that we quantise to int4; None where no group divides it."""
    return next((group for group in GROUPS if columns % group == 0), None)


def quantize_int8(weight: Tensor) -> QuantizedWeight:
    """One scale per row, codes -127 to 127. `weight` [out, in], finite."""
    scales = torch.empty((weight.shape[0], 1))
    codes = torch.empty(weight.shape, dtype=torch.int8)
    for rows in row_parts(*weight.shape):
        values = weight[rows].to(torch.float32)
        scales[rows] = _scale(values.abs().amax(dim=1, keepdim=True) / _INT8_MOST)
        codes[rows] = (values / scales[rows]).round_().clamp_(-_INT8_MOST, _INT8_MOST)
    return QuantizedWeight("int8", codes, scales, weight.shape[1])


def quantize_int4(weight: Tensor, group: int) -> QuantizedWeight:
    """A scale and a zero point per row and group, codes 0 to 15 over the group's range, which
    always takes in nought. `weight` [out, in], finite; `group` divides `in`."""
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
    """Rounded to bfloat16, which the products take; 1 for groups of nothing but noughts, or
    of numbers too small to divide by. NaN stays, so that it can be seen."""
    return scale.masked_fill(scale <= 1e-30, 1.0).to(torch.bfloat16).to(torch.float32)


def pack_pairs(codes: Tensor) -> Tensor:
    """uint8 [rows, columns] of 0 to 15, to [rows, columns / 2]."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def unpack_pairs(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)
