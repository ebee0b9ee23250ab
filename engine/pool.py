"""The paged KV pool: one tensor, its bytes, and how many blocks fit into a budget.

    [block, kv_head, layer, k|v, token, head_dim]
     one block is one contiguous region; so are the heads of a tensor-parallel share within it

    [block, 1, layer, token, latent and rotated key]      for multi-head latent attention
     one slab, alike on every rank

Knows no sequences and no identities. Who may write into which block is the caller's matter;
only the device thread writes here.
"""

from __future__ import annotations

import math
from copy import copy
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from baton.engine.huge_pages import map_memory
from baton.engine.spec import ModelSpec
from baton.runtime.errors import ConfigError

_LEAST_TOKENS = 512  # a smaller pool serves no one


class KvPool:
    """`tensor` has the shape above, in `dtype`. The memory is touched when first written."""

    def __init__(
        self,
        spec: ModelSpec,
        blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        """On a `device` (None: the host), one more block, `spare_block`, which no sequence owns,
        takes the KV of rows that fill up a batch. Raises ConfigError if `blocks` is not
        positive or the memory cannot be had."""
        if blocks <= 0 or block_size <= 0:
            raise ConfigError(
                f"pool.blocks is {blocks} and pool.block_size {block_size}: give positive numbers"
            )
        self.blocks = blocks
        self.block_size = block_size
        self.block_bytes = block_bytes(spec, block_size, dtype)
        self.slabs = spec.kv_heads
        self.spare_block = blocks
        if device is not None:
            shape = (blocks + 1, *_block_shape(spec, block_size))
            self.tensor = _on_device(shape, dtype, device)
            return
        shape = (blocks, *_block_shape(spec, block_size))
        try:
            # A READ through shared memory walks both pools page by page: twice as fast so.
            self._memory = map_memory(blocks * self.block_bytes)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"pool.blocks is {blocks}, of {self.block_bytes} bytes each: the system gives no "
                f"{blocks * self.block_bytes} bytes; give fewer blocks"
            ) from error
        self.tensor = torch.frombuffer(self._memory, dtype=dtype).view(shape)

    def bytes_view(self) -> NDArray[np.uint8]:
        """The same memory as uint8 [blocks, block_bytes], C-contiguous, where the host has it."""
        return cast(NDArray[np.uint8], self.bytes_tensor().numpy())

    def bytes_tensor(self) -> torch.Tensor:
        """The same memory as uint8 [blocks, block_bytes], contiguous, wherever it lies."""
        flat = self.tensor[: self.blocks].view(torch.uint8)
        return flat.view(self.blocks, self.block_bytes)

    def as_pairs(self) -> KvPool:
        """A latent pool's own memory, as if every row were its token's key and value both:
        `tensor` [block, 1, layer, k|v, token, width], whose k|v axis has no stride. To read."""
        pairs = copy(self)
        pairs.tensor = self.tensor[:, :, :, None].expand(-1, -1, -1, 2, -1, -1)
        return pairs

    def copy_block(self, source: int, target: int) -> None:
        """Copy one whole block. Raises ValueError if a block is not in the pool."""
        for block in (source, target):
            if not 0 <= block < self.blocks:
                raise ValueError(f"block {block} is not in the pool of {self.blocks} blocks")
        self.tensor[target].copy_(self.tensor[source])


def _on_device(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"pool.blocks is {shape[0] - 1}: {device} has no memory for them; give fewer, or a "
            "smaller pool.memory_fraction"
        ) from error


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block of all layers."""
    return math.prod(_block_shape(spec, block_size)) * dtype.itemsize


def _block_shape(spec: ModelSpec, block_size: int) -> tuple[int, ...]:
    """A latent model's one head has no k|v axis: its values are part of its keys."""
    pair = () if spec.latent else (2,)
    return (spec.kv_heads, spec.layers, *pair, block_size, spec.head_dim)


def blocks_for(spec: ModelSpec, block_size: int, dtype: torch.dtype, budget_bytes: int) -> int:
    """How many blocks fit into `budget_bytes`. Raises ConfigError if they hold fewer tokens
    than any use needs."""
    each = block_bytes(spec, block_size, dtype)
    blocks = budget_bytes // each
    least = -(-min(_LEAST_TOKENS, spec.max_context) // block_size)
    if blocks < least:
        raise ConfigError(
            f"the KV pool has {max(budget_bytes, 0)} bytes, room for {max(blocks, 0)} blocks: "
            f"{_arithmetic(spec, block_size)} x {dtype.itemsize} bytes = {each} bytes a block, "
            f"and at least {least} blocks ({least * each} bytes) are needed; raise "
            "pool.memory_fraction, free memory on this host, or use a smaller model"
        )
    return blocks


def _arithmetic(spec: ModelSpec, block_size: int) -> str:
    heads = "1 latent" if spec.latent else f"{spec.kv_heads} KV heads"
    pair = "" if spec.latent else " x 2"
    return f"{heads} x {spec.layers} layers{pair} x {block_size} tokens x {spec.head_dim}"
