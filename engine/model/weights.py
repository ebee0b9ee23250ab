"""The weights of a decoder: the matrices and vectors of each layer.

Query, key and value are one matrix, gate and up another. The weights are immutable after loading;
only their reader knows how files store them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from baton.engine.model.experts import ExpertWeights
from baton.engine.model.linear import Linear, kind_of
from baton.engine.model.mla import LatentWeights


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """The weights of a dense MLP."""

    gate_up: Linear  # [2 ffn, hidden]
    down: Linear  # [hidden, ffn]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one decoder layer. Matrices are [out, in], with their biases; absent norms
    are None. Norms that the file stores without their 1 are float32 and include it."""

    input_norm: Tensor  # [hidden]
    qkv: Linear | LatentWeights  # [(heads + 2 kv_heads) head_dim, hidden]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: Linear  # [hidden, heads x size of a value]
    attention_norm: Tensor | None  # [hidden], of the attention's output
    mlp_norm: Tensor  # [hidden], of the MLP's input
    mlp: MlpWeights | ExpertWeights
    output_norm: Tensor | None  # [hidden], of the MLP's output


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a decoder."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    head: Linear  # [vocab, hidden]; where tied, of the embedding's values


def kind_of_weights(part: Any) -> tuple[object, ...]:
    """Return what distinguishes layers, or parts of them, that run different kernels: their types
    and the kinds of their products, at any depth. The number of experts is left out."""
    if callable(part):
        return (kind_of(part),)
    if isinstance(part, tuple):
        return tuple, frozenset(map(kind_of_weights, part))
    if is_dataclass(part):
        parts = (getattr(part, field.name) for field in fields(part))
        return type(part), *map(kind_of_weights, parts)
    return (type(part),)
