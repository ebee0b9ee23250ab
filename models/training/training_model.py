"""The decoder as it is trained: Qwen3's shape in plain PyTorch, with gradients.

Parameters carry the names of the Hugging Face files, so that a state dict is a checkpoint.
Rows are whole conversations from position 0, padded on the right: causal attention alone keeps
the padding out. Knows no tokenizer, no optimiser and no files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

ROPE_THETA = 10_000.0
NORM_EPS = 1e-6
_INITIAL_STD = 0.02
_PLAIN_LENGTH = 256  # up to here, scores are computed as they are written
_BACK_FREQUENCIES = 6  # of a head that looks back: the fastest ones, which tell neighbours apart
_BACK_NORM = 2.0  # puts 0.87 of such a head's attention on the token it looks for
_BACK_REST = 0.1  # of what its projections would be otherwise


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Sizes of a model; `context` is in tokens. Embedding and head share one matrix."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int = 2048

    @property
    def parameters(self) -> int:
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        layer = attention + 3 * self.ffn * self.hidden + 2 * self.hidden + 2 * self.head_dim
        return self.vocab * self.hidden + self.layers * layer + self.hidden


class TrainingModel(nn.Module):
    """Hidden states of rows of tokens, and logits of some of them."""

    def __init__(self, shape: TinyShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.model = _Decoder(shape)
        generator = torch.Generator().manual_seed(seed)
        out = _INITIAL_STD / (2 * shape.layers) ** 0.5
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=out if small else _INITIAL_STD, generator=generator)
        angles = _angles(shape)
        self._cos, self._sin = angles.cos(), angles.sin()
        self._look_back(generator)

    @torch.no_grad()
    def _look_back(self, generator: torch.Generator) -> None:
        """Half of the first layer's heads begin by looking 1, 2, 3, ... tokens back: from there
        it is a small step to what stood beside a word when it came before. Rows of names and
        their values are bound in 200 steps so, and were at chance after 500 without.

        All embeddings share one component; such a head's keys read only it, its queries read it
        turned back by the head's distance, so scores depend on the distance alone.
        """
        shared = torch.randn(self.shape.hidden, generator=generator) * _INITIAL_STD
        self.model.embed_tokens.weight += shared
        first = self.model.layers[0]
        assert isinstance(first, _Layer)
        first.self_attn.look_back(shared / shared.norm(), self._cos, self._sin)

    def forward(self, tokens: Tensor) -> Tensor:
        """Normalised hidden states [rows, length, hidden] of `tokens` [rows, length]."""
        length = tokens.shape[1]
        x: Tensor = self.model.embed_tokens(tokens)
        cos, sin = self._cos[:length], self._sin[:length]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        hidden: Tensor = self.model.norm(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., vocab] of `hidden` [..., hidden]."""
        return functional.linear(hidden, self.model.embed_tokens.weight)


class _Decoder(nn.Module):
    def __init__(self, shape: TinyShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = _Norm(shape.hidden)


class _Layer(nn.Module):
    def __init__(self, shape: TinyShape) -> None:
        super().__init__()
        self.input_layernorm = _Norm(shape.hidden)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = _Norm(shape.hidden)
        self.mlp = _Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class _Norm(nn.Module):
    """Root mean square norm, in its input's own kind of number."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        return functional.rms_norm(x, weight.shape, weight, NORM_EPS)


class _Attention(nn.Module):
    def __init__(self, shape: TinyShape) -> None:
        super().__init__()
        self._dim = shape.head_dim
        self._group = shape.heads // shape.kv_heads
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, wide, bias=False)
        self.k_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)
        self.q_norm = _Norm(shape.head_dim)
        self.k_norm = _Norm(shape.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        queries = rotate(self.q_norm(self._heads(self.q_proj(x))), cos, sin)
        keys = rotate(self.k_norm(self._heads(self.k_proj(x))), cos, sin)
        values = self._heads(self.v_proj(x))
        queries, keys = queries.to(values.dtype), keys.to(values.dtype)
        if self._group > 1:
            keys = keys.repeat_interleave(self._group, dim=1)
            values = values.repeat_interleave(self._group, dim=1)
        mixed = attend(queries, keys, values)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def look_back(self, along: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Aim half of the heads, head n at n + 1 tokens back, where all inputs have a part along
        `along` [hidden], of length 1."""
        key = torch.zeros(self._dim)
        key[: min(_BACK_FREQUENCIES, self._dim // 2)] = 1.0
        key /= key.norm()
        self.q_norm.weight.fill_(_BACK_NORM)
        self.k_norm.weight.fill_(_BACK_NORM)
        keys = self.k_proj.weight.view(-1, self._dim, len(along))  # [kv_heads, head_dim, hidden]
        queries = self.q_proj.weight.view(-1, self._dim, len(along))
        aimed = max(1, len(keys) // 2)
        for head in keys[:aimed]:
            head.mul_(_BACK_REST).add_(torch.outer(key, along))
        for back, head in enumerate(queries[: aimed * self._group], 1):
            query = rotate(key, cos[back], -sin[back])
            head.mul_(_BACK_REST).add_(torch.outer(query, along))

    def _heads(self, x: Tensor) -> Tensor:  # [rows, heads, length, head_dim]
        return x.view(*x.shape[:2], -1, self._dim).transpose(1, 2)


class _Mlp(nn.Module):
    def __init__(self, shape: TinyShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute causal attention of [rows, heads, length, head_dim]. On a CPU, torch's fused backward
    takes three times as long as plain products where rows are short and many."""
    length = queries.shape[-2]
    if length > _PLAIN_LENGTH:
        return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    scores = (queries * queries.shape[-1] ** -0.5) @ keys.mT
    later = torch.full((length, length), float("-inf"), dtype=scores.dtype).triu(1)
    shares = torch.softmax(scores + later, dim=-1, dtype=torch.float32)
    return shares.to(values.dtype) @ values


def _angles(shape: TinyShape) -> Tensor:
    """[context, head_dim]; the two halves of a head turn together."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.arange(shape.context)[:, None] * ROPE_THETA**-steps
    return torch.cat((angles, angles), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions (Su et al. 2021, arXiv:2104.09864) to `x` [..., length, head_dim]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin
