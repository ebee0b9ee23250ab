"""Attention over the paged pool: the interface of the backends, and its reference in torch.

A backend writes the KV of a step's rows into their blocks, then computes the attention of every
row over its sequence so far. It takes strides from the pool's tensor, so that the order of the
axes can change. It knows no weights and has only a reference to the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as functional
from torch import Tensor

from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.step_layout import ChunkRows, StepLayout
from baton.engine.spec.model_spec import AttentionSpec


class Attention(Protocol):
    """An attention backend. The device thread alone calls it, layer by layer."""

    def write(self, layer: int, keys: Tensor, values: Tensor, layout: StepLayout) -> None:
        """Write rotated `keys` and `values` [rows, kv_heads, head_dim] into their blocks."""
        ...

    def attend(self, layer: int, queries: Tensor, layout: StepLayout) -> Tensor:
        """Compute causal attention of `queries` [rows, heads, head_dim] after `write`, each over
        the tokens of its sequence up to itself that are in the layer's window (`AttentionSpec`).
        Returns the same shape and dtype."""
        ...


@runtime_checkable
class RotatingAttention(Protocol):
    """A backend that rotates queries and keys while it writes."""

    def rotate_and_write(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        angles: tuple[Tensor, Tensor],
        layout: StepLayout,
    ) -> Tensor:
        """Rotate by `angles` (`Rotary.angles`), `write` the keys, and return rotated queries."""
        ...


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The weights of a layer's norms of queries and keys, [head_dim] each, and their epsilon."""

    queries: Tensor
    keys: Tensor
    eps: float


@runtime_checkable
class NormalisingAttention(Protocol):
    """A backend that normalises queries and keys while it rotates and writes."""

    def normalise_rotate_and_write(
        self,
        layer: int,
        heads: tuple[Tensor, Tensor, Tensor],
        norms: HeadNorms,
        angles: tuple[Tensor, Tensor],
        layout: StepLayout,
    ) -> Tensor:
        """Normalise queries and keys, round them, then do the same as
        `RotatingAttention.rotate_and_write`. `heads`: queries, keys and values."""
        ...


class TorchAttention:
    """The reference backend: it gathers the blocks of a sequence, then runs torch's attention.

    Chunks are computed one by one, and all decode rows at once, padded to the longest. Padding is
    masked, and a row's result depends on its neighbours only by rounding.
    """

    def __init__(self, pool: KvPool, spec: AttentionSpec, first: int = 0) -> None:
        """`first`: the position before which no row attends to any token but its own."""
        self._pool = pool
        self._first = first
        self._spec = spec

    def write(self, layer: int, keys: Tensor, values: Tensor, layout: StepLayout) -> None:
        kv = torch.stack((keys, values), dim=2)  # [rows, kv_heads, 2, head_dim]
        self._pool.put(layer, layout.write_blocks, layout.write_slots, kv)

    def attend(self, layer: int, queries: Tensor, layout: StepLayout) -> Tensor:
        out = torch.empty_like(queries)
        decodes = layout.decode_rows
        if decodes:
            out[:decodes] = self.decode(layer, queries[:decodes], layout)
        for chunk in layout.chunks:
            rows = slice(chunk.first, chunk.end)
            out[rows] = self.chunk(layer, queries[rows], chunk)
        return out

    def decode(self, layer: int, queries: Tensor, layout: StepLayout) -> Tensor:
        """Compute the decode rows, `queries` [decode rows, heads, head_dim]. The query heads of a
        KV head stand on torch's axis of query length."""
        rows, heads, dim = queries.shape
        tables = layout.decode_tables.long()
        kv = self._pool.take(layer, tables)  # [rows, block, kv_head, 2, token, dim]
        kv = kv.permute(3, 0, 2, 1, 4, 5).flatten(3, 4)  # [2, rows, kv_head, tokens, dim]
        positions, lengths = (
            torch.arange(kv.shape[3], device=kv.device),
            layout.decode_lengths[:, None],
        )
        allowed = positions < lengths
        if window := self._spec.windows[layer]:
            allowed &= positions >= lengths - window
        if self._first:
            allowed &= (positions >= self._first) | (positions == lengths - 1)
        # A mask is not enough for an unwritten token, because 0 * NaN is NaN.
        kv = kv.masked_fill(~allowed[:, None, :, None], 0)
        grouped = queries.view(rows, kv.shape[2], heads // kv.shape[2], dim)
        out = self._mix(grouped, kv[0], kv[1], allowed[:, None, None])
        return out.reshape(rows, heads, dim)

    def chunk(self, layer: int, queries: Tensor, chunk: ChunkRows) -> Tensor:
        """Compute one chunk: `queries` [tokens, heads, head_dim] over its prefix and itself."""
        window, size = self._spec.windows[layer], self._pool.block_size
        end = chunk.start + chunk.end - chunk.first
        skipped = max(0, chunk.start + 1 - window) // size if window else 0  # blocks
        kv = self._pool.take(layer, chunk.blocks[skipped:])
        kv = kv.permute(2, 1, 0, 3, 4).flatten(2, 3)  # [2, kv_head, tokens, dim]
        kv = kv[:, None, :, : end - skipped * size]
        own = torch.arange(chunk.start, end, device=kv.device)[:, None]
        positions = torch.arange(skipped * size, end, device=kv.device)
        mask = None
        if chunk.start or self._first or (window and window < end):
            mask = positions <= own
            if self._first:
                mask &= (positions >= self._first) | (positions == own)
            if window:
                mask &= positions > own - window
        out = self._mix(queries.transpose(0, 1)[None], kv[0], kv[1], mask)
        return out[0].transpose(0, 1)

    def _mix(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Compute attention of `queries` [n, heads or kv_heads, length, dim] over `keys` and
        `values` [n, kv_heads, tokens, dim] under `mask` (None: causal). Returns queries' shape."""
        if self._spec.soft_cap:
            return self._mix_capped(queries, keys, values, mask)
        return functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._spec.scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )

    def _mix_capped(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Same as `_mix` with a soft cap, which torch's attention lacks. It computes one KV head
        at a time to bound the memory of the scores."""
        cap, kv_heads = self._spec.soft_cap, keys.shape[1]
        if mask is None:
            mask = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool, device=keys.device)
            mask = mask.tril()
        out = torch.empty_like(queries)
        heads = zip(queries.chunk(kv_heads, 1), out.chunk(kv_heads, 1), strict=True)
        for head, (query, target) in enumerate(heads):  # [n, group, length, dim]
            key, value = keys[:, head, None], values[:, head, None]
            scores = (query @ key.transpose(-1, -2)).to(torch.float32).mul_(self._spec.scale)
            scores = scores.div_(cap).tanh_().mul_(cap).masked_fill_(~mask, float("-inf"))
            target.copy_(scores.softmax(dim=-1).to(value.dtype) @ value)
        return out
