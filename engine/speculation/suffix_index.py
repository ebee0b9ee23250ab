"""Finds where the last tokens of a text occurred before, in the most recent `capacity` tokens.

    head[hash of two tokens] ──▶ newest ──link──▶ older ──link──▶ ...   positions where they ended
                                    │ before: the token in front of it, in the same text
                                    ▼ after: the token behind it

A node of a suffix tree is the set of positions at which its string ends, and its children are
counted from the tokens behind them. This index evaluates the nodes that a caller visits and stores
none: a lazy suffix tree (Giegerich, Kurtz and Stoye, 2003), over hash chains as in deflate. A node
lists its `MAX_POSITIONS` newest positions at most, so no text makes a search long. Several texts
may grow in one index by turns. Positions count up for ever; the slots of the oldest are used again.
Owned by one proposer or one of its tenants; knows no probabilities.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SHORTEST_MATCH = 2  # tokens that are hashed
LONGEST_MATCH = 16
MAX_POSITIONS = 16
NOWHERE = -1
_FIRST_SLOTS = 1024
_MULTIPLIER, _SECOND_MULTIPLIER = 0x9E3779B1, 0x85EBCA77
_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Match:
    """A position at which the last `length` tokens of a text occurred."""

    position: int
    length: int


class SuffixIndex:
    """`capacity`: a power of two, in tokens; an index takes 36 bytes for each, and as
    many slots as the next power of two of what it got so far. `visits`
    counts the positions and tokens that searches have looked at."""

    def __init__(self, capacity: int) -> None:
        if capacity < 2 or capacity & (capacity - 1):
            raise ValueError(f"capacity is {capacity}, not a power of two")
        self._capacity = capacity
        self._end = 0  # the next position
        self.visits = 0
        self._tokens, self._before, self._after = array("i"), array("q"), array("q")  # by slot
        self._resize(min(capacity, _FIRST_SLOTS))

    def __len__(self) -> int:
        return min(self._end, self._capacity)

    def append(self, tokens: Sequence[int], last: int = NOWHERE) -> int:
        """Append tokens behind position `last` of their text, NOWHERE where it begins; return the
        position of the last one. Costs O(1) a token, amortised."""
        for first in range(0, len(tokens), self._capacity):
            last = self._append_part(tokens[first : first + self._capacity], last)
        return last

    def token(self, position: int) -> int:
        return self._tokens[position & self._slot_mask]

    def after(self, position: int) -> int:
        """Return the position behind `position` in the same text; NOWHERE at its end."""
        return self._after[position & self._slot_mask]

    def matches(self, context: Sequence[int]) -> list[Match]:
        """Return positions where the last tokens of `context` ended and that a token follows, the
        newest first. Looks at `MAX_POSITIONS` chain links at most, and compares `LONGEST_MATCH`
        tokens for each."""
        if len(context) < SHORTEST_MATCH:
            return []
        tail = context[-LONGEST_MATCH:]
        found = []
        for position in self._chain(self._hash(tail[-2], tail[-1])):
            if self._after[position & self._slot_mask] == NOWHERE:
                continue
            length = self._match_length(position, tail)
            if length >= SHORTEST_MATCH:
                found.append(Match(position, length))
        return found

    def _chain(self, key: int) -> Iterator[int]:
        """Positions whose two last tokens have this hash, newest first."""
        position, floor = self._head[key], self._end - len(self._tokens)
        for _ in range(MAX_POSITIONS):
            if position < floor or position == NOWHERE:
                return
            self.visits += 1
            yield position
            older = self._link[position & self._slot_mask]
            position = older if older < position else NOWHERE

    def _match_length(self, position: int, tail: Sequence[int]) -> int:
        """Return how many tokens up to `position` equal the end of `tail`."""
        length, floor, mask = 0, self._end - len(self._tokens), self._slot_mask
        for token in reversed(tail):
            if position < floor or position == NOWHERE or self._tokens[position & mask] != token:
                break
            length += 1
            position = self._before[position & mask]
        self.visits += length + 1
        return length

    def _append_part(self, tokens: Sequence[int], last: int) -> int:
        needed = self._end + len(tokens)
        if len(self._tokens) < min(self._capacity, needed):
            self._resize(min(self._capacity, 1 << (needed - 1).bit_length()))
        if len(tokens) < 32:
            for token in tokens:
                last = self._append_one(token, last)
            return last
        return self._append_many(np.asarray(tokens, dtype=np.int32), last)

    def _append_one(self, token: int, last: int) -> int:
        position, mask = self._end, self._slot_mask
        slot = position & mask
        self._end += 1
        if last <= position - len(self._tokens):
            last = NOWHERE  # its slot is used again
        self._tokens[slot], self._before[slot], self._after[slot] = token, last, NOWHERE
        self._link[slot] = NOWHERE
        if last != NOWHERE:
            self._after[last & mask] = position
            key = self._hash(self._tokens[last & mask], token)
            self._link[slot], self._head[key] = self._head[key], position
        return position

    def _append_many(self, tokens: NDArray[np.int32], last: int) -> int:
        """Same as `_append_one` for each. No more tokens than slots."""
        self._append_one(int(tokens[0]), last)
        first = self._end
        positions = np.arange(first, first + len(tokens) - 1)
        slots = positions & self._slot_mask
        self._end += len(positions)
        np.frombuffer(self._tokens, np.int32)[slots] = tokens[1:]
        np.frombuffer(self._before, np.int64)[slots] = positions - 1
        after = np.frombuffer(self._after, np.int64)
        after[(positions - 1) & self._slot_mask] = positions
        after[slots[-1]] = NOWHERE
        self._link_positions(positions, self._hashes(tokens[:-1], tokens[1:]))
        return int(positions[-1])

    def _link_positions(self, positions: NDArray[np.int64], keys: NDArray[np.int64]) -> None:
        """Put positions, in rising order, at the heads of their chains."""
        order = np.argsort(keys, kind="stable")
        sorted_keys, sorted_positions = keys[order], positions[order]
        head = np.frombuffer(self._head, np.int64)
        older = np.empty_like(sorted_positions)
        older[1:] = sorted_positions[:-1]
        starts = np.flatnonzero(np.diff(sorted_keys, prepend=-1))
        older[starts] = head[sorted_keys[starts]]
        np.frombuffer(self._link, np.int64)[sorted_positions & self._slot_mask] = older
        ends = np.append(starts[1:], len(positions)) - 1
        head[sorted_keys[ends]] = sorted_positions[ends]

    def _resize(self, slots: int) -> None:
        """Make more slots before any is used twice: no position moves, chains are made over."""
        used = self._end
        old = self._tokens, self._before, self._after
        self._slot_mask = slots - 1
        self._key_shift = 32 - (slots.bit_length() - 1)
        self._tokens = array("i", bytes(4 * slots))
        self._before, self._after, self._link, self._head = (
            array("q", b"\xff" * (8 * slots)) for _ in range(4)
        )
        for new, part in zip((self._tokens, self._before, self._after), old, strict=True):
            new[:used] = part[:used]
        before = np.frombuffer(self._before, np.int64)[:used]
        tokens = np.frombuffer(self._tokens, np.int32)
        positions = np.flatnonzero(before != NOWHERE)
        if len(positions):
            keys = self._hashes(tokens[before[positions]], tokens[positions])
            self._link_positions(positions, keys)

    def _hash(self, first: int, second: int) -> int:
        mixed = (first * _SECOND_MULTIPLIER + second) & _MASK
        return (mixed * _MULTIPLIER & _MASK) >> self._key_shift

    def _hashes(self, first: NDArray[np.int32], second: NDArray[np.int32]) -> NDArray[np.int64]:
        mask = np.uint64(_MASK)
        mixed = first.astype(np.uint64) * np.uint64(_SECOND_MULTIPLIER) + second.astype(np.uint64)
        keys = (mixed & mask) * np.uint64(_MULTIPLIER) & mask
        return (keys >> np.uint64(self._key_shift)).astype(np.int64)
