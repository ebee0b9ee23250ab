"""The plan of a worker's memory: weights, then a share of the rest for the KV pool.

The loaders of CPU, GPU and ranks make it from what they measured, `baton size` from estimates. It
keeps the terms of its arithmetic, so that the worker can log them. Values are immutable.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.engine.memory.kv_pool import block_bytes, blocks_for, kv_name
from baton.engine.memory.kv_quant import KvQuant
from baton.engine.spec.model_spec import ModelSpec

_SEQUENCE_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes in bytes. `fraction` 0: the number of blocks was given."""

    weights_bytes: int  # measured growth of the process
    free_bytes: int  # after loading
    fraction: float
    blocks: int
    block_bytes: int
    block_size: int  # tokens
    max_context: int  # tokens
    kv: str  # see `KvPool.kv_dtype`
    beside_bytes: int = 0  # GPU: buffers, graphs, activations

    @property
    def pool_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size

    @property
    def sequence_tokens(self) -> int:
        """Return 4096, or the model's context if that is shorter."""
        return min(_SEQUENCE_TOKENS, self.max_context)

    @property
    def sequences(self) -> int:
        """Return how many sequences of `sequence_tokens` the pool holds without shared prefixes."""
        return self.sequences_of(self.sequence_tokens)

    def sequences_of(self, tokens: int) -> int:
        """Return how many sequences of `tokens` the pool holds without shared prefixes."""
        return self.blocks // -(-tokens // self.block_size)

    def line(self) -> str:
        share = f" x {self.fraction:g}" if self.fraction else ", blocks as set"
        free = _size(self.free_bytes)
        if self.beside_bytes:
            free = f"({free} - {_size(self.beside_bytes)} of buffers, graphs and a step)"
        return (
            f"weights {_size(self.weights_bytes)}; free {free}{share}: "
            f"pool {_size(self.pool_bytes)} ({self.kv}) = {self.blocks:,} blocks of "
            f"{_size(self.block_bytes)} = {self.tokens:,} tokens = {self.sequences:,} sequences "
            f"of {self.sequence_tokens:,}"
        )


@dataclass(frozen=True, slots=True)
class PoolForm:
    """The form of a pool's blocks: the model whose KV they hold (of one rank, if each rank has a
    pool), and the `draft` whose KV is their second layer group."""

    spec: ModelSpec
    block_size: int  # tokens
    dtype: torch.dtype
    quant: KvQuant | None = None
    draft: ModelSpec | None = None

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block. Raises ConfigError if `quant` does not fit the model."""
        own = block_bytes(self.spec, self.block_size, self.dtype, self.quant)
        return own + (block_bytes(self.draft, self.block_size, self.dtype) if self.draft else 0)


@dataclass(frozen=True, slots=True)
class MemoryOffer:
    """The memory that a pool is sized by, in bytes. `blocks` 0: as many as fit into `fraction` of
    what is free, less what the runner needs beside the pool."""

    weights_bytes: int
    free_bytes: int  # after loading
    blocks: int
    fraction: float
    beside_bytes: int = 0


def plan_memory(form: PoolForm, offer: MemoryOffer, max_context: int = 0) -> MemoryPlan:
    """Return the plan of a pool. `max_context` in tokens; 0: the model's own. Raises ConfigError
    if too few blocks fit, or like `PoolForm.block_bytes`."""
    each, blocks = form.block_bytes, offer.blocks
    if not blocks:
        budget = int(offer.fraction * (offer.free_bytes - offer.beside_bytes))
        blocks = blocks_for(form.spec, form.block_size, form.dtype, budget, form.quant, form.draft)
    return MemoryPlan(
        weights_bytes=offer.weights_bytes,
        free_bytes=offer.free_bytes,
        fraction=0.0 if offer.blocks else offer.fraction,
        blocks=blocks,
        block_bytes=each,
        block_size=form.block_size,
        max_context=max_context or form.spec.max_context,
        kv=kv_name(form.dtype, form.quant),
        beside_bytes=offer.beside_bytes,
    )


def _size(count: int) -> str:
    """Return a size with three significant digits: "1.75 MiB"."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}"
