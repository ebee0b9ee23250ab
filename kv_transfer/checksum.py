"""Checksums of KV blocks: 64 bits for each head slab of each layer group, seeded with the identity
of the block.

The checksum of a slab of 64-bit words w[0..n) under a seed s is

    key(i)  = s + i * PHI                          (mod 2**64, as everything here)
    product = sum of lo32(w[i] ^ key(i)) * hi32(w[i] ^ key(i))
    total   = sum of w[i]
    sum     = mix(product ^ mix(total + s))

`product` is the multilinear family NH of Black et al., UMAC (CRYPTO 1999), with keys from a
Weyl sequence; `total` changes with every single flipped bit; `mix` is the finaliser of
SplitMix64 (Steele et al., OOPSLA 2014). Additions commute, so a GPU may sum in any order.
The checksum detects wrong, stale and torn blocks, not forged ones. This module defines it; hosts
compute it with checksum_numba.py, GPUs with engine/triton/checksum.py. It keeps no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

CHECKSUM_ALGORITHM = "nh64-1"
WORD_BYTES = 8

PHI = np.uint64(0x9E3779B97F4A7C15)
MIX_A = np.uint64(0xBF58476D1CE4E5B9)
MIX_B = np.uint64(0x94D049BB133111EB)
LOW = np.uint64(0xFFFFFFFF)


def block_seed(boot_id: bytes, block: int, tag: bytes) -> int:
    """Return the seed of block `block` in the pool of the worker `boot_id`.

    `tag` identifies the content: the identity of a full block, or `partial_tag` of a partial one.
    The checksum of another block, worker or content is therefore not accepted for this one.
    """
    parts = (boot_id, block.to_bytes(8, "little"), tag)
    content = b"".join([len(part).to_bytes(4, "little") + part for part in parts])
    digest = blake2b(content, digest_size=8, person=b"baton-seed").digest()
    return int.from_bytes(digest, "little")


def partial_tag(handoff_id: bytes, tokens: int) -> bytes:
    """Return the tag of a partial last block, which belongs to a single handoff."""
    return b"partial" + handoff_id + tokens.to_bytes(4, "little")


def converted_tag(identity: bytes, kv_dtype: str) -> bytes:
    """Return the tag of a full block that was converted to `kv_dtype`: its content differs from
    that of the block with this identity."""
    return b"converted" + kv_dtype.encode() + b":" + identity


@dataclass(frozen=True, slots=True)
class SlabGroup:
    """Consecutive slabs of equal length: the KV heads of a layer group."""

    slabs: int
    slab_bytes: int


def slab_groups(
    block_bytes: int, slabs: int, draft: SlabGroup | None = None
) -> tuple[SlabGroup, ...]:
    """Return the groups of a block: `slabs` equal slabs, followed by those of a draft model.
    Raises ValueError unless each slab is a whole number of words."""
    beside = 0 if draft is None else draft.slabs * draft.slab_bytes
    whole = (
        slabs > 0 and block_bytes > beside and (block_bytes - beside) % (slabs * WORD_BYTES) == 0
    )
    if not whole or (draft is not None and (draft.slabs < 1 or draft.slab_bytes % WORD_BYTES)):
        behind = "" if draft is None else f" and {draft.slabs} of {draft.slab_bytes} bytes"
        raise ValueError(
            f"a block of {block_bytes} bytes cannot have {slabs} slabs of 8-byte words{behind}"
        )
    own = SlabGroup(slabs, (block_bytes - beside) // slabs)
    return (own,) if draft is None else (own, draft)


def reference(
    blocks_of_pool: NDArray[np.uint8],
    blocks: Sequence[int],
    seeds: Sequence[int],
    slabs: int,
    draft: SlabGroup | None = None,
) -> NDArray[np.uint64]:
    """Same as `checksum_numba.checksums`, in NumPy: slow, for tests and ports to GPUs."""
    picked = blocks_of_pool.view(np.uint64)[np.asarray(blocks, dtype=np.int64)]
    seed = np.asarray(seeds, dtype=np.uint64).reshape(-1, 1, 1)
    found, first = [], 0
    for group in slab_groups(blocks_of_pool.shape[1], slabs, draft):
        width = group.slab_bytes // WORD_BYTES
        end = first + group.slabs * width
        parts = picked[:, first:end].reshape(len(blocks), group.slabs, width)
        keyed = parts ^ (seed + np.arange(width, dtype=np.uint64) * PHI)
        product = ((keyed & LOW) * (keyed >> np.uint64(32))).sum(axis=2, dtype=np.uint64)
        total = parts.sum(axis=2, dtype=np.uint64)
        found.append(_mix_array(product ^ _mix_array(total + seed[:, :, 0])))
        first = end
    return np.concatenate(found, axis=1)


def _mix_array(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * MIX_A
    value = (value ^ (value >> np.uint64(27))) * MIX_B
    return value ^ (value >> np.uint64(31))
