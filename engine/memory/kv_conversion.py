"""KV of a pool in the layout of a pool with another KV dtype, for a reader that stores it so.

    plain ─▶ codes and scales, exactly those that a pool in eight bits would have written
    codes and scales ─▶ numbers, as attention over that pool would have read them

The KV of a draft model is plain in both, and is copied. The module writes into no pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.memory.kv_pool import KvPool, block_bytes
from baton.engine.memory.kv_quant import KV_QUANTS, KvQuant
from baton.engine.spec.model_spec import ModelSpec
from baton.runtime.errors import ConfigError


class KvConversion:
    """The conversion of the blocks of `pool`, whose model is `spec`, to those of a pool with
    `quant` (None: plain numbers of the same dtype). Raises ConfigError if `quant` does not fit the
    model."""

    def __init__(self, pool: KvPool, spec: ModelSpec, quant: KvQuant | None) -> None:
        self._pool = pool
        self._spec = spec
        self._quant = quant
        self._own_bytes = block_bytes(spec, pool.block_size, pool.dtype, quant)
        self._draft_bytes = sum(slabs * size for slabs, size in pool.slab_groups[1:])

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a converted block, of all layer groups."""
        return self._own_bytes + self._draft_bytes

    def converted(self, blocks: Sequence[int]) -> Tensor:
        """Return blocks of the pool in the other layout, uint8 [blocks, block_bytes], contiguous,
        on the pool's device. A host converts few at a time faster, since its caches hold them."""
        pool, stored = self._pool, self._pool.bytes_tensor()
        index = torch.tensor(blocks, dtype=torch.int64, device=stored.device)
        on_host = stored.device.type == "cpu"
        count = len(blocks) + (not on_host)  # a device's pool has a spare block
        memory = torch.empty(count * self._own_bytes, dtype=torch.uint8, device=stored.device)
        made = KvPool(
            self._spec,
            len(blocks),
            pool.block_size,
            pool.dtype,
            None if on_host else stored.device,
            self._quant,
            memory=memory,
        )
        self._write(made, self._numbers(index))
        if not self._draft_bytes:
            return made.bytes_tensor()
        draft = stored[index, stored.shape[1] - self._draft_bytes :]
        return torch.cat([made.bytes_tensor(), draft], dim=1)

    def _numbers(self, blocks: Tensor) -> Tensor:
        """Return the numbers of blocks, [blocks, kv_head, layer, ..., token, head_dim]."""
        pool = self._pool
        if pool.quant is None or pool.scales is None:
            return pool.tensor[blocks]
        # As bytes, because torch does not index some eight-bit dtypes.
        codes = pool.tensor.view(torch.uint8)[blocks].view(pool.quant.dtype)
        scales = pool.scales[blocks]
        if self._spec.latent is None:
            return pool.quant.decode(codes, scales).to(pool.dtype)
        parts = zip(self._parts(codes), scales.unbind(-1), strict=True)
        return torch.cat([pool.quant.decode(*part) for part in parts], dim=-1).to(pool.dtype)

    def _write(self, made: KvPool, numbers: Tensor) -> None:
        if made.quant is None or made.scales is None:
            made.tensor[: len(numbers)] = numbers
            return
        bits, scales = made.tensor.view(torch.uint8), made.scales
        if self._spec.latent is None:
            codes, row_scales = made.quant.encode(numbers)
            bits[: len(numbers)] = codes.view(torch.uint8)
            scales[: len(numbers)] = row_scales
            return
        both = [made.quant.encode(part) for part in self._parts(numbers)]
        bits[: len(numbers)] = torch.cat([codes.view(torch.uint8) for codes, _ in both], dim=-1)
        scales[: len(numbers)] = torch.stack([row_scales for _, row_scales in both], dim=-1)

    def _parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Divide the rows of a latent model into latent and key."""
        assert self._spec.latent is not None
        return rows.tensor_split((self._spec.latent.rank,), -1)


def conversion_to(pool: KvPool, spec: ModelSpec, kv_dtype: str) -> KvConversion | None:
    """Return the conversion to a `KvPool.kv_dtype`; None if this pool's KV is not converted to it:
    one of the two is the other's in eight bits, and the model's heads fit."""
    plain = str(pool.dtype).removeprefix("torch.")
    name, of, computed = kv_dtype.partition(" of ")
    if pool.quant is not None:
        return KvConversion(pool, spec, None) if kv_dtype == plain else None
    if not of or computed != plain or name not in KV_QUANTS:
        return None
    try:
        return KvConversion(pool, spec, KV_QUANTS[name])
    except ConfigError:
        return None  # its heads do not fit eight bits: neither do a reader's
