"""The cache of checksums of offered full blocks, so that a shared prefix is checksummed once.

The cache is bounded and evicts the least recently used entry. A granter owns one and shares it
between its handoffs. The cache does not see the pool: a caller that changes the content of a block
calls `forget` first.
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
            raise ValueError(f"a checksum cache of {max_blocks} blocks is empty; give at least 1")
        self._max_blocks = max_blocks
        self._checksums: OrderedDict[int, tuple[bytes, NDArray[np.uint64]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._checksums)

    def get(self, block: int, identity: bytes) -> NDArray[np.uint64] | None:
        found = self._checksums.get(block)
        if found is None or found[0] != identity:
            return None
        self._checksums.move_to_end(block)
        return found[1]

    def put(self, block: int, identity: bytes, checksums: NDArray[np.uint64]) -> None:
        self._checksums[block] = (identity, checksums)
        self._checksums.move_to_end(block)
        if len(self._checksums) > self._max_blocks:
            self._checksums.popitem(last=False)

    def forget(self, blocks: Iterable[int]) -> None:
        """Drop blocks that are about to be written, since the same tokens may have other last bits
        when they are computed again."""
        for block in blocks:
            self._checksums.pop(block, None)
