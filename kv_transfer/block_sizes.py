"""Blocks of a granter that have another size than the reader's: where they land, and their order.

A READ brings whole blocks of the granter, which are what its checksums cover:

    granter 16, reader 32    | block 0 | block 1 |     an own block has `joined` cells, one for each
    granter 32, reader 16    |  own 0  |  own 1  |     `split` own blocks hold one of the granter's

A slab has its tokens side by side in each row, [row, token, bytes], so what has landed is in the
granter's order. Once verified, it is put into the own order in place: no memory beside the
destinations holds it. One of the two sizes divides the other. The module is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SlabRows:
    """The slabs of a layer group in a block: each is a sequence of `areas`, (rows, bytes of a token
    in a row), such as numbers and then their scales."""

    slabs: int
    areas: tuple[tuple[int, int], ...]

    @property
    def token_bytes(self) -> int:
        """Return the bytes of a token in one slab."""
        return sum(rows * row_bytes for rows, row_bytes in self.areas)


@dataclass(frozen=True, slots=True)
class BlockRatio:
    """The sizes of a granter's blocks and of the own ones; at least one of both numbers is 1."""

    split: int = 1  # own blocks that hold one of the granter's
    joined: int = 1  # granter's blocks that an own one holds, each in a cell

    @property
    def alike(self) -> bool:
        return self.split == self.joined

    def granter_blocks(self, own: int) -> int:
        """Return how many of the granter's blocks hold the tokens of so many own ones. Raises
        ValueError if they end within one."""
        if own % self.split:
            raise ValueError(f"{own} own blocks end within a granter's, which is {self.split}")
        return own // self.split * self.joined

    def own_blocks(self, granter: int) -> int:
        """Return how many own blocks are full with so many of the granter's."""
        return granter * self.split // self.joined

    def cells(self, blocks: Sequence[int], count: int) -> list[tuple[int, ...]]:
        """Return the cells of each of the first `count` granter's blocks in own `blocks`; cell
        `b * joined + i` is the i-th of own block b. Raises ValueError if there are too few."""
        if count * self.split > len(blocks) * self.joined:
            raise ValueError(f"{len(blocks)} blocks do not hold {count} of the granter's")
        joined, split = self.joined, self.split
        if joined > 1:
            return [(blocks[i // joined] * joined + i % joined,) for i in range(count)]
        return [tuple(blocks[i * split : (i + 1) * split]) for i in range(count)]

    def blocks_of(self, cells: Sequence[int]) -> list[int]:
        """Return the own blocks of some cells, each once."""
        return list(dict.fromkeys(cell // self.joined for cell in cells))


ALIKE = BlockRatio()


def block_ratio(granter_size: int, reader_size: int) -> BlockRatio | None:
    """Return the ratio of two sizes in tokens; None if neither divides the other, or one is 0."""
    if not granter_size or not reader_size:
        return None
    if granter_size % reader_size == 0:
        return BlockRatio(split=granter_size // reader_size)
    if reader_size % granter_size == 0:
        return BlockRatio(joined=reader_size // granter_size)
    return None


def in_own_order(
    landed: NDArray[np.uint8], groups: Sequence[SlabRows], ratio: BlockRatio
) -> NDArray[np.uint8]:
    """Return what has landed, in the own order.

    `landed`: [n, bytes of the larger one of both sizes], in the granter's order; `groups`: the
    layer groups of a block. The result is [n, the same], which `split` own blocks divide.
    """
    parts = ratio.joined * ratio.split  # small blocks of a large one
    count, width = landed.shape
    tokens = width // parts // sum(group.slabs * group.token_bytes for group in groups)
    made = np.empty_like(landed)
    small, large = (landed, made) if ratio.joined > 1 else (made, landed)
    small = small.reshape(count, parts, width // parts)
    first = 0  # byte of the group in a small block
    for group in groups:
        slab, before = tokens * group.token_bytes, 0
        end = first + group.slabs * slab
        slabs_small = small[:, :, first:end].reshape(count, parts, group.slabs, slab)
        slabs_large = large[:, first * parts : end * parts].reshape(
            count, group.slabs, slab * parts
        )
        for rows, row_bytes in group.areas:
            row = tokens * row_bytes
            after = before + rows * row
            ours = slabs_small[..., before:after].reshape(count, parts, group.slabs, rows, row)
            theirs = slabs_large[..., before * parts : after * parts].reshape(
                count, group.slabs, rows, parts, row
            )
            if ratio.joined > 1:
                theirs[...] = ours.transpose(0, 2, 3, 1, 4)
            else:
                ours[...] = theirs.transpose(0, 3, 1, 2, 4)
            before = after
        first = end
    return made
