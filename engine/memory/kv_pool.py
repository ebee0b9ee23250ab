"""The paged KV pool: one tensor, its bytes, and the number of blocks that a budget allows.

    [block, kv_head, layer, k|v, token, head_dim]
     a block is one contiguous region; so are the heads of a tensor-parallel rank within it

    [block, 1, layer, token, latent and rotated key]      for multi-head latent attention
     one slab, the same on every rank

    [block, kv_head, codes [layer, k|v, token, head_dim] | scales [layer, k|v, token]]
     in eight bits: a head's slab ends with its scales, so that transfers and checksums include
     them; a latent row has two scales, [layer, token, latent|key]

    [block, bytes of the target's group | bytes of the draft's group]
     with a draft model, a block holds a second layer group with heads and layers of its own; both
     groups are computed, transferred and published together; that of an EAGLE-3 head is one slab:
     its KV, then `features` [token, number], which the target computes

The pool knows no sequences and no identities. The caller decides which blocks may be written: by
the device thread, by a READ that lands, or by a conversion for a reader of another KV dtype.
"""

from __future__ import annotations

import math
from copy import copy
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from baton.engine.memory.huge_pages import map_memory, populate
from baton.engine.memory.kv_quant import SCALE_BYTES, KvQuant
from baton.engine.spec.model_spec import ModelSpec
from baton.runtime.errors import ConfigError

_WORD_BYTES = 8  # the unit of checksums
_MIN_POOL_TOKENS = 512
_POPULATED_BYTES = 1 << 30  # of a host's pool, before the first request (decision 0160)


class KvPool:
    """All KV blocks of a worker. `tensor` has the shape above, in `dtype`, or in the codes of
    `quant` with float32 `scales` [block, kv_head, layer, k|v, token] (MLA: [block, 1, layer,
    token, latent|key]); both are views of `memory`, uint8 [block, kv_head, bytes]. `draft` is the
    view of the draft's layer group in the same blocks. On a host, the system allocates the first
    GiB at once, the rest when it is first written."""

    parts: tuple[KvPool, ...] = ()  # of all ranks, the own one first, if each has a pool
    # Of each layer group of a block, in its order: (slabs, bytes of a slab), and (slabs, areas of a
    # slab). An area is (rows, bytes of a token in a row): [row, token, bytes].
    slab_groups: tuple[tuple[int, int], ...]
    slab_rows: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]

    def __init__(
        self,
        spec: ModelSpec,
        blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        quant: KvQuant | None = None,
        *,
        draft: ModelSpec | None = None,
        memory: torch.Tensor | None = None,
    ) -> None:
        """Allocate the pool. Attention computes in `dtype`. On a `device` (None: the host), the
        pool has one more block, `spare_block`, for the KV of rows that pad a batch; no sequence
        owns it. `draft`: the model whose unquantised KV is the second layer group. `memory`:
        zeros, uint8 in one dimension and long enough, that the caller shares with other
        processes; None: the pool allocates its own.
        Raises ConfigError if `blocks` is not positive, the system refuses the memory, or `quant`
        does not fit the model."""
        if blocks <= 0 or block_size <= 0:
            raise ConfigError(
                f"pool.blocks is {blocks} and pool.block_size {block_size}: give positive numbers"
            )
        there = blocks + (device is not None)
        own_bytes = block_bytes(spec, block_size, dtype, quant)
        draft_bytes = 0 if draft is None else block_bytes(draft, block_size, dtype)
        shape = there, own_bytes + draft_bytes
        if memory is not None:
            self._whole = memory[: math.prod(shape)].view(shape)
        else:
            self._whole = _on_host(shape) if device is None else _on_device(shape, device)
        if device is None:
            populate(self._whole, _POPULATED_BYTES)
        self.blocks = blocks
        self.block_size = block_size
        self.block_bytes = own_bytes + draft_bytes  # of both groups
        self.spare_block = blocks
        self.dtype = dtype
        self._take_group(spec, self._whole[:, :own_bytes], quant)
        self.draft: KvPool | None = None
        if draft is not None:
            self.draft = copy(self)
            self.draft._take_group(draft, self._whole[:, own_bytes:], None)
        self._describe_block()

    def _take_group(self, spec: ModelSpec, memory: torch.Tensor, quant: KvQuant | None) -> None:
        """Show attention the layer group in `memory` [blocks, bytes]."""
        there, size_bytes = memory.shape
        self.quant = quant
        self.scales: torch.Tensor | None = None
        self.features: torch.Tensor | None = None
        self._areas = _areas(spec, self.dtype, quant)
        slabs = 1 if spec.features else spec.kv_heads
        self.memory = memory.view(there, slabs, size_bytes // slabs)
        rows = _block_shape(spec, self.block_size)
        if spec.features:
            kv_bytes = math.prod(rows) * self.dtype.itemsize
            behind = memory[:, kv_bytes:].view(self.dtype)
            self.features = behind.view(there, self.block_size, spec.features)
            self.tensor = memory[:, :kv_bytes].view(self.dtype).view(there, *rows)
            return
        if quant is None:
            self.tensor = self.memory.view(self.dtype).view(there, *rows)
            return
        many = math.prod(rows[1:])
        self.tensor = self.memory[:, :, :many].view(quant.dtype).view(there, *rows)
        scales = self.memory[:, :, many:].view(torch.float32)
        pair = (_scales_of_row(spec),) if spec.latent else ()
        self.scales = scales.view(there, *rows[:-1], *pair)

    def _describe_block(self) -> None:
        """Set what describes a whole block, in the views of its parts too."""
        groups = (self,) if self.draft is None else (self, self.draft)
        shapes = tuple((group.memory.shape[1], group.memory.shape[2]) for group in groups)
        rows = tuple((group.memory.shape[1], group._areas) for group in groups)
        for group in groups:
            group.slab_groups, group.slab_rows = shapes, rows

    @property
    def slabs(self) -> int:
        """Return the number of slabs of a whole block, of all layer groups."""
        return sum(heads for heads, _ in self.slab_groups)

    @property
    def kv_dtype(self) -> str:
        """Same as `kv_name`."""
        return kv_name(self.dtype, self.quant)

    def put(self, layer: int, blocks: torch.Tensor, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Write `kv` [rows, kv_head, k|v, head_dim] into the `slots` of `blocks`, int64 [rows]."""
        if self.quant is None or self.scales is None:
            self.tensor.select(2, layer)[blocks, :, :, slots] = kv
            return
        codes, scales = self.quant.encode(kv)
        # As bytes, because torch does not index some eight-bit dtypes.
        bits = self.tensor.view(torch.uint8).select(2, layer)
        bits[blocks, :, :, slots] = codes.view(torch.uint8)
        self.scales.select(2, layer)[blocks, :, :, slots] = scales

    def take(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Return a copy of `blocks` [...] in `dtype`: [..., kv_head, k|v, token, head_dim]."""
        if self.quant is None or self.scales is None:
            return self.tensor.select(2, layer)[blocks]
        bits = self.tensor.view(torch.uint8).select(2, layer)[blocks]
        scales = self.scales.select(2, layer)[blocks]
        return self.quant.decode(bits.view(self.quant.dtype), scales).to(self.dtype)

    def bytes_view(self) -> NDArray[np.uint8]:
        """Return the pool of a host as uint8 [blocks, block_bytes], C-contiguous."""
        return cast(NDArray[np.uint8], self.bytes_tensor().numpy())

    def bytes_tensor(self) -> torch.Tensor:
        """Return the pool as uint8 [blocks, block_bytes], contiguous, on its own device."""
        return self._whole[: self.blocks]

    def as_pairs(self) -> KvPool:
        """Return a read-only view of an MLA pool in which each row is both key and value:
        `tensor` [block, 1, layer, k|v, token, width], whose k|v axis has stride 0."""
        pairs = copy(self)
        pairs.tensor = self.tensor[:, :, :, None].expand(-1, -1, -1, 2, -1, -1)
        return pairs

    def of_heads(self, heads: range) -> KvPool:
        """Return the view of these KV heads, with which one rank computes. `memory`, `tensor` and
        `scales` are of these heads alone; `slabs`, `slab_groups`, `slab_rows` and bytes stay those
        of whole blocks."""
        part = copy(self)
        part.memory = self.memory[:, heads.start : heads.stop]
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
        # A READ through shared memory walks both pools by page: huge pages double its speed.
        memory = map_memory(blocks * block)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"pool.blocks is {blocks}, of {block} bytes each: the system refused "
            f"{blocks * block} bytes; give fewer blocks"
        ) from error
    return torch.frombuffer(memory, dtype=torch.uint8).view(shape)


def _on_device(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    try:
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"pool.blocks is {shape[0] - 1}: {device} has no memory for them; give fewer blocks or "
            "a smaller pool.memory_fraction"
        ) from error


def kv_name(dtype: torch.dtype, quant: KvQuant | None) -> str:
    """Return the dtype of the KV, which peers compare: "bfloat16" or "int8 of bfloat16"."""
    plain = str(dtype).removeprefix("torch.")
    return f"{quant.name} of {plain}" if quant else plain


def block_bytes(
    spec: ModelSpec, block_size: int, dtype: torch.dtype, quant: KvQuant | None = None
) -> int:
    """Return the bytes of one block of all layers. Raises ConfigError if `quant` does not fit the
    model."""
    shape = _block_shape(spec, block_size)
    if quant is None:
        return (math.prod(shape) + block_size * spec.features) * dtype.itemsize
    if spec.head_dim % 4:  # checksums need slabs of whole words
        raise ConfigError(
            f"pool.kv_dtype is {quant.name}: heads have {spec.head_dim} numbers, which is not "
            "a multiple of 4; give auto"
        )
    block = math.prod(shape[:-1]) * (spec.head_dim + _scales_of_row(spec) * SCALE_BYTES)
    if block // spec.kv_heads % _WORD_BYTES:
        raise ConfigError(
            f"pool.kv_dtype is {quant.name}: {block // spec.kv_heads} bytes of a head and block "
            f"are not a multiple of {_WORD_BYTES}; give another pool.block_size, or auto"
        )
    return block


def _scales_of_row(spec: ModelSpec) -> int:
    """Return the scales of an MLA row: one for the latent, one for the key."""
    return 2 if spec.latent else 1


def _block_shape(spec: ModelSpec, block_size: int) -> tuple[int, ...]:
    """Return the shape of a block. MLA's one head has no k|v axis: values are part of keys."""
    pair = () if spec.latent else (2,)
    return (spec.kv_heads, spec.layers, *pair, block_size, spec.head_dim)


def _areas(
    spec: ModelSpec, dtype: torch.dtype, quant: KvQuant | None
) -> tuple[tuple[int, int], ...]:
    """Return the areas of a slab: KV, then scales, or the features of an EAGLE-3 head."""
    heads, *layers, _, _ = _block_shape(spec, 1)
    rows, item_bytes = math.prod(layers), dtype.itemsize
    if spec.features:
        return (heads * rows, spec.head_dim * item_bytes), (1, spec.features * item_bytes)
    if quant is None:
        return ((rows, spec.head_dim * item_bytes),)
    return (rows, spec.head_dim), (rows, _scales_of_row(spec) * SCALE_BYTES)


def blocks_for(
    spec: ModelSpec,
    block_size: int,
    dtype: torch.dtype,
    budget_bytes: int,
    quant: KvQuant | None = None,
    draft: ModelSpec | None = None,
) -> int:
    """Return how many blocks fit into `budget_bytes`. Raises ConfigError if they hold too few
    tokens for any use, or like `block_bytes`."""
    each = block_bytes(spec, block_size, dtype, quant)
    shown = _arithmetic(spec, block_size, dtype, quant)
    if draft is not None:
        each += block_bytes(draft, block_size, dtype)
        shown += f" + {_arithmetic(draft, block_size, dtype, None)} of the draft"
    blocks = budget_bytes // each
    least = -(-min(_MIN_POOL_TOKENS, spec.max_context) // block_size)
    if blocks < least:
        raise ConfigError(
            f"the KV pool has {max(budget_bytes, 0)} bytes, room for {max(blocks, 0)} blocks: "
            f"{shown} = {each} bytes a block, "
            f"and at least {least} blocks ({least * each} bytes) are needed; raise "
            "pool.memory_fraction, free memory on this host, or use a smaller model"
        )
    return blocks


def _arithmetic(spec: ModelSpec, block_size: int, dtype: torch.dtype, quant: KvQuant | None) -> str:
    heads = "1 latent" if spec.latent else f"{spec.kv_heads} KV heads"
    pair = "" if spec.latent else " x 2"
    row = f"{spec.head_dim} x {dtype.itemsize} bytes"
    if quant is not None:
        scales = "2 scales" if spec.latent else "a scale"
        row = f"({spec.head_dim} codes + {scales} of {SCALE_BYTES} bytes)"
    features = f" + {block_size} tokens x {spec.features} features" if spec.features else ""
    return f"{heads} x {spec.layers} layers{pair} x {block_size} tokens x {row}{features}"
