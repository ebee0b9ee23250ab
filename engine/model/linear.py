"""Multiplication by a weight matrix: the interface, and its reference in torch.

A backend packs or quantises matrices in its own way (`MatrixBackend`); the decoder only knows
`Linear`. Values are immutable.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as functional
from torch import Tensor

_SLOW_ROWS = 2  # for at most so many, converting the matrix to float32 costs more


class Linear(Protocol):
    """A weight matrix [out, in] in any storage format."""

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` [rows, in]. Returns [rows, out] of the same dtype."""
        ...


@runtime_checkable
class CompositeLinear(Protocol):
    """A `Linear` that computes by others."""

    @property
    def parts(self) -> Sequence[Linear]: ...


@runtime_checkable
class SwitchingLinear(Protocol):
    """A `Linear` that may have one kernel for few rows and another for many. They may agree in
    nearly all of their rounded results, so that no measurement finds the difference reliably."""

    @property
    def switches_by_rows(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """An unquantised matrix that torch multiplies."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]

    @property
    def switches_by_rows(self) -> bool:
        """Return whether `product` changes its method by the number of rows."""
        return _is_slow(self.weight) and not bfloat16_is_fast()

    def __call__(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


class JoinedMatrix:
    """Matrices of different formats, concatenated from top to bottom."""

    def __init__(self, parts: list[Linear]) -> None:
        self.parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=1)


def kind_of(linear: Linear) -> Hashable:
    """Return what distinguishes products of one shape that use different kernels: the type, and
    those of the products that it computes by."""
    if isinstance(linear, CompositeLinear):
        return type(linear), *map(kind_of, linear.parts)
    return type(linear)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply `x` [rows, in] by `weight` [out, in] and add `bias` [out], all of one dtype. On a
    processor without fast bfloat16 products, bfloat16 rows are multiplied as float32."""
    if not _is_slow(x) or len(x) <= _SLOW_ROWS or bfloat16_is_fast():
        return functional.linear(x, weight, bias)
    start = None if bias is None else bias.to(torch.float32)
    wide = functional.linear(x.to(torch.float32), weight.to(torch.float32), start)
    return wide.to(torch.bfloat16)


def _is_slow(numbers: Tensor) -> bool:
    """Return whether products with these are slow, unless `bfloat16_is_fast`."""
    return numbers.dtype == torch.bfloat16 and numbers.device.type == "cpu"


@cache
def bfloat16_is_fast() -> bool:
    """Return whether torch has matrix kernels for bfloat16 here (oneDNN's, from AVX-512 on)."""
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
