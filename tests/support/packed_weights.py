"""Quantised matrices as checkpoints store them, packed entry by entry as each format is defined.

Each function returns the tensors of a module and the values that they stand for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ: which column lies at the i-th four bits


def to_int32(words: Iterable[int]) -> Tensor:
    """Python integers of 32 bits without sign, as the tensor that holds the same bits."""
    return torch.tensor([struct.unpack("i", struct.pack("I", word))[0] for word in words])


def packed_rows(
    table: Sequence[Sequence[int]], bits: int, order: Sequence[int] | None = None
) -> Tensor:
    """[[...]] of codes: each row's codes in words of 32 bits, the first in the lowest bits."""
    per_word = 32 // bits
    order = order or range(per_word)
    rows = []
    for given in table:
        row = list(given) + [0] * (-len(given) % per_word)
        words = [row[start : start + per_word] for start in range(0, len(row), per_word)]
        rows.append(sum(word[at] << (bits * i) for i, at in enumerate(order)) for word in words)
    return torch.stack([to_int32(row) for row in rows]).to(torch.int32)


def rounded(
    weight: Tensor, bits: int, group: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes from 0 [out, in], scales and zero points [out, in / group], and the values."""
    most = (1 << bits) - 1
    grouped = weight.view(weight.shape[0], -1, group)
    low, high = grouped.amin(2).clamp(max=-1e-6), grouped.amax(2).clamp(min=1e-6)
    if symmetric:
        scales = grouped.abs().amax(2) / (most // 2)
        zeros = torch.full_like(scales, most // 2 + 1)
    else:
        scales = (high - low) / most
        zeros = (-low / scales).round().clamp(1, most)
    scales = scales.to(torch.float16).float()
    codes = ((grouped / scales[..., None]).round() + zeros[..., None]).clamp(0, most)
    values = (codes - zeros[..., None]) * scales[..., None]
    return codes.flatten(1).int(), scales, zeros.int(), values.flatten(1)


def awq(weight: Tensor, group: int = 32) -> Packed:
    codes, scales, zeros, values = rounded(weight, 4, group, False)
    return {
        "qweight": packed_rows(codes.t().tolist(), 4, AWQ_ORDER),
        "qzeros": packed_rows(zeros.t().tolist(), 4, AWQ_ORDER),
        "scales": scales.t().contiguous().to(torch.float16),
    }, values


def gptq(
    weight: Tensor, bits: int = 4, group: int = 32, first: int = 1, order: Tensor | None = None
) -> Packed:
    """`first`: version 1 stores zero points less one. `order`: columns as act order sorts
    them."""
    order = torch.arange(weight.shape[1]) if order is None else order
    codes, scales, zeros, values = rounded(weight[:, order], bits, group, False)
    back = torch.argsort(order)
    return {
        "qweight": packed_rows(codes[:, back].tolist(), bits).t().contiguous(),
        "qzeros": packed_rows((zeros - first).t().tolist(), bits),
        "scales": scales.t().contiguous().to(torch.float16),
        "g_idx": (torch.arange(weight.shape[1]) // group)[back].int(),
    }, values[:, back]


def packed(weight: Tensor, bits: int = 4, group: int = 32, symmetric: bool = True) -> Packed:
    codes, scales, zeros, values = rounded(weight, bits, group, symmetric)
    tensors = {
        "weight_packed": packed_rows(codes.tolist(), bits),
        "weight_scale": scales.to(torch.bfloat16),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = packed_rows(zeros.t().tolist(), bits).t().contiguous()
    spread = scales.to(torch.bfloat16).float() / scales
    return tensors, values * spread.repeat_interleave(group, dim=1)


def int8(weight: Tensor) -> Packed:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes * scales


def fp8(weight: Tensor, rows: int = 1, columns: int = 0, name: str = "weight_scale_inv") -> Packed:
    columns = columns or weight.shape[1]
    high, wide = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    scales, codes = torch.empty(high, wide), torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    values = torch.empty_like(weight)
    for i in range(high):
        for j in range(wide):
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[part].abs().amax() / 448
            codes[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            values[part] = codes[part].float() * scales[i, j]
    return {"weight": codes, name: scales}, values
