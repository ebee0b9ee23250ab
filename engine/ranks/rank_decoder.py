"""The decoder of one rank: its share of every matrix, and the sums over all ranks.

    attention ── output matrix ── sum over ranks ── + ── MLP ── down matrix ── sum over ranks ── +

Hidden states are complete and have the same bits on every rank; logits are those of the rank's own
tokens. Every rank must compute the same layouts in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

from baton.engine.execution.decoder_kernels import DecoderKernels
from baton.engine.model.decoder import Angles, Decoder
from baton.engine.model.step_layout import StepLayout
from baton.engine.model.weights import LayerWeights, Weights
from baton.engine.spec.model_spec import ModelSpec

SumOverRanks = Callable[[Tensor], Tensor]  # replaces a tensor by its sum over all ranks


class RankDecoder(Decoder):
    """`Decoder` with the weights of one rank, of a worker's model or of its draft model."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        kernels: DecoderKernels,
        tokens: range,
        sum_over_ranks: SumOverRanks,
    ) -> None:
        """Connect weights and kernels. `spec` describes the rank's share. `tokens`: the rank's
        part of the vocabulary, in the embedding and in the head."""
        fused_pass = kernels.fused_pass
        super().__init__(
            spec, weights, kernels.attention, kernels.gating, kernels.norms, fused_pass
        )
        self.tokens = tokens
        self._sum = sum_over_ranks

    def _embed(self, tokens: Tensor) -> Tensor:
        """Look up embeddings [rows, hidden]; those of other ranks' tokens are 0 before the sum."""
        own = tokens - self.tokens.start
        known = (own >= 0) & (own < len(self.tokens))
        rows = functional.embedding(own.clamp(0, len(self.tokens) - 1), self._weights.embedding)
        x = self._sum(rows.masked_fill_(~known[:, None], 0.0))
        scale = self._spec.embedding_scale
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype)

    def _attend(
        self, index: int, layer: LayerWeights, x: Tensor, angles: Angles, layout: StepLayout
    ) -> Tensor:
        return self._sum(super()._attend(index, layer, x, angles, layout).contiguous())

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        return self._sum(super()._mlp(layer, x).contiguous())
