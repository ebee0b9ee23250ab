"""Mixture of experts: the choice of each row's experts, and the products of all experts of a step.

    rows ── route ──▶ (experts, weights) ── sort by expert ──▶ one product an expert ──▶ sum

Every expert runs once a step, over all rows that chose it. A row's result is summed in the
order of its own choice, so it does not depend on the other rows. The module knows no layers and no
KV; the decoder owns the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from baton.engine.model.linear import Linear
from baton.engine.model.row_ops import Gating, in_whole_vectors
from baton.engine.spec.moe_spec import ExpertsSpec


class Experts(Protocol):
    """The experts of one layer, in any storage format."""

    def run(self, x: Tensor, chosen: Tensor, gating: Gating) -> tuple[Tensor, Tensor]:
        """Run the experts `chosen` int64 [rows, choices] on `x` [rows, hidden]. Return the outputs
        of all choices, expert by expert [rows choices, hidden], and the flat index in `chosen` of
        each, int64 [rows choices]."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of one mixture layer. `shared`: the expert that every row uses; None: none."""

    gate: Linear  # float32 [experts, hidden]
    correction: Tensor | None  # float32 [experts]
    experts: Experts
    shared: tuple[Linear, Linear] | None  # [2 shared ffn, hidden], [hidden, shared ffn]


@dataclass(frozen=True, slots=True)
class ListedExperts:
    """Experts with separate matrices, for a CPU."""

    gate_up: tuple[Linear, ...]  # each [2 ffn, hidden]
    down: tuple[Linear, ...]  # each [hidden, ffn]
    first: int | None = None  # of a rank's part of the layer's experts; None: they are all here

    def run(self, x: Tensor, chosen: Tensor, gating: Gating) -> tuple[Tensor, Tensor]:
        """Same as `Experts.run`. The outputs of experts of other ranks are 0, and come last."""
        flat, count = chosen.flatten(), len(self.down)
        if self.first is not None:
            own = flat - self.first
            flat = own.where((own >= 0) & (own < count), count)
        by_expert = flat.argsort(stable=True)
        sizes = flat.bincount(minlength=count).tolist()[:count]
        here = sum(sizes)
        inputs = x.index_select(0, by_expert[:here] // chosen.shape[1])
        outputs, start = x.new_empty((len(flat), x.shape[1])), 0
        outputs[here:] = 0
        for expert, size in enumerate(sizes):
            if size:
                rows = slice(start, start + size)
                inner = gating(self.gate_up[expert](inputs[rows]))
                outputs[rows] = self.down[expert](inner)
                start += size
        return outputs, by_expert


def mix(x: Tensor, weights: ExpertWeights, spec: ExpertsSpec, gating: Gating) -> Tensor:
    """Return the layer's output for `x` [rows, hidden], of the same shape and dtype."""
    logits = weights.gate(x.to(torch.float32))
    chosen, shares = route(logits, spec, weights.correction)
    outputs, by_expert = weights.experts.run(x, chosen, gating)
    positions = torch.empty_like(by_expert)
    positions[by_expert] = torch.arange(len(by_expert), device=x.device)
    mixed = functional.embedding_bag(  # gathers, scales and sums in one pass
        positions.view(chosen.shape), outputs, per_sample_weights=shares.to(x.dtype), mode="sum"
    )
    if weights.shared is not None:
        gate_up, down = weights.shared
        mixed += down(gating(gate_up(x)))
    return mixed


def route(
    logits: Tensor, spec: ExpertsSpec, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the experts of each row, int64 [rows, chosen], and their weights, float32.

    `logits` float32 [rows, experts]; `correction` [experts] is added to the scores for the
    choice alone (Wang et al. 2024, arXiv:2408.15664). With groups, the experts are divided into
    `spec.groups` equal ranges, and only those in the `spec.chosen_groups` best are candidates
    (DeepSeek-AI 2024, arXiv:2405.04434).
    """
    if spec.scoring == "sigmoid":  # one bit can change the choice
        scores = in_whole_vectors(torch.sigmoid, logits)
    else:
        scores = logits.softmax(dim=-1)
    ranks = scores if correction is None else scores + correction
    if spec.chosen_groups < spec.groups:
        ranks = ranks.masked_fill(~_in_best_groups(ranks, spec), float("-inf"))
    chosen = ranks.topk(spec.chosen, dim=-1).indices
    weights = scores.gather(1, chosen)
    if spec.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return chosen, weights * spec.scale


def _in_best_groups(ranks: Tensor, spec: ExpertsSpec) -> Tensor:
    """Return which experts are in the best groups, bool [rows, experts]."""
    grouped = ranks.view(len(ranks), spec.groups, -1)  # [rows, groups, members]
    best = grouped.topk(spec.group_best, dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(1, best.topk(spec.chosen_groups, dim=-1).indices, True)
    return kept[:, :, None].expand_as(grouped).flatten(1)
