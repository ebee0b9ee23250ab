"""An EAGLE-3 head: one layer that predicts tokens from its target's hidden states.

    states of the target  ──fc──▶  features g          of each token, kept beside its KV
    slot i:  e = input_norm(embedding of token i)      g of token i - 1
             h = hidden_norm(g)
             qkv of cat(e, h); residual g, or h where `norm_before_residual`
             MLP ─▶ y, the hidden state before the last norm
    norm(y) ─▶ logits of token i + 1, over the draft vocabulary;  y is the g of slot i + 1 where
                                                                 the target has computed none yet

EAGLE-3 (Li et al. 2025, arXiv:2503.01840). Slot 0 has no g: no later row attends to it, and
positions are counted from slot 1, as heads are trained. Knows no batch and no sampling. Immutable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from baton.engine.model.attention import Attention
from baton.engine.model.linear import Linear
from baton.engine.model.rope import Rotary, rotate
from baton.engine.model.row_ops import Gating, Norms
from baton.engine.model.step_layout import StepLayout
from baton.engine.model.weights import MlpWeights
from baton.engine.spec.eagle3_spec import Eagle3Spec

FIRST_SLOT = 1  # the first that has features, and that rows attend to
# The logit of tokens outside the draft vocabulary: finite, so that a mask that admits these alone
# still leaves a token to draw, which the target then rejects.
OUTSIDE = -1e30


@dataclass(frozen=True, slots=True)
class Eagle3Weights:
    """Matrices are [out, in]."""

    embedding: Tensor  # [vocab, hidden]; the target's where the head has none
    fuse: Linear  # [hidden, 3 target hidden]
    input_norm: Tensor  # [hidden], of the embedding
    hidden_norm: Tensor  # [hidden], of the features
    qkv: Linear  # [(heads + 2 kv_heads) head_dim, 2 hidden]
    output: Linear  # [hidden, heads head_dim]
    mlp_norm: Tensor  # [hidden]
    mlp: MlpWeights
    final_norm: Tensor  # [hidden]
    head: Linear  # [draft vocab, hidden]
    target_ids: Tensor  # int64 [draft vocab]: the target's token of each draft token


class Eagle3Head:
    """One thread at a time may call it."""

    def __init__(
        self,
        spec: Eagle3Spec,
        weights: Eagle3Weights,
        attention: Attention,
        gating: Gating,
        norms: Norms,
    ) -> None:
        """`attention` is that of the head's layer group, from `FIRST_SLOT` on."""
        self._spec = spec
        self._layer = spec.layer
        self.weights = weights
        self._attention = attention
        self._gating = gating
        self._norms = norms
        self._rotary = Rotary(self._layer.rope, self._layer.rotary_dim)

    def features(self, states: Sequence[Tensor]) -> Tensor:
        """Return the features [rows, hidden] of the target's `states`, each [rows, target
        hidden], in the order of its layers."""
        return self.weights.fuse(torch.cat(list(states), dim=-1))

    def store(self, layout: StepLayout, features: Tensor) -> None:
        """Write the KV of rows whose `features` [rows, hidden] are those of the token before."""
        self._project(layout, features)

    def hidden(self, layout: StepLayout, features: Tensor) -> Tensor:
        """Same as `store`; returns the rows' hidden states y [rows, hidden]."""
        queries, residual = self._project(layout, features)
        weights = self.weights
        attended = self._attention.attend(0, queries, layout)
        part = weights.output(attended.flatten(1))
        eps = self._layer.norm_eps
        normed, x = self._norms.add_norm(part, residual, weights.mlp_norm, eps)
        return x + weights.mlp.down(self._gating(weights.mlp.gate_up(normed)))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [rows, vocab] over the target's vocabulary, of `hidden`'s y:
        `OUTSIDE` where the draft vocabulary lacks the token."""
        weights = self.weights
        small = weights.head(self._norm(hidden, weights.final_norm)).to(torch.float32)
        logits = small.new_full((len(small), self._layer.vocab_size), OUTSIDE)
        logits[:, weights.target_ids] = small
        return logits

    def _project(self, layout: StepLayout, features: Tensor) -> tuple[Tensor, Tensor]:
        """Write the rows' KV; return their queries and the residual."""
        spec, weights = self._layer, self.weights
        embedded = functional.embedding(layout.tokens, weights.embedding)
        normed = self._norm(features, weights.hidden_norm)
        both = torch.cat((self._norm(embedded, weights.input_norm), normed), dim=-1)
        qkv = weights.qkv(both).view(-1, spec.heads + 2 * spec.kv_heads, spec.head_dim)
        sizes = [spec.heads, spec.kv_heads, spec.kv_heads]
        queries, keys, values = torch.split(qkv, sizes, dim=1)
        positions = (layout.positions - FIRST_SLOT).clamp(min=0)
        angles = self._rotary.angles(positions, both.dtype)
        self._attention.write(0, rotate(keys, *angles), values, layout)
        residual = normed if self._spec.norm_before_residual else features
        return rotate(queries, *angles), residual

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._norms.norm(x, weight, self._layer.norm_eps)
