"""The pools of a worker whose ranks keep their KV heads in memories of their own, as one pool.

    block b of the worker    | block b of rank 0's pool | block b of rank 1's | ...
    its slabs                  heads of rank 0            heads of rank 1

With more ranks than KV heads, several ranks hold the same head, each in its own pool; all of these
copies are slabs of the block, read and verified each by itself. The engine owns the memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.block_sizes import BlockRatio
from baton.kv_transfer.local_pool import LocalPool, RankPool
from baton.runtime.errors import ReadFailed


class RankedPool:
    """Implements `local_pool.LocalPool` over the pools of all ranks of a worker, in their order."""

    bridges_sizes = False

    def __init__(self, pools: Sequence[LocalPool], kv_heads: int) -> None:
        """Raises ValueError unless the pools are alike."""
        first = pools[0]
        alike = {(each.blocks, each.block_bytes, each.slabs, each.memory) for each in pools}
        if len(alike) != 1:
            raise ValueError(f"the pools of {len(pools)} ranks differ: {sorted(alike)}")
        self._pools = tuple(pools)
        self.kv_heads = kv_heads
        self.address, self.blocks = first.address, first.blocks
        self.memory, self.device_id = first.memory, first.device_id
        self.block_bytes = sum(each.block_bytes for each in pools)
        self.slabs = sum(each.slabs for each in pools)
        self.rank_pools = tuple(
            RankPool(each.address, each.block_bytes, each.device_id) for each in pools
        )

    def checksums(self, blocks: Sequence[int], seeds: Sequence[int]) -> NDArray[np.uint64]:
        return np.concatenate([each.checksums(blocks, seeds) for each in self._pools], axis=1)

    def landed_checksums(
        self, cells: Sequence[int], seeds: Sequence[int], ratio: BlockRatio
    ) -> NDArray[np.uint64]:
        raise ReadFailed(_OWN_SIZE)  # the handshake refuses such a peer

    def put_in_order(self, blocks: Sequence[int], filled: Sequence[int], ratio: BlockRatio) -> None:
        raise ReadFailed(_OWN_SIZE)

    def enter_thread(self) -> None:
        for each in reversed(self._pools):  # the first one's device stays current
            each.enter_thread()


_OWN_SIZE = "blocks of another size are not read into the pools of several ranks"
