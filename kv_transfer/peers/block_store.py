"""The pool of blocks, as handoffs see it: leases of a reader, pins of a granter, quarantine.

A seam: `engine.scheduling.blocks.BlockPool` implements it. The worker's loop owns the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class BlockStore(Protocol):
    def lease(self, count: int) -> list[int]:
        """Return blocks as destinations of READs. Raises OutOfBlocks."""
        ...

    def end_lease(self, blocks: Sequence[int]) -> None: ...

    def quarantine(self, blocks: Sequence[int]) -> None:
        """Set leased blocks aside, into which an abandoned READ may still write."""
        ...

    def end_quarantine(self, blocks: Sequence[int]) -> None: ...

    def pin_cached(
        self, identities: Sequence[bytes], tokens: Sequence[int], first: int
    ) -> list[int]:
        """Pin and return the blocks that are in the pool, from index `first` to the first one that
        is not."""
        ...

    @property
    def available(self) -> int:
        """Return how many blocks could be taken now."""
        ...

    def pin_targets(self, count: int) -> list[int]:
        """Take and pin blocks for what is converted for a reader. Raises OutOfBlocks."""
        ...

    def unpin(self, blocks: Sequence[int]) -> None: ...
