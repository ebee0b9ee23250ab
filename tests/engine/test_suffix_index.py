"""The suffix index against a search of the whole text, and what its searches cost."""

from __future__ import annotations

import random

import pytest

from baton.engine.speculation.suffix_index import (
    LONGEST_MATCH,
    MAX_POSITIONS,
    NOWHERE,
    SHORTEST_MATCH,
    Match,
    SuffixIndex,
)

COST = MAX_POSITIONS * (LONGEST_MATCH + 2)  # visits of one search


def naive(tokens: list[int], kept: int) -> list[Match]:
    """Matches of the end of `tokens` in its last `kept` ones, newest first."""
    found = []
    for position in range(len(tokens) - 2, -1, -1):
        length = 0
        while (
            length < LONGEST_MATCH
            and position - length >= max(0, len(tokens) - kept)
            and tokens[position - length] == tokens[len(tokens) - 1 - length]
        ):
            length += 1
        if length >= SHORTEST_MATCH:
            found.append(Match(position, length))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_matches_equal_a_search_of_the_whole_text(seed: int) -> None:
    generator = random.Random(seed)
    index = SuffixIndex(4096)
    tokens: list[int] = []
    last = NOWHERE
    while len(tokens) < 3000:
        part = [generator.randrange(12) for _ in range(generator.choice([1, 2, 5, 40, 700]))]
        last = index.append(part, last)
        tokens += part
        expected = naive(tokens, 4096)
        found = index.matches(tokens)
        # chains also list positions of other strings with the same hash, so fewer may be found
        assert found == [match for match in expected if match in found]
        assert len(found) >= min(len(expected), MAX_POSITIONS // 2)


def test_a_ring_finds_only_what_it_still_holds() -> None:
    index = SuffixIndex(1024)
    generator = random.Random(3)
    tokens = [generator.randrange(5) for _ in range(5000)]
    last = NOWHERE
    for first in range(0, 5000, 50):
        last = index.append(tokens[first : first + 50], last)
        seen = tokens[: first + 50]
        expected = naive(seen, 1024)
        assert all(match in expected for match in index.matches(seen))
    assert len(index) == 1024
    for match in index.matches(tokens):
        assert index.token(index.after(match.position)) == tokens[match.position + 1]


def test_single_and_bulk_appends_build_the_same_index() -> None:
    generator = random.Random(5)
    tokens = [generator.randrange(40) for _ in range(6000)]
    bulk, single = SuffixIndex(2048), SuffixIndex(2048)
    last = NOWHERE
    for token in tokens:
        last = single.append([token], last)
    assert bulk.append(tokens) == last == 5999
    for start in range(5000, 6000, 7):
        context = tokens[start - LONGEST_MATCH : start]
        assert bulk.matches(context) == single.matches(context)


def test_texts_that_grow_by_turns_stay_apart() -> None:
    index = SuffixIndex(1024)
    first = second = NOWHERE
    for turn in range(30):
        first = index.append([100 + turn], first)
        second = index.append([200 + turn], second)
    (match,) = index.matches([108, 109, 110])
    assert match.length == 3
    assert index.token(index.after(match.position)) == 111
    assert index.matches([110, 210]) == []


@pytest.mark.parametrize("period", [1, 2, 3, 7, 1000])
def test_a_search_in_repetitive_text_costs_no_more(period: int) -> None:
    index = SuffixIndex(1 << 17)
    tokens = [at % period for at in range(131_072)]
    index.append(tokens)
    before = index.visits
    index.matches(tokens)
    assert index.visits - before <= COST


@pytest.mark.parametrize("capacity", [0, 1, 3, 1000])
def test_a_capacity_that_is_no_power_of_two_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        SuffixIndex(capacity)
