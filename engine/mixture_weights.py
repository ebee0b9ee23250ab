"""The weights of mixtures of experts and of latent attention, by the names in released files.

transformers 5 holds experts as stacked tensors in memory, but saves them one by one under
these names too. Knows how tensors are named, not how they are stored; keeps no state.
"""

from __future__ import annotations

import torch

from baton.engine.experts import ExpertWeights
from baton.engine.latent import LatentWeights
from baton.engine.mixture_spec import ExpertsSpec, LatentSpec
from baton.engine.weight_reader import WeightReader

_NAMES = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}  # family: place, gate, up, down
_USUAL = ("mlp", "gate_proj", "up_proj", "down_proj")


def read_expert_weights(
    reader: WeightReader, layer: str, family: str, hidden: int, spec: ExpertsSpec
) -> ExpertWeights:
    """Of `layer` ("model.layers.3."). The gate decides by small differences: it is kept and
    computed in float32. Raises ModelError as `WeightReader` does."""
    place, gate, up, down = _NAMES.get(family, _USUAL)
    base, exact = f"{layer}{place}.", reader.as_kind(torch.float32)
    experts = [f"{base}experts.{expert}." for expert in range(spec.count)]
    ffn, shared, shared_ffn = spec.ffn_size, None, spec.shared_ffn_size
    if shared_ffn:
        name = f"{base}shared_experts."
        shared = (
            reader.matrix([(f"{name}{gate}", shared_ffn), (f"{name}{up}", shared_ffn)], hidden),
            reader.matrix([(f"{name}{down}", hidden)], shared_ffn),
        )
    correction = f"{base}gate.e_score_correction_bias"
    return ExpertWeights(
        gate=exact.matrix([(f"{base}gate", spec.count)], hidden),
        correction=exact.vector(correction, spec.count) if spec.correction else None,
        gate_up=tuple(
            reader.matrix([(f"{name}{gate}", ffn), (f"{name}{up}", ffn)], hidden)
            for name in experts
        ),
        down=tuple(reader.matrix([(f"{name}{down}", hidden)], ffn) for name in experts),
        shared=shared,
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
