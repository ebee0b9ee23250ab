"""The GPU's `MatrixBackend`, and all experts of one layer in two launches.

The host does not read how many rows an expert has, so a step with a mixture can be captured in a
graph. Values are immutable.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.model.linear import Linear, PlainMatrix
from baton.engine.model.matrix_backend import ExpertSource
from baton.engine.model.quantized_weight import QuantizedWeight
from baton.engine.model.row_ops import Gating
from baton.engine.triton.experts import expert_matmul, sort_by_expert
from baton.engine.triton.quantized import TritonQuantized
from baton.engine.triton.quantized_experts import (
    StackedCodes,
    quantized_expert_matmul,
    stacked_codes,
)


@dataclass(frozen=True, slots=True)
class TritonMatrices:
    """The factory of products on `device`: a GPU, or the CPU under Triton's interpreter."""

    device: torch.device

    def plain(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return PlainMatrix(weight, bias)

    def quantized(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """Return the product. Raises ModelError if the kernel does not support the weight's
        format; it supports every `dtype`."""
        return TritonQuantized(weight, bias, self.device)

    def experts(self, source: ExpertSource) -> StackedExperts:
        """Read the experts of a layer. Raises ModelError if the kernel does not support them."""
        if not source.is_quantized:
            return StackedExperts(*source.stacked(), first=source.first)
        gate_up, down = source.quantized()
        return StackedExperts(
            stacked_codes(gate_up, source.count, self.device),
            stacked_codes(down, source.count, self.device),
            first=source.first,
        )


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """`Experts` whose matrices are two tensors."""

    gate_up: Tensor | StackedCodes  # [experts, 2 ffn, hidden]
    down: Tensor | StackedCodes  # [experts, hidden, ffn]
    tile_rows: int = 0  # of `expert_matmul`
    first: int | None = None  # same as `ListedExperts.first`

    def run(self, x: Tensor, chosen: Tensor, gating: Gating) -> tuple[Tensor, Tensor]:
        """Same as `Experts.run`. The outputs of experts of other ranks are 0, and come last."""
        count = len(self.down)
        if self.first is not None:
            own = chosen - self.first
            chosen = own.where((own >= 0) & (own < count), count)
        by_expert, offsets = sort_by_expert(chosen, count)
        rows = by_expert // chosen.shape[1]
        given = (self.gate_up, offsets, rows, self.tile_rows)
        inner = gating(_product(x.contiguous(), *given))
        outputs = _product(inner, self.down, offsets, None, self.tile_rows)
        if self.first is not None:  # the product leaves those rows unwritten
            numbers = torch.arange(len(outputs), device=outputs.device)
            outputs.masked_fill_((numbers >= offsets[-1])[:, None], 0.0)
        return outputs, by_expert


def _product(
    x: Tensor,
    weights: Tensor | StackedCodes,
    offsets: Tensor,
    source: Tensor | None,
    tile_rows: int,
) -> Tensor:
    if isinstance(weights, Tensor):
        return expert_matmul(x, weights, offsets, source, tile_rows)
    return quantized_expert_matmul(x, weights, offsets, source, tile_rows)
