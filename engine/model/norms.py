"""Root-mean-square norms of a decoder, in plain torch (Zhang and Sennrich 2019,
arXiv:1910.07467), and the seam behind which a device has its own. Keeps no state.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as functional
from torch import Tensor


class Norms(Protocol):
    """Norms over the last axis, rounded once, after the weight."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x` [..., size] normalised, times `weight` [size]; of the kind of `x`."""
        ...

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum) of `x` and `residual` [rows, size]."""
        ...


class TorchNorms:
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dtype != x.dtype:  # kept in float32
            wide = x.to(weight.dtype)
            return functional.rms_norm(wide, weight.shape, weight, eps).to(x.dtype)
        return functional.rms_norm(x, weight.shape, weight, eps)

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = residual + x
        return self.norm(total, weight, eps), total
