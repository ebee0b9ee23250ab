"""The experts of one layer on a GPU: two launches for all of them, whoever chose whom.

The host does not learn how many rows an expert has, so a step with a mixture can be captured
in a graph. Holds the layer's matrices, plain or quantised; immutable.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baton.engine.model.row_ops import Gating
from baton.engine.triton.experts import expert_matmul, sort_by_expert
from baton.engine.triton.quantized_experts import StackedCodes, quantized_expert_matmul


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """`Experts` as two tensors."""

    gate_up: Tensor | StackedCodes  # [experts, 2 ffn, hidden]
    down: Tensor | StackedCodes  # [experts, hidden, ffn]
    tile_rows: int = 0  # of `expert_matmul`

    def run(self, x: Tensor, chosen: Tensor, gating: Gating) -> tuple[Tensor, Tensor]:
        by_expert, offsets = sort_by_expert(chosen, len(self.down))
        rows = by_expert // chosen.shape[1]
        given = (self.gate_up, offsets, rows, self.tile_rows)
        inner = gating(_product(x.contiguous(), *given))
        return _product(inner, self.down, offsets, None, self.tile_rows), by_expert


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
