"""The interface behind which a backend makes products of a model's weights.

A reader of weights knows how they are stored and nothing of processors; a backend knows its
processor and nothing of files. Implemented in `cpu` and in `triton`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from baton.engine.model.experts import Experts, ListedExperts
from baton.engine.model.linear import Linear
from baton.engine.model.quantized_weight import QuantizedWeight


class ExpertSource(Protocol):
    """The matrices of one layer's experts, in the form that a backend asks for. Each call reads
    them."""

    @property
    def count(self) -> int: ...

    @property
    def is_quantized(self) -> bool:
        """Whether the matrices are anything other than plain numbers."""
        ...

    def listed(self) -> ListedExperts:
        """One product for each matrix."""
        ...

    def stacked(self) -> tuple[Tensor, Tensor]:
        """Plain numbers: [experts, 2 ffn, hidden] and [experts, hidden, ffn]."""
        ...

    def quantized(self) -> tuple[Iterable[QuantizedWeight], Iterable[QuantizedWeight]]:
        """The experts' matrices [2 ffn, hidden] and [hidden, ffn], one by one."""
        ...


class MatrixBackend(Protocol):
    """Makes the products of one kind of processor."""

    @property
    def device(self) -> torch.device | None:
        """The device that tensors are read to; None: host memory."""
        ...

    def plain(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """The product with `weight` [out, in] and an optional `bias` [out]."""
        ...

    def quantized(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """The product with a quantised `weight`, of rows of `dtype`."""
        ...

    def experts(self, source: ExpertSource) -> Experts: ...
