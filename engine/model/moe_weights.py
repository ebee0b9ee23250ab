"""The weights of mixtures of experts and of latent attention, by the names in released files.

transformers 5 holds experts as stacked tensors in memory, but saves them one by one under
these names too. Knows how tensors are named, not how they are stored; keeps no state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.engine.checkpoint.weight_reader import Parts, WeightReader
from baton.engine.model.experts import Experts, ExpertWeights, ListedExperts
from baton.engine.model.mla import LatentWeights
from baton.engine.spec.moe_spec import ExpertsSpec, LatentSpec

_NAMES = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}  # family: place, gate, up, down
_USUAL = ("mlp", "gate_proj", "up_proj", "down_proj")


def read_expert_weights(
    reader: WeightReader, layer: str, family: str, hidden: int, spec: ExpertsSpec
) -> ExpertWeights:
    """Of `layer` ("model.layers.3."). The gate decides by small differences: it is kept and
    computed in float32. Raises ModelError as `WeightReader` does."""
    place, gate, up, down = _NAMES.get(family, _USUAL)
    base, exact = f"{layer}{place}.", reader.as_kind(torch.float32)
    ffn, shared, shared_ffn = spec.ffn_size, None, spec.shared_ffn_size
    if shared_ffn:
        name = f"{base}shared_experts."
        shared = (
            reader.matrix([(f"{name}{gate}", shared_ffn), (f"{name}{up}", shared_ffn)], hidden),
            reader.matrix([(f"{name}{down}", hidden)], shared_ffn),
        )
    names = [f"{base}experts.{expert}." for expert in range(spec.count)]
    pairs = [[(f"{name}{gate}", ffn), (f"{name}{up}", ffn)] for name in names]
    downs = [[(f"{name}{down}", hidden)] for name in names]
    correction = f"{base}gate.e_score_correction_bias"
    return ExpertWeights(
        gate=exact.matrix([(f"{base}gate", spec.count)], hidden),
        correction=exact.vector(correction, spec.count) if spec.correction else None,
        experts=_experts(reader, pairs, downs, hidden, ffn),
        shared=shared,
    )


def _experts(
    reader: WeightReader, pairs: Sequence[Parts], downs: Sequence[Parts], hidden: int, ffn: int
) -> Experts:
    """One matrix each of `pairs` and `downs` for every expert."""
    if reader.device is None:
        return ListedExperts(
            tuple(reader.matrix(pair, hidden) for pair in pairs),
            tuple(reader.matrix(part, ffn) for part in downs),
        )
    from baton.engine.triton.experts_backend import StackedExperts
    from baton.engine.triton.quantized_experts import stacked_codes

    count = len(downs)
    if reader.quantizes(downs[0], ffn):
        gate_ups = (reader.quantized(pair, hidden) for pair in pairs)
        shrinks = (reader.quantized(part, ffn) for part in downs)
        return StackedExperts(
            stacked_codes(gate_ups, count, reader.device),
            stacked_codes(shrinks, count, reader.device),
        )
    return StackedExperts(
        reader.dense([part for pair in pairs for part in pair], hidden).view(count, -1, hidden),
        reader.dense([part for parts in downs for part in parts], ffn).view(count, -1, ffn),
    )


def read_latent_weights(
    reader: WeightReader, layer: str, hidden: int, heads: int, spec: LatentSpec
) -> LatentWeights:
    """Of `layer`, without its output matrix. Raises ModelError as `WeightReader` does."""
    base, query_size = f"{layer}self_attn.", heads * spec.query_dim
    latent = (f"{base}kv_a_proj_with_mqa", spec.width)
    query_norm, query_up, first = None, None, (f"{base}q_proj", query_size)
    if spec.query_rank is not None:
        first = (f"{base}q_a_proj", spec.query_rank)
        query_norm = reader.vector(f"{base}q_a_layernorm.weight", spec.query_rank)
        query_up = reader.matrix([(f"{base}q_b_proj", query_size)], spec.query_rank)
    pair = spec.plain_dim + spec.value_dim
    return LatentWeights(
        inputs=reader.matrix([first, latent], hidden),
        query_norm=query_norm,
        query_up=query_up,
        latent_norm=reader.vector(f"{base}kv_a_layernorm.weight", spec.rank),
        up=reader.dense([(f"{base}kv_b_proj", heads * pair)], spec.rank).view(heads, pair, -1),
    )
