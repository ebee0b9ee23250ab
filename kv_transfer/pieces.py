"""READs in pieces, which a mover's threads share: whichever is free takes the next.

Where a READ is a copy by the host, no thread then stands idle while another still has pieces, and
what a piece brought is summed while a core's cache holds it. It posts nothing and knows no NIXL.
The mover owns the queue; a READ in pieces is counted under a lock of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.local_pool import DRAM, LocalPool
from baton.runtime.errors import ReadFailed

PIECE_BYTES = 4 << 20  # few enough that a core's caches still hold it when it has landed

# both are called in the thread that saw a piece end
Landed = Callable[[int, int], None]  # of a READ's blocks, those from the first to the end
Ended = Callable[[ReadFailed | None], None]


class PiecewiseRead:
    """A READ from the peer `boot_id`. `landed` is told of each piece as it lands; `ended` once,
    when no byte can land any more, with the first failure if there was one."""

    def __init__(self, boot_id: bytes, pieces: int, landed: Landed | None, ended: Ended) -> None:
        self.boot_id = boot_id
        self.landed = landed
        self.failure: ReadFailed | None = None
        self._ended = ended
        self._pieces = pieces  # that have not ended
        self._counting = threading.Lock()

    def piece_ended(self, failure: ReadFailed | None) -> None:
        """A piece has landed, failed, or will never be posted."""
        with self._counting:
            self._pieces -= 1
            self.failure = self.failure or failure
            last = self._pieces == 0
        if last:
            self._ended(self.failure)


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks `first` to `end` of a READ: the peer's, and the own ones that they go to."""

    read: PiecewiseRead
    first: int
    end: int
    remote: NDArray[np.int32]
    local: NDArray[np.int32]


Pieces = deque[Piece]  # its two ends may be used by several threads


def blocks_each(pool: LocalPool) -> int:
    """Blocks of a piece of a READ into this pool. Into a device's memory a READ goes whole: no
    core copies it."""
    return max(1, PIECE_BYTES // pool.block_bytes) if pool.memory == DRAM else pool.blocks


def cut(
    boot_id: bytes,
    remote: Sequence[int],
    local: Sequence[int],
    step: int,
    landed: Landed | None,
    ended: Ended,
) -> list[Piece]:
    """One READ of at least one block, in pieces of `step` blocks, in order."""
    firsts = range(0, len(local), step)
    read = PiecewiseRead(boot_id, len(firsts), landed, ended)
    theirs, ours = (np.asarray(blocks, dtype=np.int32) for blocks in (remote, local))
    return [
        Piece(read, first, first + len(part), theirs[first : first + step], part)
        for first in firsts
        for part in [ours[first : first + step]]
    ]
