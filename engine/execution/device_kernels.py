"""Triton's kernels for a model, as one set.

The draws of an eager step use the same kernels as the graphs: a draw is the same whether its step
runs as a graph or eagerly, which depends on the batch. Keeps no state.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from baton.engine.deterministic.batch_invariant_weights import with_invariant_products
from baton.engine.execution.decode_graph import BUCKETS
from baton.engine.execution.decoder_kernels import DecoderKernels
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.weights import Weights
from baton.engine.sampling.draw_adjustments import Adjustments
from baton.engine.sampling.draw_logprobs import LogprobBuffers, drawn_with_logprobs, logprob_counts
from baton.engine.sampling.draw_plan import DrawPlan
from baton.engine.sampling.draw_rules import DrawRules
from baton.engine.sampling.mask_words import MaskWords
from baton.engine.scheduling.batch import Drawn
from baton.engine.spec.model_spec import ModelSpec
from baton.engine.triton.adjust import adjust_logits, find_logprobs
from baton.engine.triton.attention_backend import TritonAttention
from baton.engine.triton.decode_buffers import DecodeLimits
from baton.engine.triton.gate import gated
from baton.engine.triton.mla_backend import TritonLatentAttention
from baton.engine.triton.norm import TritonNorms
from baton.engine.triton.sampling import draw_tokens


def device_kernels(
    spec: ModelSpec, pool: KvPool, max_rows: int, context: int, *, deterministic: bool
) -> DecoderKernels:
    """Return Triton's kernels for a model, or a rank's share of one, over `pool`."""
    limits = DecodeLimits(max(max_rows, BUCKETS[-1]), context)
    attention: TritonAttention | TritonLatentAttention
    if spec.latent is None:
        attention = TritonAttention(
            pool, spec.attention, spec.heads, limits, deterministic=deterministic
        )
    else:
        scale = spec.attention.scale
        attention = TritonLatentAttention(
            pool, spec.latent, spec.heads, scale, limits, deterministic=deterministic
        )
    gating = partial(gated, activation=spec.activation)
    return DecoderKernels(attention, gating, TritonNorms(), sampler=sample_on_device)


def invariant_weights(weights: Weights) -> Weights:
    """Return `weights` with batch-invariant products. Raises ModelError for a matrix that has
    none."""
    made: Weights = with_invariant_products(weights)
    return made


def sample_on_device(logits: Tensor, plan: DrawPlan) -> list[Drawn]:
    """Draw one token for each draw of `plan` from finite float32 `logits` [drawing, vocab], which
    may be overwritten."""
    rows, draws, device = plan.logit_rows(logits), plan.draws, logits.device
    if not draws:
        return []
    if plan.groups.adjusted:
        adjust_logits(rows, Adjustments.of(draws).to(device))
    tokens = torch.empty(len(draws), dtype=torch.int64, device=device)
    finite = torch.empty(len(draws), dtype=torch.int8, device=device)
    masks = MaskWords.of(draws, rows.shape[1]).to(device) if plan.groups.masked else None
    draw_tokens(rows, DrawRules.of(draws).to(device), tokens, finite, masks)
    counts = logprob_counts(draws, rows.shape[1])
    buffers = LogprobBuffers.on(device, len(draws) if plan.groups.with_logprobs else 0)
    if plan.groups.with_logprobs:
        find_logprobs(rows, tokens, torch.tensor(counts, device=device), buffers)
        buffers = buffers.to(torch.device("cpu"))
    drawn = zip(draws, tokens.tolist(), counts, strict=True)
    return [drawn_with_logprobs(*each, row, buffers) for row, each in enumerate(drawn)]
