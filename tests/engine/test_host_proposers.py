"""Prompt lookup and suffix decoding: what they propose, what they share, what they cost."""

from __future__ import annotations

import random

import pytest

from baton.engine.speculation.ngram_proposer import NgramProposer
from baton.engine.speculation.proposer import Proposer
from baton.engine.speculation.suffix_index import LONGEST_MATCH, MAX_POSITIONS
from baton.engine.speculation.suffix_proposer import SuffixProposer

TENANT, OTHER = b"one", b"two"
PROPOSERS = [NgramProposer, SuffixProposer]


@pytest.mark.parametrize("make", PROPOSERS)
def test_a_quoted_prompt_is_proposed(make: type[Proposer]) -> None:
    state = make().start(TENANT, [5, 6, 7, 8, 9, 10, 11, 1, 2])
    state.extend([3, 6, 7, 8])
    assert state.propose(3) == [9, 10, 11]
    assert state.propose(1) == [9]
    assert state.propose(0) == []


@pytest.mark.parametrize("make", PROPOSERS)
def test_nothing_is_proposed_where_nothing_recurs(make: type[Proposer]) -> None:
    proposer = make()
    assert proposer.start(TENANT, []).propose(4) == []
    assert proposer.start(TENANT, [1]).propose(4) == []
    assert proposer.start(TENANT, list(range(500))).propose(4) == []


@pytest.mark.parametrize("make", PROPOSERS)
@pytest.mark.parametrize("period", [1, 2, 5])
def test_a_period_goes_on_past_the_end(make: type[Proposer], period: int) -> None:
    tokens = [index % period for index in range(60)]
    proposed = make().start(TENANT, tokens).propose(12)
    assert proposed == [(60 + index) % period for index in range(12)]


def test_ngram_prefers_the_longest_match_then_the_newest() -> None:
    state = NgramProposer().start(TENANT, [1, 2, 3, 40, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3])
    assert state.propose(1) == [40]
    state = NgramProposer().start(TENANT, [2, 3, 50, 9, 2, 3, 60, 7, 2, 3])
    assert state.propose(1) == [60]


def test_suffix_follows_the_most_frequent_continuation() -> None:
    prompt = [1, 2, 30, 8, 1, 2, 30, 9, 1, 2, 40, 7, 1, 2]
    assert SuffixProposer().start(TENANT, prompt).propose(1) == [30]
    assert NgramProposer().start(TENANT, prompt).propose(1) == [40]


def test_suffix_stops_where_continuations_differ() -> None:
    generator = random.Random(1)
    prompt = []
    for _ in range(20):
        prompt += [1, 2, 3, 4, *(generator.randrange(100, 10_000) for _ in range(3))]
    assert SuffixProposer().start(TENANT, [*prompt, 1, 2]).propose(8) == [3, 4]


def test_suffix_learns_from_earlier_output_of_the_tenant() -> None:
    proposer = SuffixProposer()
    earlier = proposer.start(TENANT, [90, 91])
    earlier.extend(list(range(20)))
    earlier.close()
    later = proposer.start(TENANT, [90, 91])
    assert later.propose(4) == [0, 1, 2, 3]
    later.extend([0, 1])
    assert later.propose(2) == [2, 3]


def test_suffix_shares_output_of_a_sequence_that_goes_on() -> None:
    proposer = SuffixProposer()
    first = proposer.start(TENANT, [90])
    second = proposer.start(TENANT, [91])
    for token in range(20):
        first.extend([token])
        second.extend([token + 100])
    third = proposer.start(TENANT, [3, 4])
    assert third.propose(3) == [5, 6, 7]


def test_output_never_crosses_tenants() -> None:
    proposer = SuffixProposer()
    for _ in range(3):
        state = proposer.start(TENANT, [1, 2, 3, 4, 5])
        state.extend([7, 8, 9] * 5)
        assert proposer.start(OTHER, [7, 8]).propose(4) == []
        assert proposer.start(b"", [7, 8]).propose(4) == []
        state.close()
    assert proposer.start(OTHER, [7, 8]).propose(4) == []


def test_tenant_output_is_bounded_and_the_oldest_goes() -> None:
    proposer = SuffixProposer(tenant_tokens=256, most_tenants=2)
    state = proposer.start(TENANT, [])
    state.extend([1001, 1002, 1003])
    state.extend(list(range(300)))
    state.close()
    assert proposer.tokens == 256
    assert proposer.start(TENANT, [1001, 1002]).propose(1) == []
    assert proposer.start(TENANT, [290, 291]).propose(1) == [292]


def test_idle_tenants_are_forgotten_least_recent_first() -> None:
    proposer = SuffixProposer(most_tenants=2)
    states = {}
    for name in (b"a", b"b", b"c"):
        states[name] = proposer.start(name, [])
        states[name].extend([1, 2, 3])
    assert proposer.tenants == 3
    for name in (b"b", b"a", b"c"):
        states[name].close()
        states[name].close()
    assert proposer.tenants == 2
    assert proposer.start(b"b", [1, 2]).propose(1) == []
    assert proposer.start(b"a", [1, 2]).propose(1) == [3]


@pytest.mark.parametrize("text", ["one token", "period", "two words", "near misses"])
def test_proposing_in_a_long_text_costs_a_constant(text: str) -> None:
    size = 131_072
    generator = random.Random(2)
    tokens = {
        "one token": [1] * size,
        "period": [index % 17 for index in range(size)],
        "two words": [generator.randrange(2) for _ in range(size)],
        "near misses": [index % 15 if index % 16 else index for index in range(size)],
    }[text]
    search = MAX_POSITIONS * (LONGEST_MATCH + 2)
    ngram = NgramProposer().start(TENANT, tokens)
    before = ngram.index.visits
    ngram.propose(8)
    assert ngram.index.visits - before <= search
    proposer = SuffixProposer()
    suffix = proposer.start(TENANT, tokens)
    for token in tokens[:4000]:
        suffix.extend([token])
    before = suffix.visits
    suffix.propose(8)
    assert suffix.visits - before <= 2 * (search + 3 * 8 * MAX_POSITIONS)
