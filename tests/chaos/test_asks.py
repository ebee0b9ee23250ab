"""The mix of what is asked: by a seed alone, every kind in it."""

from __future__ import annotations

from collections import Counter

import pytest

from chaos.answers import Answer, Choice
from chaos.asks import Ask, Kind, asks, long_asks
from chaos.asks import _is_fit as is_fit
from chaos.run import FULL, SEED, SHORT_SIZE


@pytest.mark.parametrize("count", [SHORT_SIZE.asks, FULL.asks])
def test_half_is_greedy_and_every_other_kind_is_there(count: int) -> None:
    made = asks(count, SEED)
    kinds = Counter(ask.kind for ask in made)
    assert set(kinds) == set(Kind) and kinds[Kind.GREEDY] == -(-count // 2)
    assert made == asks(count, SEED) != asks(count, SEED + 1)
    assert count % 2  # so that every fourth request is each of them in its turn
    assert {ask.kind for ask in long_asks(4, SEED, count)} == {Kind.GREEDY}


def test_what_is_asked_follows_the_kind() -> None:
    greedy = Ask(0, "a", 4).body()
    assert greedy["temperature"] == 0 and greedy["stream"] and "seed" not in greedy
    asked = {kind: Ask(0, "a", 4, kind).body().items() - greedy.items() for kind in ONLY_FIELDS}
    assert {kind: {name for name, _ in more} for kind, more in asked.items()} == ONLY_FIELDS


ONLY_FIELDS = {
    Kind.GREEDY: set(),
    Kind.SEEDED: {"temperature", "top_p", "seed"},
    Kind.CHOICES: {"temperature", "top_p", "seed", "n"},
    Kind.UNSEEDED: {"temperature", "top_p"},
    Kind.PENALTIES: {"frequency_penalty", "presence_penalty", "repetition_penalty"},
    Kind.WHOLE: {"stream"},
}


@pytest.mark.parametrize(
    ("kind", "count", "finish", "fit"),
    [
        (Kind.GREEDY, 4, "length", True), (Kind.GREEDY, 3, "length", False),
        (Kind.GREEDY, 4, "stop", False), (Kind.STOP, 3, "stop", True),
        (Kind.STOP, 4, "length", False), (Kind.STOP, 4, "stop", False),
    ],
)  # fmt: skip
def test_a_reference_that_would_show_nothing_is_refused(
    kind: Kind, count: int, finish: str, fit: bool
) -> None:
    ask, answer = Ask(7, "a", 4, kind), Answer({0: Choice(["a"] * count, finish=finish)})
    if fit:
        is_fit(ask, answer)
    else:
        with pytest.raises(ValueError, match="ask 7"):
            is_fit(ask, answer)
