"""The experts of one layer on a GPU: two launches for all of them, whoever chose whom.

The host does not learn how many rows an expert has, so a step with a mixture can be captured
in a graph. Holds the layer's matrices; immutable.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baton.engine.experts import Gating
from baton.engine.triton_experts import expert_matmul, sort_by_expert


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """`Experts` as two tensors."""

    gate_up: Tensor  # [experts, 2 ffn, hidden]
    down: Tensor  # [experts, hidden, ffn]

    def run(self, x: Tensor, chosen: Tensor, gating: Gating) -> tuple[Tensor, Tensor]:
        by_expert, offsets = sort_by_expert(chosen, len(self.down))
        rows = by_expert // chosen.shape[1]
        inner = gating(expert_matmul(x.contiguous(), self.gate_up, offsets, rows))
        return expert_matmul(inner, self.down, offsets), by_expert
