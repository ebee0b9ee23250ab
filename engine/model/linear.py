"""Multiplication by a weight matrix: the interface, and its reference in torch.

A backend packs or quantises matrices in its own way (`MatrixBackend`); the decoder only knows
`Linear`. Values are immutable.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

_SLOW_ROWS = 2  # for at most so many, converting the matrix to float32 costs more


class Linear(Protocol):
    """A weight matrix [out, in] in any storage format."""

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` [rows, in]. Returns [rows, out] of the same dtype."""
        ...


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """An unquantised matrix that torch multiplies."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


class JoinedMatrix:
    """Matrices of different formats, concatenated from top to bottom."""

    def __init__(self, parts: list[Linear]) -> None:
        self.parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=1)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply `x` [rows, in] by `weight` [out, in] and add `bias` [out], all of one dtype. On a
    processor without fast bfloat16 products, bfloat16 rows are multiplied as float32."""
    slow = x.dtype == torch.bfloat16 and len(x) > _SLOW_ROWS and x.device.type == "cpu"
    if not slow or bfloat16_is_fast():
        return functional.linear(x, weight, bias)
    start = None if bias is None else bias.to(torch.float32)
    wide = functional.linear(x.to(torch.float32), weight.to(torch.float32), start)
    return wide.to(torch.bfloat16)


@cache
def bfloat16_is_fast() -> bool:
    """Return whether torch has matrix kernels for bfloat16 here (oneDNN's, from AVX-512 on)."""
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
