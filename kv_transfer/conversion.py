"""Blocks converted to a reader's KV dtype: the seam to the engine, and the form in host memory.

    own blocks ─▶ converted bytes ─▶ checksums of these bytes
                        └─▶ target blocks of the own pool, which are offered

A converted block is laid out as the reader's own: slabs of heads with their scales. It lies in as
many blocks as its bytes need, from the first byte of the first one on. The module knows no tensors
and no leases: peers/converted_prompt.py decides what is converted, and when its blocks are free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.checksum import SlabGroup


class Conversion(Protocol):
    """The conversion of own blocks to one other KV dtype."""

    @property
    def kv_dtype(self) -> str:
        """Return the reader's."""
        ...

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a converted block, as the reader's pool has them."""
        ...

    @property
    def parts(self) -> int:
        """Return how many own blocks hold one converted block."""
        ...

    def convert(
        self, sources: Sequence[int], targets: Sequence[int], seeds: Sequence[int]
    ) -> NDArray[np.uint64]:
        """Convert the own blocks `sources` into `targets`, `parts` for each, and return the
        checksums of what was written, [sources, slabs of the reader]. Any thread may call it;
        nothing else writes into these blocks."""
        ...


# From a reader's KV dtype to the conversion; None: there is none.
Conversions = Callable[[str], Conversion | None]


def no_conversions(kv_dtype: str) -> None:
    """Implements `Conversions` for a worker that converts nothing."""


BlockChecksums = Callable[[NDArray[np.uint8], int], NDArray[np.uint64]]


def numba_checksums(slabs: int, draft: SlabGroup | None = None) -> BlockChecksums:
    """Return the handoff's checksums of one block, [1, block bytes], with its seed; for `slabs` and
    `draft` see `checksum.slab_groups`."""
    from baton.kv_transfer import checksum_numba  # needs numba, which GPU workers lack

    def checksums(content: NDArray[np.uint8], seed: int) -> NDArray[np.uint64]:
        row: NDArray[np.uint64] = checksum_numba.checksums(content, (0,), (seed,), slabs, draft)[0]
        return row

    return checksums


@dataclass(frozen=True, slots=True)
class HostConversion:
    """A conversion in host memory. `pool`: uint8 [blocks, block bytes]; `converted` returns one
    block in the reader's layout, uint8 [1, block_bytes], C-contiguous; `checksums` computes those
    of such a block with a seed, uint64 [slabs]. Blocks are converted one by one, which a core's
    cache holds."""

    kv_dtype: str
    block_bytes: int
    pool: NDArray[np.uint8]
    converted: Callable[[int], NDArray[np.uint8]]
    checksums: BlockChecksums

    @property
    def parts(self) -> int:
        width: int = self.pool.shape[1]
        return -(-self.block_bytes // width)

    def convert(
        self, sources: Sequence[int], targets: Sequence[int], seeds: Sequence[int]
    ) -> NDArray[np.uint64]:
        width, parts, found = self.pool.shape[1], self.parts, []
        for index, (source, seed) in enumerate(zip(sources, seeds, strict=True)):
            content = self.converted(source)
            for part, target in enumerate(targets[index * parts : (index + 1) * parts]):
                piece = content[0, part * width : (part + 1) * width]
                self.pool[target, : len(piece)] = piece
            found.append(self.checksums(content, seed))
        return np.array(found, dtype=np.uint64)
