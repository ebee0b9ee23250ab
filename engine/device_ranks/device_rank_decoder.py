"""The decoder of one rank on a device: `RankDecoder`, with collective operations between devices.

    tokens of the leader ── broadcast ──▶ embedding ── layers, two sums each ──▶ hidden states
    hidden states ──▶ logits of the rank's own tokens ── gather ──▶ all logits, on every rank

Only the leader knows the tokens of a captured step, since the draw before it wrote them into the
device's memory. Everything else of a step's layout the host sends to each rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.device_ranks.collectives import Collectives
from baton.engine.execution.decoder_kernels import DecoderKernels
from baton.engine.model.weights import Weights
from baton.engine.ranks.rank_decoder import RankDecoder
from baton.engine.spec.model_spec import ModelSpec
from baton.engine.spec.rank_split import RankSplit


class DeviceRankDecoder(RankDecoder):
    """`RankDecoder` whose hidden states and logits are complete on every rank."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        kernels: DecoderKernels,
        vocab_size: int,
        collectives: Collectives,
    ) -> None:
        """`spec` describes the rank's share, `vocab_size` is that of the whole model."""
        shares = [
            RankSplit(collectives.ranks, rank).share(vocab_size)
            for rank in range(collectives.ranks)
        ]
        own = shares[collectives.rank]
        super().__init__(spec, weights, kernels, own, collectives.sum)
        self.collectives = collectives
        self._shares = [len(share) for share in shares]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [rows, vocab] of the whole vocabulary."""
        own = super().logits(hidden)
        width = max(self._shares)
        if own.shape[1] < width:  # shares differ by one token at most
            own = torch.nn.functional.pad(own, (0, width - own.shape[1]))
        parts = self.collectives.gather(own.contiguous())
        return torch.cat(
            [part[:, :share] for part, share in zip(parts, self._shares, strict=True)], dim=1
        )

    def _embed(self, tokens: Tensor) -> Tensor:
        return super()._embed(self.collectives.broadcast(tokens))
