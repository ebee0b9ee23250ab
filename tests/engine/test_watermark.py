"""Overdue steps: of the device, and of planning."""

from __future__ import annotations

import math

from baton.engine.scheduling.watermark import Watermark


def test_a_step_counts_from_the_time_that_it_is_allowed() -> None:
    mark = Watermark()
    assert mark.past_due_s(5.0, due_s=6.0, has_work=True) == -1.0
    assert mark.past_due_s(8.5, due_s=6.0, has_work=True) == 2.5
    assert mark.past_due_s(9.0, due_s=10.0, has_work=True) == -1.0  # the next one runs
    assert mark.past_due_s(12.0, due_s=10.0, has_work=False) == 2.0  # its requests were cancelled


def test_work_that_is_not_planned_counts_from_the_first_look() -> None:
    mark = Watermark()
    assert mark.past_due_s(100.0, due_s=None, has_work=True) == 0.0
    assert mark.past_due_s(102.5, due_s=None, has_work=True) == 2.5
    assert mark.past_due_s(103.0, due_s=104.0, has_work=True) == -1.0
    assert mark.past_due_s(105.0, due_s=None, has_work=True) == 0.0  # anew, after a step


def test_what_the_process_stood_still_does_not_count() -> None:
    mark = Watermark()
    mark.stood_still(7.0)  # nothing was to be planned
    assert mark.past_due_s(10.0, due_s=None, has_work=True) == 0.0
    mark.stood_still(3.0)
    assert mark.past_due_s(14.0, due_s=None, has_work=True) == 1.0
    assert mark.past_due_s(14.5, due_s=14.0, has_work=True) == 0.5
    assert mark.past_due_s(15.0, due_s=None, has_work=True) == 0.0


def test_nothing_to_do_is_never_overdue() -> None:
    mark = Watermark()
    mark.past_due_s(1.0, due_s=None, has_work=True)
    assert mark.past_due_s(500.0, due_s=None, has_work=False) == -math.inf
    assert mark.past_due_s(501.0, due_s=None, has_work=True) == 0.0
