"""The cache of checksums of offered full blocks: a shared prefix is summed once.

Bounded; the least recently used entry goes first. A granter owns one and shares it between its
handoffs. It cannot see the pool: a caller that gives a block new content calls `forget` first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

DEFAULT_BLOCKS = 16384


class ChecksumCache:
    """Maps (block, identity) to the block's checksums, uint64 [slabs]."""

    def __init__(self, max_blocks: int = DEFAULT_BLOCKS) -> None:
        if max_blocks < 1:
            raise ValueError("a checksum cache needs room for at least 1 block")
        self._max_blocks = max_blocks
        self._sums: OrderedDict[int, tuple[bytes, NDArray[np.uint64]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sums)

    def get(self, block: int, identity: bytes) -> NDArray[np.uint64] | None:
        found = self._sums.get(block)
        if found is None or found[0] != identity:
            return None
        self._sums.move_to_end(block)
        return found[1]

    def put(self, block: int, identity: bytes, sums: NDArray[np.uint64]) -> None:
        self._sums[block] = (identity, sums)
        self._sums.move_to_end(block)
        if len(self._sums) > self._max_blocks:
            self._sums.popitem(last=False)

    def forget(self, blocks: Iterable[int]) -> None:
        """Drop blocks that are about to be written: the same tokens computed again may differ in
        their last bits."""
        for block in blocks:
            self._sums.pop(block, None)
