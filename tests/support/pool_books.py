"""The books of a block pool, for tests that damage them to see that `BlockPool.check` finds it.

The pool's owner changes them only by `allocate`, `release` and the like, so they are private; of
all tests only those of the check reach them, by this module.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.engine.scheduling.blocks import BlockPool


class BlockState(Protocol):
    """The pool's state of one block: a count per hold, the largest hold, its identity."""

    holds: list[int]
    hold: int
    identity: bytes | None


@dataclass(frozen=True, slots=True)
class PoolBooks:
    """The pool's own lists, not copies."""

    blocks: Sequence[BlockState]
    by_hold: list[int]
    free: list[int]
    evictable: OrderedDict[int, None]


def books_of(pool: BlockPool) -> PoolBooks:
    """Return the books of `pool`."""
    return PoolBooks(pool._blocks, pool._by_hold, pool._free, pool._evictable)
