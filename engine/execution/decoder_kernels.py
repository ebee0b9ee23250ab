"""The kernels that a runner computes with, as one set per backend."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.model.attention import Attention
from baton.engine.model.decoder import Decoder, FusedPass
from baton.engine.model.mla import LatentAttention
from baton.engine.model.row_ops import Gating, Norms
from baton.engine.model.weights import Weights
from baton.engine.sampling.draw_plan import Sampler, sample_on_host
from baton.engine.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DecoderKernels:
    """The kernels of one backend; the defaults are torch's."""

    attention: Attention | LatentAttention
    gating: Gating | None = None
    norms: Norms | None = None
    fused_pass: FusedPass | None = None
    sampler: Sampler = sample_on_host

    def decoder(self, spec: ModelSpec, weights: Weights) -> Decoder:
        """Return the decoder of `weights` that computes with these kernels."""
        return Decoder(spec, weights, self.attention, self.gating, self.norms, self.fused_pass)
