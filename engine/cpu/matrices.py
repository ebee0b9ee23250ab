"""The CPU's `MatrixBackend`: products packed for the host's processor. Immutable."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.cpu.linear import CpuMatrix
from baton.engine.cpu.linear_quantized import QuantizedMatrix
from baton.engine.model.experts import ListedExperts
from baton.engine.model.linear import Linear
from baton.engine.model.matrix_backend import ExpertSource
from baton.engine.model.quantized_weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class CpuMatrices:
    """Makes products of weights in host memory."""

    batch_invariant: bool = False  # see `CpuMatrix`

    @property
    def device(self) -> None:
        return None

    def plain(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return CpuMatrix(weight, bias, batch_invariant=self.batch_invariant)

    def quantized(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        return QuantizedMatrix(weight, bias, dtype)

    def experts(self, source: ExpertSource) -> ListedExperts:
        return source.listed()
