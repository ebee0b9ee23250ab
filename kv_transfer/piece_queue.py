"""The pieces of READs that wait until they may be posted: a line for each peer, in order.

    add ─▶ waits in its peer's line ─▶ take: posted ─▶ ended
                   └──── abandon: never posted

An agent posts little at a time from each peer, and the rest waits here. So a READ's time begins
when its bytes can move, whatever else is to be read; and what nobody wants any more costs
nothing. Peers take turns, so that one that is cut off holds up no other. Several threads use it,
under one lock. It posts nothing and knows no NIXL.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from baton.kv_transfer.pieces import Piece, PiecewiseRead
from baton.runtime.errors import ReadFailed


@dataclass(slots=True)
class _Line:
    """`moved_at`: when a piece from this peer last ended, while others waited."""

    waiting: deque[Piece] = field(default_factory=deque)
    moved_at: float = 0.0


class PieceQueue:
    """Shared by the agents of a mover, which take pieces, and its event loop, which adds them."""

    def __init__(self) -> None:
        self._lines: dict[bytes, _Line] = {}  # by boot id; whose turn is next comes first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Pieces that wait."""
        with self._lock:
            return sum(len(line.waiting) for line in self._lines.values())

    def add(self, pieces: Sequence[Piece]) -> None:
        """The pieces of one READ."""
        with self._lock:
            self._lines.setdefault(pieces[0].read.boot_id, _Line()).waiting.extend(pieces)

    def take(self, full: Collection[bytes] = ()) -> Piece | None:
        """The next piece to post, but of no peer that is `full`; None: there is none."""
        with self._lock:
            boot_id = next((peer for peer in self._lines if peer not in full), None)
            if boot_id is None:
                return None
            line = self._lines.pop(boot_id)
            piece = line.waiting.popleft()
            if line.waiting:
                self._lines[boot_id] = line  # behind the other peers
            piece.read.under_way += 1
            piece.read.moved_at = time.monotonic()
            return piece

    def ended(self, piece: Piece, failure: ReadFailed | None) -> None:
        """A piece that was taken has landed, failed, or could not be posted. After a failure no
        other piece of its READ is posted."""
        read = piece.read
        with self._lock:
            read.under_way -= 1
            read.moved_at = time.monotonic()
            line = self._lines.get(read.boot_id)
            if line is not None:
                line.moved_at = read.moved_at
            dropped = self._drop(read) if failure is not None else 0
        read.pieces_ended(1 + dropped, failure)

    def abandon(self, read: PiecewiseRead) -> bool:
        """Post no further piece of this READ. Whether it has ended thereby: then no byte of it
        can land any more, and its `ended` is not told."""
        with self._lock:
            dropped = self._drop(read)
        return read.count_ended(dropped, ReadFailed("nobody waited for the READ any more"))

    def moved_at(self, read: PiecewiseRead) -> float:
        """When a READ last got on, by the monotonic clock: a piece of it was posted or ended;
        with none under way, one from its peer, which made room, ended."""
        with self._lock:
            line = self._lines.get(read.boot_id)
            if line is None or read.under_way:
                return read.moved_at
            return max(read.moved_at, line.moved_at)

    def _drop(self, read: PiecewiseRead) -> int:
        line = self._lines.get(read.boot_id)
        if line is None:
            return 0
        kept = deque(piece for piece in line.waiting if piece.read is not read)
        dropped = len(line.waiting) - len(kept)
        line.waiting = kept
        if not kept:
            del self._lines[read.boot_id]
        return dropped
