"""Multi-head latent attention over the paged pool (DeepSeek-AI 2024, arXiv:2405.04434).

    pool, per token and layer:  [ latent, after its norm | key part that all heads share, rotated ]
                                  in eight bits, each part has its own scale
    head h:  key = up_k[h] latent | shared part        value = up_v[h] latent

In absorbed form, queries are multiplied by up_k and the weighted sums of latents by up_v, so that
keys and values per head do not exist; for a long chunk it is cheaper to expand them. The module
knows no batch and no sampling, and has only a reference to the pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.linear import Linear
from baton.engine.model.rope import rotate
from baton.engine.model.step_layout import StepLayout
from baton.engine.spec.moe_spec import LatentSpec

_FOLDED_ROWS = 1024  # queries x heads that share one mask
_MASK_NUMBERS = 1 << 25
_EXPANDED_NUMBERS = 1 << 26  # of keys and values at a time
NORM_EPS = 1e-6  # of inner norms; not `rms_norm_eps`

Angles = tuple[Tensor, Tensor]  # of `Rotary.angles`
BatchedProduct = Callable[[Tensor, Tensor], Tensor]  # the signature of `torch.bmm`


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The weights of one layer's attention. Without low-rank queries, `inputs` also computes the
    whole queries."""

    inputs: Linear  # [(query rank or heads query_dim) + rank + rope_dim, hidden]
    query_norm: Tensor | None  # [query rank]
    query_up: Linear | None  # [heads query_dim, query rank]
    latent_norm: Tensor  # [rank]
    up: Tensor  # [heads, plain_dim + value_dim, rank]


class LatentAttention:
    """Writes the latents of a step's rows into the pool, then computes the rows' attention.

    Each sequence is computed by itself; other sequences of the batch affect it only by the
    rounding of shared products. The device thread alone calls it, layer by layer.
    """

    def __init__(self, pool: KvPool, spec: LatentSpec, heads: int, scale: float) -> None:
        """Connect the pool. `scale` multiplies the scores before the softmax."""
        self._pool = pool
        self._spec = spec
        self._heads = heads
        self._scale = scale

    def __call__(
        self, layer: int, weights: LatentWeights, x: Tensor, angles: Angles, layout: StepLayout
    ) -> Tensor:
        """Map `x` [rows, hidden] to [rows, heads value_dim], before the output matrix."""
        queries, latents = self._project(weights, x, angles)
        self.write(layer, latents, layout)
        return self.attend(layer, queries, weights.up, layout).flatten(1)

    def attend(self, layer: int, queries: Tensor, up: Tensor, layout: StepLayout) -> Tensor:
        """Compute attention of `queries` [rows, heads, query_dim], each over its sequence up to
        itself, after `write`. Returns [rows, heads, value_dim]."""
        spec, decodes = self._spec, layout.decode_rows
        out = queries.new_empty(*queries.shape[:2], spec.value_dim)
        if decodes:
            absorbed = absorb(spec, queries[:decodes], up)
            out[:decodes] = expand_values(spec, self.decode(layer, absorbed, layout), up)
        for chunk in layout.chunks:
            rows = chunk.end - chunk.first
            known = self.latents(layer, chunk.blocks, chunk.start + rows)
            expand = expansion_pays(spec, rows, len(known))
            compute = self._expanded if expand else self._absorbed
            out[chunk.first : chunk.end] = compute(queries[chunk.first : chunk.end], known, up)
        return out

    def decode(self, layer: int, absorbed: Tensor, layout: StepLayout) -> Tensor:
        """Compute the decode rows, `absorbed` [decode rows, heads, width]. Returns the weighted
        sums of the pool's rows, of the same shape."""
        size, mixed = self._pool.block_size, torch.empty_like(absorbed)
        lengths = layout.decode_lengths.tolist()
        for row, (table, length) in enumerate(zip(layout.decode_tables, lengths, strict=True)):
            known = self.latents(layer, table[: -(-length // size)], length)
            mixed[row] = self._mix(absorbed[row : row + 1], known)[0]
        return mixed

    def write(self, layer: int, latents: Tensor, layout: StepLayout) -> None:
        """Write `latents` [rows, width] into their blocks."""
        pool, cells = self._pool, (layout.write_blocks, 0, layer, layout.write_slots)
        if pool.quant is None or pool.scales is None:
            pool.tensor[cells] = latents
            return
        both = [pool.quant.encode(part) for part in latents.tensor_split((self._spec.rank,), -1)]
        # As bytes, because torch does not index some eight-bit dtypes.
        stored = [codes.view(torch.uint8) for codes, _ in both]
        pool.tensor.view(torch.uint8)[cells] = torch.cat(stored, dim=-1)
        pool.scales[cells] = torch.stack([scales for _, scales in both], dim=-1)

    def latents(self, layer: int, blocks: Tensor, tokens: int) -> Tensor:
        """Return the latents of a sequence's first `tokens` in `blocks`, [tokens, width]."""
        pool = self._pool
        if pool.quant is None or pool.scales is None:
            return pool.tensor[:, 0, layer].index_select(0, blocks).flatten(0, 1)[:tokens]
        bits = pool.tensor.view(torch.uint8)[:, 0, layer].index_select(0, blocks)
        codes = bits.view(pool.tensor.dtype).flatten(0, 1)[:tokens]
        scales = pool.scales[:, 0, layer].index_select(0, blocks).flatten(0, 1)[:tokens]
        parts = zip(codes.tensor_split((self._spec.rank,), -1), scales.unbind(-1), strict=True)
        return torch.cat([pool.quant.decode(*part) for part in parts], dim=-1).to(pool.dtype)

    def _project(self, weights: LatentWeights, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Return queries [rows, heads, query_dim] and latents [rows, width], rotated."""
        spec = self._spec
        queries, latent, shared = weights.inputs(x).tensor_split(
            (-spec.width, -spec.rope_dim), dim=-1
        )
        if weights.query_norm is not None and weights.query_up is not None:
            queries = weights.query_up(self._norm(queries, weights.query_norm))
        queries = queries.view(-1, self._heads, spec.query_dim)
        plain, rotary = queries.tensor_split((spec.plain_dim,), dim=-1)
        queries = torch.cat((plain, self._rotate(rotary, angles)), dim=-1)
        shared = self._rotate(shared[:, None], angles)[:, 0]
        return queries, torch.cat((self._norm(latent, weights.latent_norm), shared), dim=-1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, NORM_EPS)

    def _rotate(self, x: Tensor, angles: Angles) -> Tensor:
        """Rotate `x` [rows, heads, rope_dim]. Adjacent pairs are first sorted into halves, in
        queries and in keys, so that their products stay the same."""
        if self._spec.interleaved:
            x = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
        return rotate(x, *angles)

    def _absorbed(self, queries: Tensor, known: Tensor, up: Tensor) -> Tensor:
        """Compute the last rows of a sequence in absorbed form: `queries` [rows, heads, query_dim]
        over `known` [tokens, width]. Returns [rows, heads, value_dim]."""
        absorbed = absorb(self._spec, queries, up)
        mixed, rows = torch.empty_like(absorbed), len(queries)
        folded = min(_FOLDED_ROWS, _MASK_NUMBERS // len(known))
        together = max(1, folded // queries.shape[1])
        for first in range(0, rows, together):
            end = min(first + together, rows)
            seen = known[: len(known) - rows + end]
            mixed[first:end] = self._mix(absorbed[first:end], seen)
        return expand_values(self._spec, mixed, up)

    def _mix(self, absorbed: Tensor, known: Tensor) -> Tensor:
        """Return weighted sums of `known` [tokens, width] for the last rows of a sequence,
        `absorbed` [rows, heads, width], in the shape of `absorbed`.

        All heads share their keys, so they stand on torch's axis of query length, in one part per
        thread. The whole latent serves as value, although the last columns are not needed:
        torch's fused attention requires keys and values of one shape.
        """
        rows, heads, width = absorbed.shape
        parts = math.gcd(heads, torch.get_num_threads())
        apart = absorbed.view(rows, parts, -1, width).transpose(0, 1)
        keys = known.expand(1, parts, -1, -1)
        mask = _causal(rows, len(known), known.device)
        mixed = functional.scaled_dot_product_attention(
            apart.reshape(1, parts, -1, width),
            keys,
            keys,
            attn_mask=None if mask is None else mask.repeat_interleave(heads // parts, dim=0),
            scale=self._scale,
        )  # [1, parts, rows heads / parts, width]
        return mixed.view(parts, rows, -1, width).transpose(0, 1).reshape(rows, heads, width)

    def _expanded(self, queries: Tensor, known: Tensor, up: Tensor) -> Tensor:
        """Same as `_absorbed`, with the keys and values of every head. It computes some heads at a
        time, so that a long prefix does not take a multiple of its memory in the pool."""
        heads, numbers = queries.shape[1], len(known) * up.shape[1]
        together = max(1, _EXPANDED_NUMBERS // numbers)
        parts = [slice(first, first + together) for first in range(0, heads, together)]
        return torch.cat([self._expand_heads(queries[:, p], known, up[p]) for p in parts], dim=1)

    def _expand_heads(self, queries: Tensor, known: Tensor, up: Tensor) -> Tensor:
        """Compute `_expanded` for the heads of `queries` and `up`."""
        spec = self._spec
        tokens, (rows, heads, _) = len(known), queries.shape
        latent, shared = known.tensor_split((spec.rank,), dim=-1)
        pairs = functional.linear(latent, up.flatten(0, 1)).view(tokens, heads, -1)
        plain, values = pairs.tensor_split((spec.plain_dim,), dim=-1)
        keys = torch.cat((plain, shared[:, None].expand(-1, heads, -1)), dim=-1)
        missing = max(spec.query_dim - spec.value_dim, 0)
        values = functional.pad(values, (0, missing))  # one shape: see `_mix`
        out = functional.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=_causal(rows, tokens, known.device) if rows < tokens else None,
            is_causal=rows == tokens,
            scale=self._scale,
        )
        return out[0, ..., : spec.value_dim].transpose(0, 1)


def absorb(
    spec: LatentSpec, queries: Tensor, up: Tensor, products: BatchedProduct = torch.bmm
) -> Tensor:
    """Multiply `queries` [rows, heads, query_dim] by up_k. The product of the result [rows, heads,
    width] with a token's row in the pool is that of query and key."""
    plain, rotated = queries.tensor_split((spec.plain_dim,), dim=-1)
    product = products(plain.transpose(0, 1), up[:, : spec.plain_dim])  # [heads, rows, rank]
    return torch.cat((product.transpose(0, 1), rotated), dim=-1)


def expand_values(
    spec: LatentSpec, mixed: Tensor, up: Tensor, products: BatchedProduct = torch.bmm
) -> Tensor:
    """Multiply weighted sums of the pool's rows, `mixed` [rows, heads, rank or width], by up_v.
    Returns weighted sums of values [rows, heads, value_dim]."""
    latent = mixed[..., : spec.rank].transpose(0, 1)
    return products(latent, up[:, spec.plain_dim :].transpose(1, 2)).transpose(0, 1)


def expansion_pays(spec: LatentSpec, rows: int, tokens: int) -> bool:
    """Return whether the last `rows` of `tokens` need fewer multiplications in expanded form.
    Per head, absorbed: rows tokens (2 rank + rope_dim) + rows rank (plain_dim + value_dim).
    Expanded: rows tokens (query_dim + value_dim) + tokens rank (plain_dim + value_dim).
    DeepSeek-V3 thus expands the first chunk of a prompt, and a chunk after a long cached prefix if
    the chunk has more than 170 tokens."""
    saved = 2 * spec.rank + spec.rope_dim - spec.query_dim - spec.value_dim
    return rows * tokens * saved >= (tokens - rows) * spec.rank * (spec.plain_dim + spec.value_dim)


def _causal(rows: int, tokens: int, device: torch.device) -> Tensor | None:
    """Return the causal mask of a sequence's last `rows`, bool [rows, tokens]; None: one row."""
    if rows == 1:
        return None
    return torch.ones(rows, tokens, dtype=torch.bool, device=device).tril(tokens - rows)
