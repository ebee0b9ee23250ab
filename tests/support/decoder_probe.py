"""The parts that a decoder was built of, for tests of which kernels compute, and of what they give.

Serving never asks a `Decoder`, or the decoder of several ranks, for its parts, so they stay
private; of all tests and stories only this module reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.engine.execution.runner import StepDecoder
from baton.engine.model.attention import Attention
from baton.engine.model.decoder import Decoder, FusedPass
from baton.engine.model.mla import LatentAttention
from baton.engine.model.row_ops import Gating, Norms
from baton.engine.model.weights import Weights
from baton.engine.ranks.leading_decoder import LeadingDecoder
from baton.engine.ranks.rank_decoder import RankDecoder, SumOverRanks
from baton.engine.spec.model_spec import ModelSpec
from baton.engine.speculation.draft_model import DraftDecoder, DraftModel


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """The arguments of a `Decoder`, as it keeps them."""

    spec: ModelSpec
    weights: Weights
    attention: Attention | LatentAttention
    gating: Gating
    norms: Norms
    fused_pass: FusedPass | None


def decoder_of(decoder: StepDecoder | DraftDecoder) -> Decoder:
    """Return the decoder of this process: of the leader's rank, where ranks share a model."""
    own: object = decoder._own if isinstance(decoder, LeadingDecoder) else decoder
    assert isinstance(own, Decoder)
    return own


def parts_of(decoder: StepDecoder | DraftDecoder) -> DecoderParts:
    """Return the parts of the decoder of this process."""
    own = decoder_of(decoder)
    attention: Attention | LatentAttention | None = own._attention
    if attention is None:
        attention = own._latent
    assert attention is not None
    return DecoderParts(
        own._spec, own._weights, attention, own._gating, own._norms, own._fused_pass
    )


def draft_parts(draft: DraftModel) -> DecoderParts:
    """Return the parts of a draft model's decoder in this process."""
    return parts_of(draft._decoder)


def sum_over_ranks(decoder: StepDecoder) -> SumOverRanks:
    """Return the sum that the decoder of the leader's rank takes part in."""
    own = decoder_of(decoder)
    assert isinstance(own, RankDecoder)
    return own._sum


@contextmanager
def with_fused_pass(decoder: StepDecoder, fused_pass: FusedPass | None) -> Iterator[None]:
    """Let the decoder of this process compute with `fused_pass`; None: layer by layer."""
    own = decoder_of(decoder)
    before, own._fused_pass = own._fused_pass, fused_pass
    try:
        yield
    finally:
        own._fused_pass = before
