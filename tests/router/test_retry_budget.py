"""The budget of moves: shares, turns, and what a fleet that only fails gets of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.dispatch.retry_budget import HOLD_S, RetryBudget, RetryPermit
from baton.runtime.errors import Overloaded


def taken(budget: RetryBudget, active: int, now_s: float) -> RetryPermit:
    move = budget.take(active, now_s)
    assert move is not None
    return move


def test_the_limit_is_a_share_and_a_floor() -> None:
    budget = RetryBudget(0.2, 3)
    assert [budget.limit(active) for active in (1, 15, 16, 20, 1000)] == [3, 3, 3, 4, 200]


def test_progressing_migrations_make_room_while_others_wait() -> None:
    budget = RetryBudget(0.2, 2)
    first, _ = taken(budget, 5, 0.0), taken(budget, 5, 0.0)
    assert budget.take(5, 1.0) is None
    budget.release(first)
    assert budget.take(5, 1.0) is not None
    assert budget.take(5, 1.0) is None
    assert budget.take(15, 1.0) is not None  # more is being served


def test_a_queued_request_does_not_keep_its_share_for_ever() -> None:
    budget = RetryBudget(0.2, 1)
    slow = taken(budget, 1, 0.0)
    assert budget.take(1, HOLD_S - 0.1) is None
    assert budget.take(1, HOLD_S) is not None
    budget.release(slow)  # late, and no harm


def test_failed_moves_refuse_at_once_and_say_how_long() -> None:
    budget = RetryBudget(0.2, 3)
    for now_s in (0.0, 1.0, 2.0):
        budget.failed(taken(budget, 1, now_s), now_s)
    with pytest.raises(Overloaded, match="3 requests that migrated") as refused:
        budget.take(1, 4.0)
    assert refused.value.retry_after_s == HOLD_S - 4.0
    assert budget.take(1, HOLD_S) is not None  # the first is forgotten
    budget.failed(taken(budget, 100, HOLD_S), HOLD_S)
    with pytest.raises(Overloaded) as refused:
        budget.take(1, HOLD_S)
    assert refused.value.retry_after_s == 1.0  # then the second is


def test_a_move_that_lapsed_and_then_failed_counts() -> None:
    budget = RetryBudget(0.2, 1)
    late = taken(budget, 1, 0.0)
    budget.take(1, HOLD_S)
    budget.failed(late, HOLD_S + 1)
    with pytest.raises(Overloaded):
        budget.take(1, HOLD_S + 1)


@pytest.mark.parametrize("short", [True, False])
def test_memory_shortage_and_failures_have_separate_retries(short: bool) -> None:
    budget = RetryBudget(0.2, 2)
    for now_s in (0.0, 1.0):
        budget.failed(taken(budget, 1, now_s), now_s, short=short)
    words = "had no memory for it, and 2" if short else "the worker failed, and 2"
    with pytest.raises(Overloaded, match=words) as refused:
        budget.take(1, 2.0, short=short)
    assert refused.value.retry_after_s == HOLD_S - 2.0
    first, second = (budget.take(1, 2.0, short=not short) for _ in range(2))
    assert first is not None and second is not None
    assert budget.take(1, 2.0, short=not short) is None  # but those under way are one number
    budget.failed(first, 2.0, short=short)  # a move for one reason may fail for the other one
    assert budget.take(1, 2.0, short=not short) is not None


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["take", "got on", "failed"]),
        st.floats(0, 3),
        st.integers(0, 60),
        st.booleans(),
    ),
    max_size=120,
)


@given(steps=STEPS)
def test_never_more_at_once_than_the_limit(steps: list[tuple[str, float, int, bool]]) -> None:
    """Held against a plain list of what was taken when, and how each ended."""
    budget, now_s = RetryBudget(0.2, 3), 0.0
    open_: list[tuple[RetryPermit, float]] = []
    failed: list[tuple[float, bool]] = []
    for step, passing_s, active, short in steps:
        now_s += passing_s
        holding = [entry for entry in open_ if entry[1] + HOLD_S > now_s]
        recent = [at_s for at_s, kind in failed if at_s + HOLD_S > now_s and kind == short]
        limit = max(3, int(0.2 * active))
        if step == "take":
            try:
                move = budget.take(active, now_s, short=short)
            except Overloaded as error:
                assert len(recent) >= limit and 0 < error.retry_after_s <= HOLD_S
                continue
            assert len(recent) < limit
            assert (move is not None) == (len(holding) + len(recent) < limit)
            if move is not None:
                open_.append((move, now_s))
        elif open_:
            move, _ = open_.pop(0)
            if step == "failed":
                budget.failed(move, now_s, short=short)
                failed.append((now_s, short))
            else:
                budget.release(move)
