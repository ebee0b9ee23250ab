"""Rotary position embedding: the angles of positions, and the rotation of queries and keys.

The formulas are those of transformers (`modeling_rope_utils`), whose sources are RoPE
(Su et al. 2021, arXiv:2104.09864), linear interpolation (Chen et al. 2023, arXiv:2306.15595),
NTK-aware scaling, YaRN (Peng et al. 2023, arXiv:2309.00071), LongRoPE (Ding et al. 2024,
arXiv:2402.13753) and the Llama 3.1 release.
Holds the frequencies of one model; no state changes after construction.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as functional
from torch import Tensor

from baton.engine.model.row_ops import VECTOR_COLUMNS, in_whole_vectors
from baton.engine.spec.rope_spec import RopeSpec, yarn_magnitude


class Rotary:
    """The cosines and sines of a step's positions.

    `dynamic` scaling depends on the sequence length, but a paged cache cannot rotate its keys
    again when a sequence grows. Here the angle depends only on the token's own position: below
    `max_position_embeddings` there is no scaling; position p beyond it has the frequencies of a
    sequence of p + 1 tokens. transformers computes the same when a sequence grows token by token
    with a cache. The angles do not depend on chunks or prefix hits. They differ from transformers
    only for prompts longer than `max_position_embeddings`, which transformers rotates as a whole
    by the prompt's length.
    """

    def __init__(self, rope: RopeSpec, dim: int, device: torch.device | None = None) -> None:
        """Compute the frequencies. `dim`: the number of rotated entries of a head."""
        self._rope = rope
        self._dim = dim
        frequencies, self.attention_factor = _frequencies(rope, dim)
        self._frequencies = frequencies.to(device) if device else frequencies  # [dim / 2]
        self._exponents = _exponents(dim).to(self._frequencies.device)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) of int64 `positions` [tokens], each [tokens, 1, dim]. The sine's
        first half is negated, as `rotate` needs it."""
        frequencies = self._frequencies
        if self._rope.kind == "dynamic":
            frequencies = self._dynamic_frequencies(positions)
        angles = positions.to(torch.float32)[:, None] * frequencies
        cos = angles.cos() * self.attention_factor
        sin = angles.sin() * self.attention_factor
        return (
            torch.cat((cos, cos), dim=-1).to(dtype)[:, None],
            torch.cat((-sin, sin), dim=-1).to(dtype)[:, None],
        )

    def _dynamic_frequencies(self, positions: Tensor) -> Tensor:  # [tokens, dim / 2]
        rope, dim = self._rope, self._dim
        length = (positions + 1).clamp(min=rope.original_context).to(torch.float32)
        stretch = rope.factor * length / rope.original_context - (rope.factor - 1)
        exponents = functional.pad(self._exponents, (0, -len(self._exponents) % VECTOR_COLUMNS))

        def frequencies(stretch: Tensor) -> Tensor:
            return 1.0 / ((rope.theta * stretch ** (dim / (dim - 2))) ** exponents)

        return in_whole_vectors(frequencies, stretch[:, None].expand(-1, len(self._exponents)))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `dim` entries of the heads of `x` [tokens, heads, head_dim] by the angles
    of its tokens (`Rotary.angles`, [tokens, 1, dim]); the other entries stay."""
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :dim], cos, sin), x[..., dim:]), dim=-1)
    return torch.addcmul(x * cos, x.roll(dim // 2, dims=-1), sin)


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim


def _frequencies(rope: RopeSpec, dim: int) -> tuple[Tensor, float]:
    """Return inverse frequencies, float32 [dim / 2], and the factor on cosines and sines."""
    if rope.kind == "yarn":
        return _yarn(rope, dim)
    powers = rope.theta ** _exponents(dim)
    if rope.kind == "longrope":
        # In the order of transformers, because angles at late positions amplify each rounding.
        return 1.0 / (torch.tensor(rope.stretch) * powers), _longrope_attention_factor(rope)
    plain = 1.0 / powers
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    return plain, 1.0


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, and blend those between."""
    wavelength = 2 * math.pi / plain
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    kept_or_blended = torch.where(wavelength < shortest, plain, blended)
    return torch.where(wavelength > longest, plain / rope.factor, kept_or_blended)


def _yarn(rope: RopeSpec, dim: int) -> tuple[Tensor, float]:
    powers = rope.theta ** _exponents(dim)
    low = _correction_dim(rope, dim, rope.beta_fast)
    high = _correction_dim(rope, dim, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    frequencies = (1.0 / (rope.factor * powers)) * (1 - kept) + (1.0 / powers) * kept
    return frequencies, _yarn_attention_factor(rope)


def _correction_dim(rope: RopeSpec, dim: int, rotations: float) -> float:
    """Return the dimension that rotates `rotations` times over the original context."""
    turns = rope.original_context / (rotations * 2 * math.pi)
    return dim * math.log(turns) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_magnitude(rope.factor, rope.mscale) / yarn_magnitude(
            rope.factor, rope.mscale_all_dim
        )
    return yarn_magnitude(rope.factor)


def _longrope_attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context))
