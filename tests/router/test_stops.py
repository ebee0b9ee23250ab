"""Stop strings against a naive oracle, for any text, any stops and any split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.text.stop_strings import StopMatcher

LETTERS = st.text(alphabet="ab🎉", max_size=30)


def oracle(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the first stop string to be complete wins, then the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(
    parts=st.lists(LETTERS, max_size=8),
    stops=st.lists(st.text(alphabet="ab🎉", min_size=1, max_size=5), max_size=4),
)
def test_any_split_gives_what_the_oracle_gives(parts: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join([matcher.push(part) for part in parts] + [matcher.flush()])
    assert (shown, matcher.stopped) == oracle("".join(parts), stops)


@given(parts=st.lists(LETTERS, max_size=8))
def test_only_what_may_become_a_stop_is_held(parts: list[str]) -> None:
    matcher, held = StopMatcher(["ab🎉"]), ""
    for part in parts:
        held += part
        shown = matcher.push(part)
        if matcher.stopped:
            return
        assert held.startswith(shown)
        held = held.removeprefix(shown)
        assert "ab🎉".startswith(held) and held != "ab🎉"


@pytest.mark.parametrize(
    ("pieces", "stops", "shown"),
    [
        (["hel", "lo wor", "ld"], ["o w"], "hell"),
        (["a", "b", "c", "d"], ["abcd", "c"], "ab"),
        (["aab"], ["ab", "b"], "a"),
        (["xx"], ["x"], ""),
        (["almost sto", "ne"], ["stop"], "almost stone"),
    ],
)
def test_examples(pieces: list[str], stops: list[str], shown: str) -> None:
    matcher = StopMatcher(stops)
    text = "".join([matcher.push(piece) for piece in pieces] + [matcher.flush()])
    assert text == shown


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a. b") == "a"
    assert matcher.push("c") == "" and matcher.flush() == ""
