"""The helpers that wait: they end once the condition is true, and name it if it never is."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from tests.support.waiting import eventually, wait_until

LIMIT_S = 0.05


async def test_waiting_ends_once_the_condition_is_true() -> None:
    turns, awaited = count(), count()

    async def third() -> bool:
        return next(awaited) == 2

    wait_until(lambda: next(turns) == 2)
    await eventually(lambda: next(turns) == 5)
    await eventually(third)
    assert (next(turns), next(awaited)) == (6, 3)


async def test_a_failed_wait_names_its_condition_and_what_it_saw() -> None:
    found: list[str] = []
    expected = r"not true within 0.05 s: .*found.*; last seen: \[\]\nthe log"
    with pytest.raises(AssertionError, match=expected):
        wait_until(lambda: found, LIMIT_S, show=lambda: "the log")
    with pytest.raises(RuntimeError, match=expected):
        await eventually(lambda: found, LIMIT_S, show=lambda: "the log", error=RuntimeError)


async def test_a_condition_that_hangs_ends_with_the_limit() -> None:
    with pytest.raises(AssertionError, match="Event.wait.*last seen: 'nothing'"):
        await eventually(asyncio.Event().wait, LIMIT_S)


async def test_an_error_of_the_condition_itself_is_passed_on() -> None:
    async def late() -> bool:
        raise TimeoutError("of the server")

    with pytest.raises(TimeoutError, match="of the server"):
        await eventually(late)
