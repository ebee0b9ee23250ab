"""Finds where the last tokens of a text occurred before, in the most recent `capacity` tokens.

    head[hash of two tokens] ──▶ newest ──link──▶ older ──link──▶ ...   places where they ended
                                    │ before: the token in front of it, in the same text
                                    ▼ after: the token behind it

A node of a suffix tree is the set of places at which its string ends, and its children are counted
from the tokens behind them. This index evaluates the nodes that a caller visits and stores none:
a lazy suffix tree (Giegerich, Kurtz and Stoye, 2003), over hash chains as in deflate. A node lists
its `MAX_PLACES` newest places at most, so no text makes a search long. Several texts may grow in
one index by turns. Places count up for ever; the slots of the oldest are used again.
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
MAX_PLACES = 16
NOWHERE = -1
_FIRST_SLOTS = 1024
_MULTIPLIER, _SECOND_MULTIPLIER = 0x9E3779B1, 0x85EBCA77
_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Match:
    """A place at which the last `length` tokens of a text occurred."""

    place: int
    length: int


class SuffixIndex:
    """`capacity`: a power of two, in tokens; an index takes 36 bytes for each, and as
    many slots as the next power of two of what it got so far. `visits`
    counts the places and tokens that searches have looked at."""

    def __init__(self, capacity: int) -> None:
        if capacity < 2 or capacity & (capacity - 1):
            raise ValueError(f"capacity is {capacity}, not a power of two")
        self._capacity = capacity
        self._end = 0  # the next place
        self.visits = 0
        self._tokens, self._before, self._after = array("i"), array("q"), array("q")  # by slot
        self._resize(min(capacity, _FIRST_SLOTS))

    def __len__(self) -> int:
        return min(self._end, self._capacity)

    def append(self, tokens: Sequence[int], last: int = NOWHERE) -> int:
        """Append tokens behind place `last` of their text, NOWHERE where it begins; return the
        place of the last one. Costs O(1) a token, amortised."""
        for first in range(0, len(tokens), self._capacity):
            last = self._append_part(tokens[first : first + self._capacity], last)
        return last

    def token(self, place: int) -> int:
        return self._tokens[place & self._slot_mask]

    def after(self, place: int) -> int:
        """Return the place behind `place` in the same text; NOWHERE at its end."""
        return self._after[place & self._slot_mask]

    def matches(self, context: Sequence[int]) -> list[Match]:
        """Return places where the last tokens of `context` ended and that a token follows, newest
        first. Looks at `MAX_PLACES` chain links at most, and compares `LONGEST_MATCH` tokens for
        each."""
        if len(context) < SHORTEST_MATCH:
            return []
        tail = context[-LONGEST_MATCH:]
        found = []
        for place in self._chain(self._hash(tail[-2], tail[-1])):
            if self._after[place & self._slot_mask] == NOWHERE:
                continue
            length = self._match_length(place, tail)
            if length >= SHORTEST_MATCH:
                found.append(Match(place, length))
        return found

    def _chain(self, key: int) -> Iterator[int]:
        """Places whose two last tokens have this hash, newest first."""
        place, floor = self._head[key], self._end - len(self._tokens)
        for _ in range(MAX_PLACES):
            if place < floor or place == NOWHERE:
                return
            self.visits += 1
            yield place
            older = self._link[place & self._slot_mask]
            place = older if older < place else NOWHERE

    def _match_length(self, place: int, tail: Sequence[int]) -> int:
        """Return how many tokens up to `place` equal the end of `tail`."""
        length, floor, mask = 0, self._end - len(self._tokens), self._slot_mask
        for token in reversed(tail):
            if place < floor or place == NOWHERE or self._tokens[place & mask] != token:
                break
            length += 1
            place = self._before[place & mask]
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
        place, mask = self._end, self._slot_mask
        slot = place & mask
        self._end += 1
        if last <= place - len(self._tokens):
            last = NOWHERE  # its slot is used again
        self._tokens[slot], self._before[slot], self._after[slot] = token, last, NOWHERE
        self._link[slot] = NOWHERE
        if last != NOWHERE:
            self._after[last & mask] = place
            key = self._hash(self._tokens[last & mask], token)
            self._link[slot], self._head[key] = self._head[key], place
        return place

    def _append_many(self, tokens: NDArray[np.int32], last: int) -> int:
        """Same as `_append_one` for each. No more tokens than slots."""
        self._append_one(int(tokens[0]), last)
        first = self._end
        places = np.arange(first, first + len(tokens) - 1)
        slots = places & self._slot_mask
        self._end += len(places)
        np.frombuffer(self._tokens, np.int32)[slots] = tokens[1:]
        np.frombuffer(self._before, np.int64)[slots] = places - 1
        after = np.frombuffer(self._after, np.int64)
        after[(places - 1) & self._slot_mask] = places
        after[slots[-1]] = NOWHERE
        self._link_places(places, self._hashes(tokens[:-1], tokens[1:]))
        return int(places[-1])

    def _link_places(self, places: NDArray[np.int64], keys: NDArray[np.int64]) -> None:
        """Put places, in rising order, at the heads of their chains."""
        order = np.argsort(keys, kind="stable")
        sorted_keys, sorted_places = keys[order], places[order]
        head = np.frombuffer(self._head, np.int64)
        older = np.empty_like(sorted_places)
        older[1:] = sorted_places[:-1]
        starts = np.flatnonzero(np.diff(sorted_keys, prepend=-1))
        older[starts] = head[sorted_keys[starts]]
        np.frombuffer(self._link, np.int64)[sorted_places & self._slot_mask] = older
        ends = np.append(starts[1:], len(places)) - 1
        head[sorted_keys[ends]] = sorted_places[ends]

    def _resize(self, slots: int) -> None:
        """Before any slot is used twice: places stay where they are, chains are made over."""
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
        places = np.flatnonzero(before != NOWHERE)
        if len(places):
            self._link_places(places, self._hashes(tokens[before[places]], tokens[places]))

    def _hash(self, first: int, second: int) -> int:
        mixed = (first * _SECOND_MULTIPLIER + second) & _MASK
        return (mixed * _MULTIPLIER & _MASK) >> self._key_shift

    def _hashes(self, first: NDArray[np.int32], second: NDArray[np.int32]) -> NDArray[np.int64]:
        mask = np.uint64(_MASK)
        mixed = first.astype(np.uint64) * np.uint64(_SECOND_MULTIPLIER) + second.astype(np.uint64)
        keys = (mixed & mask) * np.uint64(_MULTIPLIER) & mask
        return (keys >> np.uint64(self._key_shift)).astype(np.int64)
