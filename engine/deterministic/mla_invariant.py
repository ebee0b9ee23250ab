"""Latent attention in which a row's bits depend on its own sequence alone.

Every row, of a chunk or not, is absorbed and goes through the strict kernel, for which a
token's row in the pool is its key and its value both. The products of heads are computed for
always as many rows at once, since libraries choose their order of sums by that number. Needs
numba; owns nothing but views of the pool.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

from baton.engine.cpu.attention_invariant import InvariantAttention
from baton.engine.memory.kv_pool import KvPool
from baton.engine.model.mla import LatentAttention, absorb, release
from baton.engine.model.step_layout import StepLayout
from baton.engine.spec.model_spec import AttentionSpec
from baton.engine.spec.moe_spec import LatentSpec
from baton.runtime.errors import ConfigError

_TILE_ROWS = 64

Product = Callable[[LatentSpec, Tensor, Tensor], Tensor]


class InvariantLatentAttention(LatentAttention):
    """Writes as `LatentAttention` does; absorbs and attends row by row."""

    def __init__(
        self, pool: KvPool, spec: LatentSpec, heads: int, attention: AttentionSpec
    ) -> None:
        """Raises ConfigError for a pool whose numbers the kernel does not read."""
        if pool.codes is not None:
            raise ConfigError(
                f"worker.deterministic: on a CPU not with latent attention over KV in "
                f"{pool.codes.name}; set pool.kv_dtype to auto, or serve without the setting"
            )
        super().__init__(pool, spec, heads, attention.scale)
        self._strict = InvariantAttention(pool.as_pairs(), attention)

    def attend(self, layer: int, queries: Tensor, up: Tensor, layout: StepLayout) -> Tensor:
        absorbed = self._in_tiles(absorb, queries, up)
        mixed = self._strict.attend(layer, absorbed, layout)
        return self._in_tiles(release, mixed, up)

    def _in_tiles(self, product: Product, x: Tensor, up: Tensor) -> Tensor:
        """`x` [rows, heads, any], filled up to whole tiles."""
        filled = functional.pad(x, (0, 0, 0, 0, 0, -len(x) % _TILE_ROWS))
        tiles = [product(self._spec, tile, up) for tile in torch.split(filled, _TILE_ROWS)]
        return torch.cat(tiles)[: len(x)]
