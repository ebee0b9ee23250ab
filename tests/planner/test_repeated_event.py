"""What a loop would log in each of its turns."""

from __future__ import annotations

from baton.planner.control.repeated_event import REPEAT_S, RepeatedEvent


def test_the_same_is_logged_once_in_a_while() -> None:
    event = RepeatedEvent()
    logged = [now_s for now_s in range(100) if event.should_log("no node", now_s)]
    assert logged == [0, REPEAT_S]


def test_something_else_is_logged_at_once() -> None:
    event = RepeatedEvent()
    said = ["no node", "no node", "no image", "no node"]
    assert [event.should_log(each, now_s) for now_s, each in enumerate(said)] == [
        True,
        False,
        True,
        True,
    ]
