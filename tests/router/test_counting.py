"""What a body holds is counted in slices, and comes to what one look at all of it would say."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.requests import request_parser
from baton.router.requests.openai_schema import CompletionRequest
from baton.router.requests.request_parser import check_counts, count_steps
from baton.router.requests.validator import Validator
from baton.runtime.errors import InvalidRequest
from baton.simulation.fleet.byte_tokenizer import ByteTokenizer

P = ParamSpec("P")
T = TypeVar("T")
TEXTS = st.lists(st.sampled_from([b"\\", b'"', b",", b"[", b"{", b"a"]), max_size=60).map(b"".join)


def counted(text: bytes) -> tuple[int, int, int]:
    """Whole strings, commas and containers outside of strings, sign by sign. An escape counts
    outside of strings too, where JSON has none."""
    quotes = commas = containers = 0
    escaped = False
    for sign in text.decode():
        if escaped and sign in '\\"':
            escaped = False
            continue
        escaped = sign == "\\"
        if sign == '"':
            quotes += 1
        elif quotes % 2 == 0:
            commas += sign == ","
            containers += sign in "[{"
    return quotes // 2, commas, containers


def refusal(max_values: int, *texts: bytes) -> str:
    try:
        check_counts(max_values, *texts)
    except InvalidRequest as error:
        return next(word for word in ("strings", "values", "lists") if word in str(error))
    return ""


@given(text=TEXTS, slice_bytes=st.integers(1, 9), most=st.integers(0, 6))
def test_slices_say_what_the_whole_says(text: bytes, slice_bytes: int, most: int) -> None:
    strings, commas, containers = counted(text)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(request_parser, "SLICE_BYTES", slice_bytes)
        patched.setattr(request_parser, "MAX_STRINGS", most)
        patched.setattr(request_parser, "MAX_CONTAINERS", most)
        wanted = "strings" if strings > most else "values" if commas > most else ""
        assert refusal(most, text) == (wanted or ("lists" if containers > most else ""))


def test_texts_are_counted_together_and_each_by_itself() -> None:
    open_string = b'{"a'  # no string: what follows in another text is outside again
    assert refusal(3, b"[,,", b",") == ""
    assert refusal(3, b"[,,", b",,") == "values"
    assert refusal(3, open_string, b",,,") == ""
    assert refusal(3, open_string, b",,,,") == "values"


def test_what_is_short_of_all_bounds_is_counted_at_once() -> None:
    assert [*count_steps(10, b'{"a": [1, 2, 3]}')] == []
    assert [*count_steps(10, b"")] == []


@pytest.mark.parametrize(
    ("text", "pieces"),
    [(b'\\\\\\"' * (1 << 20), 6), (b"a" * (8 << 20), 1)],
    ids=["escapes", "plain"],
)
async def test_a_large_body_is_counted_in_several_turns(
    text: bytes, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look at all of it; where that does not do, its slices, 4 MiB and a bit here."""
    validator = Validator("m", ByteTokenizer(), None, frozenset({7}), max_choices=4)
    run, sizes = validator.turns.run, []

    async def noting(size: int, work: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        if work is next:
            sizes.append(size)
        return await run(size, work, *given, **named)

    monkeypatch.setattr(validator.turns, "run", noting)
    body = b'{"model":"m","prompt":"' + text + b'"}'
    assert (await validator.parsed(body, CompletionRequest)).prompt
    assert sizes == [len(body), *[0] * (pieces - 1)]  # what goes on is first


async def test_what_is_too_much_ends_at_the_slice_that_shows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_parser, "SLICE_BYTES", 1 << 10)
    looked = 0
    with pytest.raises(InvalidRequest, match="over 65536 strings"):
        for _ in count_steps(10, b'"' * (1 << 20)):
            looked += 1
    assert looked == 2 * request_parser.MAX_STRINGS // (1 << 10) + 1
