"""Multiplication with a weight matrix, packed once for the CPU's matrix kernels.

oneDNN reads a packed matrix 1.5 to 2 times as fast as a plain one when a step has few rows
(decode); where torch has no packing for this machine, the plain product is used. Immutable.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

_PACKED_ROWS = 32  # rows per step that the packed order is chosen for


class Linear(Protocol):
    """A weight matrix [out, in], however its numbers are kept."""

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out], of the same kind of number."""
        ...


class Matrix:
    """`weight` [out, in] and an optional `bias` [out]. Keeps no plain copy where it packs."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._packed = _can_pack(weight)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
            if self._packed
            else weight
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]. With oneDNN on AVX-512 a row's result was measured not to
        depend on the other rows; elsewhere it may, by rounding."""
        if self._packed and x.shape[0] == 1 and x.dtype == torch.float32:
            # One row alone takes another kernel, which sums in another order.
            return self._multiply(x.expand(2, -1).contiguous())[:1]
        return self._multiply(x)

    def _multiply(self, x: Tensor) -> Tensor:
        if self._packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return out
        return functional.linear(x, self._weight, self._bias)


def _can_pack(weight: Tensor) -> bool:
    """These operators are torch's own (its compiler emits them), but not a promised API."""
    operators = torch.ops.mkldnn
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if not hasattr(operators, "_reorder_linear_weight"):
        return False
    if not hasattr(operators, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(operators._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
