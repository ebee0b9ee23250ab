"""Admission: tickets and arrivals are bounded, and a refusal says when to come again."""

from __future__ import annotations

import pytest

from baton.router.requests.admission import (
    DEFAULT_RETRY_AFTER_S,
    MAX_RETRY_AFTER_S,
    WINDOW_S,
    Admission,
    RetryAfterEstimator,
)
from baton.runtime.errors import BatonError, Cancelled, InvalidRequest, Overloaded, RateLimited


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refused(admission: Admission) -> float:
    with pytest.raises(Overloaded) as refusal, admission.ticket():
        pytest.fail("there was a ticket")
    return refusal.value.retry_after_s


def test_tickets_are_bounded_and_come_back(clock: Clock) -> None:
    admission = Admission(2, clock)
    with admission.ticket(), admission.ticket():
        assert refused(admission) == DEFAULT_RETRY_AFTER_S and admission.taken == 2
    for error in (Cancelled("left"), ValueError("a bug")):
        with pytest.raises(type(error)), admission.ticket():
            raise error
    assert admission.taken == 0


def test_arrivals_are_bounded_and_refused_without_a_ticket(clock: Clock) -> None:
    admission = Admission(1, clock)
    with admission.arrival():
        with pytest.raises(Overloaded), admission.arrival():
            pass
        with admission.ticket():
            assert (admission.arriving, admission.taken) == (1, 1)
    assert admission.arriving == 0
    with admission.ticket(), pytest.raises(Overloaded), admission.arrival():
        pass
    with admission.arrival(), pytest.raises(BatonError):
        raise Cancelled("left")
    with admission.arrival():
        assert admission.arriving == 1


def test_the_body_that_was_silent_longest_makes_room(clock: Clock) -> None:
    admission = Admission(2, clock)
    reported: list[str] = []
    with admission.arrival(), admission.upload(lambda: reported.append("a")) as heard:
        with admission.arrival(), admission.upload(lambda: reported.append("b")):
            heard()
            with admission.arrival():
                assert reported == ["b"] and admission.arriving == 3  # b still holds its place
            heard()
            with admission.arrival():
                assert reported == ["b", "a"]
            heard()  # too late
            with pytest.raises(Overloaded), admission.arrival():
                pytest.fail("no request is left to make room")
        with admission.arrival():
            assert reported == ["b", "a"] and admission.arriving == 2
    assert admission.arriving == 0


def test_a_body_that_has_come_makes_no_room(clock: Clock) -> None:
    admission = Admission(1, clock)
    with admission.arrival():
        with admission.upload(lambda: pytest.fail("it has come")):
            pass
        with pytest.raises(Overloaded), admission.arrival():
            pass
    with admission.ticket(), pytest.raises(Overloaded), admission.arrival():
        pass


def test_no_body_makes_room_where_there_is_no_ticket(clock: Clock) -> None:
    admission = Admission(1, clock)
    reported: list[str] = []
    with admission.arrival(), admission.upload(lambda: reported.append("a")), admission.ticket():
        late = admission.arrival()
        with pytest.raises(Overloaded):
            late.__enter__()
    assert reported == []


def test_a_refused_request_gets_the_rate_at_which_room_is_made(clock: Clock) -> None:
    admission = Admission(1, clock)
    for _ in range(10):  # one ends every two seconds
        with admission.ticket():
            clock.now_s += 2
    with admission.ticket():
        waits = [refused(admission) for _ in range(4)]
    assert waits == pytest.approx([1.8, 3.6, 5.4, 7.2])  # nine spans of two seconds, ten ends


def test_an_internal_error_gets_the_time_and_sets_no_rate(clock: Clock) -> None:
    admission = Admission(8, clock)
    with admission.ticket():
        clock.now_s += 4
    clock.now_s += 4
    for _ in range(3):
        with pytest.raises(Overloaded) as full, admission.ticket():
            raise Overloaded("every worker is full")
    assert full.value.retry_after_s == pytest.approx(3 * 4.0)
    with pytest.raises(Overloaded) as longer, admission.ticket():
        raise Overloaded("later still", 25.0)
    assert longer.value.retry_after_s == 25.0


def test_a_line_empties_as_time_passes_and_has_a_longest() -> None:
    line = RetryAfterEstimator()
    for second in range(10):
        line.record_end(float(second))
    assert [line.next_s(10.0) for _ in range(3)] == [1.0, 2.0, 3.0]
    assert line.next_s(12.0) == pytest.approx(1.0 + 1.2)  # the pace has slowed
    assert line.next_s(25.0) == pytest.approx(2.5)  # those who were in it had their turn
    for _ in range(100):
        assert line.next_s(25.0) <= MAX_RETRY_AFTER_S
    assert line.next_s(25.0) == MAX_RETRY_AFTER_S


def test_ends_of_long_ago_are_no_pace() -> None:
    line = RetryAfterEstimator()
    line.record_end(0.0)
    assert line.next_s(WINDOW_S) == DEFAULT_RETRY_AFTER_S


def test_a_tenants_own_limit_moves_no_one_back(clock: Clock) -> None:
    """Refusals of a tenant over its share once made all others wait for the longest time."""
    admission = Admission(1, clock)
    for _ in range(10):
        with admission.ticket():
            clock.now_s += 0.1
    for _ in range(100):
        with pytest.raises(RateLimited), admission.arrival():
            raise RateLimited("over its share")
    with admission.ticket():
        assert refused(admission) == pytest.approx(0.1, rel=0.2)


def test_a_request_for_more_tickets_than_there_are_is_invalid(clock: Clock) -> None:
    admission = Admission(2, clock)
    admission.check_number(2, "prompt")
    with pytest.raises(InvalidRequest, match=r"prompt: 3 prompts.*router\.max_requests.*divide"):
        admission.check_number(3, "prompt")
