"""The decoder: one class for every dense family, driven by a `ModelSpec`.

Pre-norm layers of grouped-query attention and a gated MLP (Llama 2, Touvron et al. 2023,
arXiv:2307.09288; query and key norms as in Qwen3). Knows no batch and no sampling; the KV
lies behind an `Attention` backend. Immutable after construction.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from baton.engine.attention import Attention
from baton.engine.rope import Rotary, rotate
from baton.engine.spec import ModelSpec
from baton.engine.step_layout import StepLayout
from baton.engine.weights import LayerWeights, Weights


class Decoder:
    """Computes hidden states and logits. One thread at a time may call it."""

    def __init__(self, spec: ModelSpec, weights: Weights, attention: Attention) -> None:
        self._spec = spec
        self._weights = weights
        self._attention = attention
        self._rotary = Rotary(spec)

    def hidden(self, layout: StepLayout) -> Tensor:
        """Final hidden states [rows, hidden], normalised. Writes the rows' KV."""
        x = functional.embedding(layout.tokens, self._weights.embedding)
        angles = self._rotary.angles(layout.positions, x.dtype)
        for index, layer in enumerate(self._weights.layers):
            x = x + self._attend(index, layer, self._norm(x, layer.input_norm), angles, layout)
            x = x + _mlp(layer, self._norm(x, layer.post_norm))
        return self._norm(x, self._weights.final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [rows, vocab] of `hidden` [rows, hidden]."""
        return self._weights.head(hidden).to(torch.float32)

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        x: Tensor,  # [rows, hidden]
        angles: tuple[Tensor, Tensor],
        layout: StepLayout,
    ) -> Tensor:
        spec = self._spec
        qkv = layer.qkv(x)
        qkv = qkv.view(-1, spec.heads + 2 * spec.kv_heads, spec.head_dim)
        sizes = [spec.heads, spec.kv_heads, spec.kv_heads]
        queries, keys, values = torch.split(qkv, sizes, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = self._norm(queries, layer.q_norm), self._norm(keys, layer.k_norm)
        queries, keys = rotate(queries, *angles), rotate(keys, *angles)
        self._attention.write(index, keys, values, layout)
        attended = self._attention.attend(index, queries, layout)
        return layer.output(attended.flatten(1))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467)."""
        return functional.rms_norm(x, weight.shape, weight, self._spec.norm_eps)


def _mlp(layer: LayerWeights, x: Tensor) -> Tensor:
    gate, up = layer.gate_up(x).chunk(2, dim=-1)
    return layer.down(functional.silu(gate).mul_(up))
