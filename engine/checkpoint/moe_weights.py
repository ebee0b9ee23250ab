"""Reads the weights of experts and of multi-head latent attention by their tensor names.

transformers 5 stacks experts in memory, but saves them one by one, under the same names. The
module knows the names of tensors, not their storage; it keeps no state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.checkpoint.weight_reader import Parts, WeightReader
from baton.engine.model.experts import ExpertWeights, ListedExperts
from baton.engine.model.mla import LatentWeights
from baton.engine.model.quantized_weight import QuantizedWeight
from baton.engine.spec.moe_spec import ExpertsSpec, LatentSpec

_NAMES = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}  # family: module, gate, up, down
_USUAL = ("mlp", "gate_proj", "up_proj", "down_proj")


def read_expert_weights(
    reader: WeightReader, layer: str, family: str, hidden: int, spec: ExpertsSpec
) -> ExpertWeights:
    """Read the mixture of `layer` ("model.layers.3."). Raises ModelError like `WeightReader`.

    The gate stays in float32, since small differences decide its choice.
    """
    prefix, gate, up, down = _NAMES.get(family, _USUAL)
    base, exact = f"{layer}{prefix}.", reader.with_dtype(torch.float32)
    ffn, shared, shared_ffn = spec.ffn_size, None, spec.shared_ffn_size
    if shared_ffn:
        name = f"{base}shared_experts."
        shared = (
            reader.matrix([(f"{name}{gate}", shared_ffn), (f"{name}{up}", shared_ffn)], hidden),
            reader.matrix([(f"{name}{down}", hidden)], shared_ffn),
        )
    held = range(spec.count) if spec.held is None else range(*spec.held)
    names = [f"{base}experts.{expert}." for expert in held]
    pairs = [[(f"{name}{gate}", ffn), (f"{name}{up}", ffn)] for name in names]
    downs = [[(f"{name}{down}", hidden)] for name in names]
    first = held.start if len(held) < spec.count else None
    correction = f"{base}gate.e_score_correction_bias"
    return ExpertWeights(
        gate=exact.matrix([(f"{base}gate", spec.count)], hidden),
        correction=exact.vector(correction, spec.count) if spec.correction else None,
        experts=reader.matrices.experts(_StoredExperts(reader, pairs, downs, hidden, ffn, first)),
        shared=shared,
    )


@dataclass(frozen=True, slots=True)
class _StoredExperts:
    """The `ExpertSource` of one layer. Each expert has one matrix of `gate_ups` and of `downs`."""

    reader: WeightReader
    gate_ups: Sequence[Parts]
    downs: Sequence[Parts]
    hidden: int
    ffn: int
    first: int | None = None  # same as `ListedExperts.first`

    @property
    def count(self) -> int:
        return len(self.downs)

    @property
    def is_quantized(self) -> bool:
        return self.reader.quantizes(self.downs[0], self.ffn)

    def listed(self) -> ListedExperts:
        return ListedExperts(
            tuple(self.reader.matrix(parts, self.hidden) for parts in self.gate_ups),
            tuple(self.reader.matrix(parts, self.ffn) for parts in self.downs),
            self.first,
        )

    def stacked(self) -> tuple[Tensor, Tensor]:
        gate_ups = [part for parts in self.gate_ups for part in parts]
        downs = [part for parts in self.downs for part in parts]
        return (
            self.reader.dense(gate_ups, self.hidden).view(self.count, -1, self.hidden),
            self.reader.dense(downs, self.ffn).view(self.count, -1, self.ffn),
        )

    def quantized(self) -> tuple[Iterator[QuantizedWeight], Iterator[QuantizedWeight]]:
        return (
            (self.reader.quantized(parts, self.hidden) for parts in self.gate_ups),
            (self.reader.quantized(parts, self.ffn) for parts in self.downs),
        )


def read_latent_weights(
    reader: WeightReader, layer: str, hidden: int, heads: int, spec: LatentSpec
) -> LatentWeights:
    """Read the attention of `layer`, without its output matrix. Raises ModelError like
    `WeightReader`."""
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
