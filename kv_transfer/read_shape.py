"""The bytes that a READ moves, where the blocks of granter and reader differ in size.

A READ moves units: the bytes that one offered index names. At each end a unit lies in one or
several blocks, its parts, from the first byte of the first part on:

    granter    | part 0     | part 1     |
    reader     | part 0  | part 1  | part 2  |
    cuts       |    0    | 1|  2   |3| one descriptor each

Where both ends are alike, a unit is a block, and there is one cut. Where the ranks of a worker have
pools of their own, each with the KV heads of its rank, a unit is a block too, and a cut is a run of
heads that one rank reads from one other (see layout.py). The module is pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.layout import heads_of, runs


@dataclass(frozen=True, slots=True)
class Cut:
    """Bytes of a unit that lie in one part at both ends; the offsets are within these parts."""

    granter_part: int
    granter_offset: int
    reader_part: int
    reader_offset: int
    length: int
    granter_rank: int = 0  # whose pool it is, where each rank has one
    reader_rank: int = 0


@dataclass(frozen=True, slots=True)
class ReadShape:
    """How a unit of `unit_bytes` lies in the blocks of both ends."""

    unit_bytes: int
    granter_parts: int
    reader_parts: int
    cuts: tuple[Cut, ...]
    # Where ranks have pools: of each slab that is read, its index among the granter's slabs, rank
    # after rank; and how many those are. Else empty: the slabs of both ends are the same.
    slabs: tuple[int, ...] = ()
    granter_slabs: int = 0

    def end(self, blocks: NDArray[np.int32], of_pool: int, *, granter: bool) -> NDArray[np.int32]:
        """Return the descriptors of some units at one end: `blocks` has the parts of one unit after
        another, and descriptor c * `of_pool` + b is cut c of block b."""
        if len(self.cuts) == 1:
            return blocks
        units = blocks.reshape(-1, self.granter_parts if granter else self.reader_parts)
        parts = [cut.granter_part if granter else cut.reader_part for cut in self.cuts]
        return np.concatenate(
            [units[:, part] + np.int32(row * of_pool) for row, part in enumerate(parts)]
        )


def read_shape(unit_bytes: int, granter_bytes: int, reader_bytes: int) -> ReadShape:
    """Return the shape of a unit in blocks of these sizes. Raises ValueError if one is 0."""
    if min(unit_bytes, granter_bytes, reader_bytes) < 1:
        raise ValueError(f"a unit of {unit_bytes} bytes in {granter_bytes} and {reader_bytes}")
    cuts, at = [], 0
    while at < unit_bytes:
        granter_part, granter_offset = divmod(at, granter_bytes)
        reader_part, reader_offset = divmod(at, reader_bytes)
        length = min(granter_bytes - granter_offset, reader_bytes - reader_offset, unit_bytes - at)
        cuts.append(Cut(granter_part, granter_offset, reader_part, reader_offset, length))
        at += length
    return ReadShape(
        unit_bytes, -(-unit_bytes // granter_bytes), -(-unit_bytes // reader_bytes), tuple(cuts)
    )


def ranks_shape(kv_heads: int, slab_bytes: int, granter_ranks: int, reader_ranks: int) -> ReadShape:
    """Return the shape of a block whose KV heads, each a slab of `slab_bytes`, are in the pools of
    these numbers of ranks; 1: in one pool. Raises ValueError if heads do not divide over ranks."""
    cuts: list[Cut] = []
    slabs: list[int] = []
    each = len(heads_of(kv_heads, granter_ranks, 0))
    for rank in range(reader_ranks):
        for run in runs(kv_heads, reader_ranks, rank, granter_ranks):
            cuts.append(
                Cut(
                    granter_part=0,
                    granter_offset=run.granter_slab * slab_bytes,
                    reader_part=0,
                    reader_offset=run.reader_slab * slab_bytes,
                    length=run.slabs * slab_bytes,
                    granter_rank=run.granter_rank,
                    reader_rank=rank,
                )
            )
            first = run.granter_rank * each + run.granter_slab
            slabs += range(first, first + run.slabs)
    unit_bytes = len(slabs) * slab_bytes
    return ReadShape(unit_bytes, 1, 1, tuple(cuts), tuple(slabs), granter_ranks * each)
