"""Batch-invariant latent attention: a row's bits depend only on its own sequence.

The strict kernel computes every row in absorbed form; a token's row in the pool is both its key
and its value. The products of heads always have the same number of rows, since libraries choose
the order of a sum by that number. The module needs numba and only has views of the pool.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

from baton.engine.cpu.attention_invariant import InvariantAttention
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.mla import LatentAttention, absorb, expand_values
from baton.engine.model.step_layout import StepLayout
from baton.engine.spec.model_spec import AttentionSpec
from baton.engine.spec.moe_spec import LatentSpec
from baton.runtime.errors import ConfigError

_TILE_ROWS = 64

Product = Callable[[LatentSpec, Tensor, Tensor], Tensor]


class InvariantLatentAttention(LatentAttention):
    """`LatentAttention` that absorbs queries and computes attention row by row."""

    def __init__(
        self, pool: KvPool, spec: LatentSpec, heads: int, attention: AttentionSpec
    ) -> None:
        """Connect the pool. Raises ConfigError if the kernel does not read its dtype."""
        if pool.quant is not None:
            raise ConfigError(
                f"worker.deterministic: latent attention on a CPU does not support KV in "
                f"{pool.quant.name}; set pool.kv_dtype to auto, or serve without the setting"
            )
        super().__init__(pool, spec, heads, attention.scale)
        self._strict = InvariantAttention(pool.as_pairs(), attention)

    def attend(self, layer: int, queries: Tensor, up: Tensor, layout: StepLayout) -> Tensor:
        absorbed = self._in_tiles(absorb, queries, up)
        mixed = self._strict.attend(layer, absorbed, layout)
        return self._in_tiles(expand_values, mixed, up)

    def _in_tiles(self, product: Product, x: Tensor, up: Tensor) -> Tensor:
        """Apply `product` to `x` [rows, heads, any] in tiles, padding the last one."""
        filled = functional.pad(x, (0, 0, 0, 0, 0, -len(x) % _TILE_ROWS))
        tiles = [product(self._spec, tile, up) for tile in torch.split(filled, _TILE_ROWS)]
        return torch.cat(tiles)[: len(x)]
