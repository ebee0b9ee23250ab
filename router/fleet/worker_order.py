"""Workers sorted by a cost, searched by sets of workers.

    [ chunk of up to CHUNK entries, and the bits of its workers ] [ chunk ] ...

A set is a mask of the radix index's bits. The workers of a set come in order, and chunks without
any of them are skipped with one operation each, so the first few cost O(sqrt n) at most, whatever
the set. Pure. Owned by the roster.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

CHUNK = 64

Entry = tuple[int, str, int]  # cost, worker id, its bit; 0: not in the index


@dataclass(slots=True)
class _Chunk:
    """`bits` are those of all entries; `blank` entries have none."""

    entries: list[Entry] = field(default_factory=list)
    bits: int = 0
    blank: int = 0

    def has(self, workers: int, others: bool) -> bool:
        """Return whether an entry is in the set `workers`, or in none."""
        if others:
            return bool(self.blank or self.bits & ~workers)
        return bool(self.bits & workers)

    def take(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.bits, self.blank = 0, 0
        for _, _, bit in entries:
            self.bits |= bit
            self.blank += not bit


class WorkerOrder:
    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []

    def insert(self, entry: Entry) -> None:
        at = min(self._chunk_index(entry), len(self._chunks) - 1)
        if at < 0:
            self._chunks.append(_Chunk())
            at = 0
        chunk = self._chunks[at]
        insort(chunk.entries, entry)
        chunk.bits |= entry[2]
        chunk.blank += not entry[2]
        if len(chunk.entries) > CHUNK:
            upper = _Chunk()
            upper.take(chunk.entries[CHUNK // 2 :])
            chunk.take(chunk.entries[: CHUNK // 2])
            self._chunks.insert(at + 1, upper)

    def remove(self, entry: Entry) -> None:
        """Remove an entry that was inserted."""
        at = self._chunk_index(entry)
        chunk = self._chunks[at]
        del chunk.entries[bisect_left(chunk.entries, entry)]
        chunk.bits ^= entry[2]
        chunk.blank -= not entry[2]
        if at + 1 < len(self._chunks):
            joined = chunk.entries + self._chunks[at + 1].entries
            if len(joined) <= CHUNK // 2:
                chunk.take(joined)
                del self._chunks[at + 1]
        if not chunk.entries:
            del self._chunks[at]

    @property
    def least(self) -> int:
        """Return the least cost; there is an entry."""
        return self._chunks[0].entries[0][0]

    def has(self, workers: int, others: bool) -> bool:
        """Return whether there is an entry of the set `workers`, or any of the `others`."""
        return any(chunk.has(workers, others) for chunk in self._chunks)

    def among(self, workers: int, others: bool) -> Iterator[Entry]:
        """Yield the entries of the set `workers`, or of all `others`, the cheapest first. No entry
        may be inserted or removed during the iteration."""
        for chunk in self._chunks:
            if chunk.has(workers, others):
                for entry in chunk.entries:
                    if (entry[2] & workers == 0) == others:
                        yield entry

    def _chunk_index(self, entry: Entry) -> int:
        return bisect_left(self._chunks, entry, key=lambda chunk: chunk.entries[-1])
