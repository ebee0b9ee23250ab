"""What an engine's pool says of the rows of its slabs is true: blocks of another size, put in order
by it, hold each token where attention reads it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from baton.deploy.processes.pool_memory import local_pool
from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.kv_quant import KV_QUANTS
from baton.engine.spec.model_spec import read_spec
from baton.engine.spec.moe_spec import LatentSpec
from baton.kv_transfer.block_sizes import block_ratio
from baton.models.embedded import embedded_model

SMALL = 4
PLAIN = read_spec(embedded_model())
LATENT = replace(
    PLAIN, kv_heads=1, head_dim=24, latent=LatentSpec(16, 8, 8, 8, None, interleaved=False)
)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"spec": PLAIN},
    "int8": {"spec": PLAIN, "quant": KV_QUANTS["int8"]},
    "latent": {"spec": LATENT},
    "latent in int8": {"spec": LATENT, "quant": KV_QUANTS["int8"]},
    "draft": {"spec": PLAIN, "draft": replace(PLAIN, layers=1, kv_heads=1)},
    "int8 with a draft": {"spec": PLAIN, "quant": KV_QUANTS["int8"], "draft": PLAIN},
    "EAGLE-3": {"spec": PLAIN, "draft": replace(PLAIN, layers=1, features=48)},
}


def tokens_of(pool: KvPool, blocks: list[int]) -> list[torch.Tensor]:
    """Return what the pool holds of some blocks' tokens, of each tensor [token, ...] as bytes."""
    found = []
    for group in (pool, pool.draft) if pool.draft is not None else (pool,):
        axes = [(group.tensor, group.tensor.dim() - 2)]
        if group.scales is not None:
            axes.append((group.scales, group.tensor.dim() - 2))
        if group.features is not None:
            axes.append((group.features, 1))
        for tensor, axis in axes:
            chosen = tensor.view(torch.uint8)[blocks].movedim(axis, 1)
            found.append(chosen.flatten(0, 1).flatten(1))
    return found


@pytest.mark.parametrize("factor", [2, 4])
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_another_size_are_put_in_order(kind: str, joined: bool, factor: int) -> None:
    sizes = (SMALL, factor * SMALL) if joined else (factor * SMALL, SMALL)
    granter, reader = (
        KvPool(blocks=8 if size == SMALL else 2, block_size=size, **KINDS[kind]) for size in sizes
    )
    dice = np.random.default_rng(5)
    stored = granter.bytes_view()
    stored[:] = dice.integers(0, 256, stored.shape, dtype=np.uint8)
    sent = [6, 1, 4, 3][:factor] if joined else [1]
    own = [1] if joined else [7, 0, 5, 2][:factor]
    reader.bytes_view()[own] = stored[sent].reshape(len(own), -1)
    ratio, pool = block_ratio(*sizes), local_pool(reader)
    assert ratio is not None and pool.bridges_sizes
    pool.put_in_order(own, [factor if joined else 1], ratio)
    for ours, theirs in zip(tokens_of(reader, own), tokens_of(granter, sent), strict=True):
        assert torch.equal(ours, theirs)
