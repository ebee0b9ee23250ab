"""The interface of the backends that prepare a model's weights for products.

The reader of weights knows their storage but no processor; a backend knows its processor but no
files. `cpu` and `triton` implement the interface.
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
    """The matrices of one layer's experts, in the format that a backend requests. Each call reads
    them from the files."""

    @property
    def count(self) -> int: ...

    @property
    def first(self) -> int | None:
        """Return the number of the first of a rank's part of the experts; None: they are all
        here."""
        ...

    @property
    def is_quantized(self) -> bool:
        """Return whether the matrices are quantised."""
        ...

    def listed(self) -> ListedExperts:
        """Return one product for each matrix."""
        ...

    def stacked(self) -> tuple[Tensor, Tensor]:
        """Return unquantised matrices: [experts, 2 ffn, hidden] and [experts, hidden, ffn]."""
        ...

    def quantized(self) -> tuple[Iterable[QuantizedWeight], Iterable[QuantizedWeight]]:
        """Return the experts' matrices [2 ffn, hidden] and [hidden, ffn], one by one."""
        ...


class MatrixBackend(Protocol):
    """The factory of products for one type of processor."""

    @property
    def device(self) -> torch.device | None:
        """Return the device that receives tensors; None: host memory."""
        ...

    def plain(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return the product with `weight` [out, in] and an optional `bias` [out]."""
        ...

    def quantized(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """Return the product of rows of `dtype` with a quantised `weight`."""
        ...

    def experts(self, source: ExpertSource) -> Experts: ...
