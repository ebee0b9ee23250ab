"""The paged KV pool: one tensor, its bytes, and how many blocks fit into a budget.

    [block, kv_head, layer, k|v, token, head_dim]
     one block is one contiguous region; so are the heads of a tensor-parallel share within it

    [block, 1, layer, token, latent and rotated key]      for multi-head latent attention
     one slab, alike on every rank

    [block, kv_head, codes [layer, k|v, token, head_dim] | scales [layer, k|v, token]]
     in eight bits: a head's slab ends in its scales, so that it moves and is summed with them;
     of a latent's row there are two, [layer, token, latent|key]

    [block, bytes of the target's group | bytes of the draft's group]
     beside a draft model a block holds a second layer group, with heads and layers of its own: both
     are computed, moved and published together

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

from baton.engine.memory.huge_pages import map_memory
from baton.engine.memory.kv_quant import SCALE_BYTES, KvCodes
from baton.engine.spec.model_spec import ModelSpec
from baton.runtime.errors import ConfigError

_WORD_BYTES = 8  # that checksums add up
_LEAST_TOKENS = 512  # a smaller pool serves no one


class KvPool:
    """`tensor` has the shape above, in `dtype` or, in eight bits, in codes of `codes` beside
    float32 `scales` [block, kv_head, layer, k|v, token] (of latents [block, 1, layer, token,
    latent|key]); both lie in `memory`, uint8 [block, kv_head, bytes]. `draft` is a pool's view of
    the draft's layer group in the same blocks. The memory is touched when first written."""

    def __init__(
        self,
        spec: ModelSpec,
        blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        codes: KvCodes | None = None,
        draft: ModelSpec | None = None,
        memory: torch.Tensor | None = None,
    ) -> None:
        """`dtype` is what attention computes with. On a `device` (None: the host), one more
        block, `spare_block`, which no sequence owns, takes the KV of rows that fill up a batch.
        `draft`: the model whose KV is the second layer group, in plain numbers. `memory`: zeros
        that the caller shares with other processes, uint8, in one dimension and long enough;
        None: the pool's own.
        Raises ConfigError if `blocks` is not positive, the memory cannot be had, or `codes` do
        not fit the model."""
        if blocks <= 0 or block_size <= 0:
            raise ConfigError(
                f"pool.blocks is {blocks} and pool.block_size {block_size}: give positive numbers"
            )
        there = blocks + (device is not None)
        own_bytes = block_bytes(spec, block_size, dtype, codes)
        draft_bytes = 0 if draft is None else block_bytes(draft, block_size, dtype)
        shape = there, own_bytes + draft_bytes
        if memory is not None:
            self._whole = memory[: math.prod(shape)].view(shape)
        else:
            self._whole = _on_host(shape) if device is None else _on_device(shape, device)
        self.blocks = blocks
        self.block_size = block_size
        self.block_bytes = own_bytes + draft_bytes  # of both groups
        self.spare_block = blocks
        self.dtype = dtype
        self._take_group(spec, self._whole[:, :own_bytes], codes)
        self.draft: KvPool | None = None
        if draft is not None:
            self.draft = copy(self)
            self.draft._take_group(draft, self._whole[:, own_bytes:], None)

    def _take_group(self, spec: ModelSpec, memory: torch.Tensor, codes: KvCodes | None) -> None:
        """Make `memory` [blocks, bytes], of one layer group, the one that attention sees."""
        there, size_bytes = memory.shape
        self.codes = codes
        self.memory = memory.view(there, spec.kv_heads, size_bytes // spec.kv_heads)
        self.scales: torch.Tensor | None = None
        rows = _block_shape(spec, self.block_size)
        if codes is None:
            self.tensor = self.memory.view(self.dtype).view(there, *rows)
            return
        many = math.prod(rows[1:])
        self.tensor = self.memory[:, :, :many].view(codes.dtype).view(there, *rows)
        scales = self.memory[:, :, many:].view(torch.float32)
        pair = (_scales_of_row(spec),) if spec.latent else ()
        self.scales = scales.view(there, *rows[:-1], *pair)

    @property
    def slab_groups(self) -> tuple[tuple[int, int], ...]:
        """KV heads and bytes of a head's slab, of each layer group in the order of a block."""
        groups = (self,) if self.draft is None else (self, self.draft)
        return tuple((group.memory.shape[1], group.memory.shape[2]) for group in groups)

    @property
    def slabs(self) -> int:
        """Slabs of a block, of all layer groups."""
        return sum(heads for heads, _ in self.slab_groups)

    @property
    def kind(self) -> str:
        """What a block holds, in words that peers compare: "bfloat16", "int8 of bfloat16"."""
        plain = str(self.dtype).removeprefix("torch.")
        return f"{self.codes.name} of {plain}" if self.codes else plain

    def put(self, layer: int, blocks: torch.Tensor, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Write `kv` [rows, kv_head, k|v, head_dim] into the `slots` of `blocks`, int64 [rows]."""
        if self.codes is None or self.scales is None:
            self.tensor.select(2, layer)[blocks, :, :, slots] = kv
            return
        codes, scales = self.codes.encode(kv)
        # Bytes: torch does not index some kinds of eight bits.
        bits = self.tensor.view(torch.uint8).select(2, layer)
        bits[blocks, :, :, slots] = codes.view(torch.uint8)
        self.scales.select(2, layer)[blocks, :, :, slots] = scales

    def take(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """A copy of `blocks` [...] in `dtype`: [..., kv_head, k|v, token, head_dim]."""
        if self.codes is None or self.scales is None:
            return self.tensor.select(2, layer)[blocks]
        bits = self.tensor.view(torch.uint8).select(2, layer)[blocks]
        scales = self.scales.select(2, layer)[blocks]
        return self.codes.decode(bits.view(self.codes.dtype), scales).to(self.dtype)

    def bytes_view(self) -> NDArray[np.uint8]:
        """The same memory as uint8 [blocks, block_bytes], C-contiguous, where the host has it."""
        return cast(NDArray[np.uint8], self.bytes_tensor().numpy())

    def bytes_tensor(self) -> torch.Tensor:
        """The same memory as uint8 [blocks, block_bytes], contiguous, wherever it lies."""
        return self._whole[: self.blocks]

    def as_pairs(self) -> KvPool:
        """A latent pool's own memory, as if every row were its token's key and value both:
        `tensor` [block, 1, layer, k|v, token, width], whose k|v axis has no stride. To read."""
        pairs = copy(self)
        pairs.tensor = self.tensor[:, :, :, None].expand(-1, -1, -1, 2, -1, -1)
        return pairs

    def of_heads(self, heads: range) -> KvPool:
        """The part of the same memory that holds these KV heads, as one rank computes with it."""
        part = copy(self)
        part.tensor = self.tensor[:, heads.start : heads.stop]
        if self.scales is not None:
            part.scales = self.scales[:, heads.start : heads.stop]
        return part

    def copy_block(self, source: int, target: int) -> None:
        """Copy one whole block. Raises ValueError if a block is not in the pool."""
        for block in (source, target):
            if not 0 <= block < self.blocks:
                raise ValueError(f"block {block} is not in the pool of {self.blocks} blocks")
        self._whole[target].copy_(self._whole[source])


def _on_host(shape: tuple[int, int]) -> torch.Tensor:
    blocks, block = shape
    try:
        # A READ through shared memory walks both pools page by page: twice as fast so.
        memory = map_memory(blocks * block)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"pool.blocks is {blocks}, of {block} bytes each: the system gives no "
            f"{blocks * block} bytes; give fewer blocks"
        ) from error
    return torch.frombuffer(memory, dtype=torch.uint8).view(shape)


def _on_device(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    try:
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"pool.blocks is {shape[0] - 1}: {device} has no memory for them; give fewer, or a "
            "smaller pool.memory_fraction"
        ) from error


def block_bytes(
    spec: ModelSpec, block_size: int, dtype: torch.dtype, codes: KvCodes | None = None
) -> int:
    """Bytes of one block of all layers. Raises ConfigError if `codes` do not fit the model."""
    shape = _block_shape(spec, block_size)
    if codes is None:
        return math.prod(shape) * dtype.itemsize
    if spec.head_dim % 4:  # a slab would not be whole words, which are what checksums add up
        raise ConfigError(
            f"pool.kv_dtype is {codes.name}: not for heads of {spec.head_dim} numbers, which are "
            "no multiple of 4; give auto"
        )
    block = math.prod(shape[:-1]) * (spec.head_dim + _scales_of_row(spec) * SCALE_BYTES)
    if block // spec.kv_heads % _WORD_BYTES:
        raise ConfigError(
            f"pool.kv_dtype is {codes.name}: {block // spec.kv_heads} bytes of a head and block "
            f"are no multiple of {_WORD_BYTES}; give another pool.block_size, or auto"
        )
    return block


def _scales_of_row(spec: ModelSpec) -> int:
    """A latent and the key beside it are of unlike sizes."""
    return 2 if spec.latent else 1


def _block_shape(spec: ModelSpec, block_size: int) -> tuple[int, ...]:
    """A latent model's one head has no k|v axis: its values are part of its keys."""
    pair = () if spec.latent else (2,)
    return (spec.kv_heads, spec.layers, *pair, block_size, spec.head_dim)


def blocks_for(
    spec: ModelSpec,
    block_size: int,
    dtype: torch.dtype,
    budget_bytes: int,
    codes: KvCodes | None = None,
    draft: ModelSpec | None = None,
) -> int:
    """How many blocks fit into `budget_bytes`. Raises ConfigError if they hold fewer tokens
    than any use needs, or as `block_bytes` does."""
    each = block_bytes(spec, block_size, dtype, codes)
    shown = _arithmetic(spec, block_size, dtype, codes)
    if draft is not None:
        each += block_bytes(draft, block_size, dtype)
        shown += f" + {_arithmetic(draft, block_size, dtype, None)} of the draft"
    blocks = budget_bytes // each
    least = -(-min(_LEAST_TOKENS, spec.max_context) // block_size)
    if blocks < least:
        raise ConfigError(
            f"the KV pool has {max(budget_bytes, 0)} bytes, room for {max(blocks, 0)} blocks: "
            f"{shown} = {each} bytes a block, "
            f"and at least {least} blocks ({least * each} bytes) are needed; raise "
            "pool.memory_fraction, free memory on this host, or use a smaller model"
        )
    return blocks


def _arithmetic(spec: ModelSpec, block_size: int, dtype: torch.dtype, codes: KvCodes | None) -> str:
    heads = "1 latent" if spec.latent else f"{spec.kv_heads} KV heads"
    pair = "" if spec.latent else " x 2"
    row = f"{spec.head_dim} x {dtype.itemsize} bytes"
    if codes is not None:
        scales = "2 scales" if spec.latent else "a scale"
        row = f"({spec.head_dim} codes + {scales} of {SCALE_BYTES} bytes)"
    return f"{heads} x {spec.layers} layers{pair} x {block_size} tokens x {row}"
