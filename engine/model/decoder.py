"""The decoder of every model family, configured by a `ModelSpec`.

Pre-norm layers of grouped-query attention and a gated MLP (Llama 2, Touvron et al. 2023,
arXiv:2307.09288; query and key norms as in Qwen3; output norms, soft caps and two rotary
tables as in Gemma 2 and 3, arXiv:2408.00118 and arXiv:2503.19786), or of latent attention and
mixtures of experts. The decoder knows no batch and no sampling; an attention backend owns the KV.
It is immutable after construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Protocol, Self

import torch
import torch.nn.functional as functional
from torch import Tensor

from baton.engine.model.attention import (
    Attention,
    HeadNorms,
    NormalisingAttention,
    RotatingAttention,
)
from baton.engine.model.experts import ExpertWeights, mix
from baton.engine.model.mla import LatentAttention, LatentWeights
from baton.engine.model.rope import Rotary, rotate
from baton.engine.model.row_ops import Gating, Norms, TorchNorms, torch_gating
from baton.engine.model.step_layout import StepLayout
from baton.engine.model.weights import LayerWeights, Weights, kind_of_weights
from baton.engine.spec.model_spec import ModelSpec

Angles = tuple[Tensor, Tensor]


class FusedPass(Protocol):
    """A call that computes all layers of a step with decode rows only: `DecodePass`."""

    def takes(self, layout: StepLayout, angles: Tensor) -> bool: ...

    def __call__(
        self, x: Tensor, normed: Tensor, angles: Angles, local: Angles, layout: StepLayout
    ) -> Tensor: ...


class Decoder:
    """The layers of a model, from tokens to logits. One thread at a time may call it."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        attention: Attention | LatentAttention,
        gating: Gating | None = None,
        norms: Norms | None = None,
        fused_pass: FusedPass | None = None,
    ) -> None:
        """Connect weights and backends. `gating` and `norms` None: torch's. `fused_pass` computes
        the steps that it accepts."""
        self._spec = spec
        self._weights = weights
        # Checked once: `isinstance` with a Protocol in each layer costs more than the call.
        self._latent = attention if isinstance(attention, LatentAttention) else None
        self._attention = None if isinstance(attention, LatentAttention) else attention
        self._rotating = attention if isinstance(attention, RotatingAttention) else None
        self._normalising = attention if isinstance(attention, NormalisingAttention) else None
        self._head_norms = [_head_norms(layer, spec.norm_eps) for layer in weights.layers]
        self._gating = gating or partial(torch_gating, activation=spec.activation)
        self._norms = norms or TorchNorms()
        self._fused_pass = fused_pass
        device = weights.embedding.device
        self._rotary = Rotary(spec.rope, spec.rotary_dim, device)
        local = spec.local_rope
        self._local_rotary = Rotary(local, spec.rotary_dim, device) if local else None

    def hidden(self, layout: StepLayout) -> Tensor:
        """Return final hidden states [rows, hidden], normalised; writes the rows' KV."""
        return self._through_layers(layout, (), [])

    def hidden_and_states(
        self, layout: StepLayout, before: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Same as `hidden`, with the hidden states [rows, hidden] before the layers `before`, in
        rising order, not normalised. The number of layers stands for the state after the last."""
        states: list[Tensor] = []
        return self._through_layers(layout, before, states), states

    def _through_layers(
        self, layout: StepLayout, before: Sequence[int], states: list[Tensor]
    ) -> Tensor:
        x = self._embed(layout.tokens)
        angles = self._rotary.angles(layout.positions, x.dtype)
        local = angles
        if self._local_rotary is not None:
            local = self._local_rotary.angles(layout.positions, x.dtype)
        windows = self._spec.attention.windows
        layers, eps = self._weights.layers, self._spec.norm_eps
        after = [layer.input_norm for layer in layers[1:]] + [self._weights.final_norm]
        normed = self._norm(x, layers[0].input_norm)
        fused_pass = None if before else self._fused_pass  # which shows no state between layers
        if fused_pass is not None and fused_pass.takes(layout, angles[0]):
            return fused_pass(x, normed, angles, local, layout)
        for index, layer in enumerate(layers):
            if index in before:
                states.append(x)
            turn = local if windows[index] else angles
            part = self._attend(index, layer, normed, turn, layout)
            part = self._output_norm(part, layer.attention_norm)
            normed, x = self._norms.add_norm(part, x, layer.mlp_norm, eps)
            part = self._output_norm(self._mlp(layer, normed), layer.output_norm)
            normed, x = self._norms.add_norm(part, x, after[index], eps)
        if len(layers) in before:
            states.append(x)
        return normed

    @property
    def layers(self) -> int:
        return len(self._weights.layers)

    def shortened(self, layers: int | None = None) -> Self:
        """Return a decoder of the first `layers`; None: of the fewest that include each kind: with
        and without a window, and each `kind_of_weights`. Its output is not text, but it runs every
        kernel."""
        weights, windows = self._weights, self._spec.attention.windows
        if layers is None:
            kinds = [
                (window > 0, kind_of_weights(layer))
                for window, layer in zip(windows, weights.layers, strict=True)
            ]
            layers = 1 + max(kinds.index(kind) for kind in set(kinds))
        short = copy(self)
        short._weights = replace(weights, layers=weights.layers[:layers])
        short._fused_pass = None  # it computes all layers
        return short

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [rows, vocab] of `hidden` [rows, hidden]."""
        logits = self._weights.head(hidden).to(torch.float32)
        cap = self._spec.logit_soft_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _embed(self, tokens: Tensor) -> Tensor:
        """Look up embeddings [rows, hidden]. The scale is rounded to the weights' dtype, as in
        Gemma's training."""
        x = functional.embedding(tokens, self._weights.embedding)
        scale = self._spec.embedding_scale
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype)

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        x: Tensor,  # [rows, hidden]
        angles: Angles,
        layout: StepLayout,
    ) -> Tensor:
        if self._latent is not None:
            assert isinstance(layer.qkv, LatentWeights)
            return layer.output(self._latent(index, layer.qkv, x, angles, layout))
        assert self._attention is not None and not isinstance(layer.qkv, LatentWeights)
        spec = self._spec
        qkv = layer.qkv(x)
        qkv = qkv.view(-1, spec.heads + 2 * spec.kv_heads, spec.head_dim)
        sizes = [spec.heads, spec.kv_heads, spec.kv_heads]
        queries = self._rotate_and_write(index, torch.split(qkv, sizes, dim=1), angles, layout)
        attended = self._attention.attend(index, queries, layout)
        return layer.output(attended.flatten(1))

    def _rotate_and_write(
        self, index: int, heads: tuple[Tensor, ...], angles: Angles, layout: StepLayout
    ) -> Tensor:
        """Write the KV of `heads`: queries, keys and values. Returns rotated queries."""
        queries, keys, values = heads
        norms = self._head_norms[index]
        if norms is not None:
            if self._normalising is not None:
                given = (queries, keys, values)
                return self._normalising.normalise_rotate_and_write(
                    index, given, norms, angles, layout
                )
            queries, keys = self._norm(queries, norms.queries), self._norm(keys, norms.keys)
        if self._rotating is not None:
            return self._rotating.rotate_and_write(index, queries, keys, values, angles, layout)
        assert self._attention is not None
        self._attention.write(index, rotate(keys, *angles), values, layout)
        return rotate(queries, *angles)

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        if isinstance(layer.mlp, ExpertWeights):
            assert self._spec.experts is not None
            return mix(x, layer.mlp, self._spec.experts, self._gating)
        return layer.mlp.down(self._gating(layer.mlp.gate_up(x)))

    def _output_norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._norm(x, weight)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._norms.norm(x, weight, self._spec.norm_eps)


def _head_norms(layer: LayerWeights, eps: float) -> HeadNorms | None:
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return HeadNorms(layer.q_norm, layer.k_norm, eps)
