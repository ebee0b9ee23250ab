"""How long a worker's line is in seconds: known while somebody waits, and of the latest ends."""

from __future__ import annotations

import pytest

from baton.proto import worker_pb2
from baton.router.fleet.wait_estimator import Pace


def load(served: int, waiting: int = 20, running: int = 8) -> worker_pb2.Load:
    return worker_pb2.Load(
        served=served, waiting=waiting, requests=waiting + running, at_once=running
    )


def test_the_place_in_the_line_times_the_pace() -> None:
    pace = Pace()
    for report in range(4):
        pace.report(load(100 + 10 * report), 50 + 0.5 * report)  # one ends every 50 ms
    place = 29 + 4  # of eight at once half: they may end together
    assert pace.expected_s(0, 51.5) == pytest.approx(place * 0.05)
    assert pace.expected_s(10, 51.5) == pytest.approx((place + 10) * 0.05)
    assert pace.expected_s(10, 51.9) == pytest.approx((place + 10) * 0.05 - 0.4)  # ended since
    assert pace.expected_s(0, 56) == 0


def test_where_nobody_waits_it_is_not_known() -> None:
    """The pace of a worker that is not full is that of its clients."""
    pace = Pace()
    assert pace.expected_s(1000, 0) == 0
    for second in range(10):
        pace.report(load(second, waiting=0), second)
    assert pace.expected_s(1000, 10) == 0
    pace.report(load(10), 10)
    assert pace.expected_s(1000, 10) == 0  # nothing has ended since somebody waits
    pace.report(load(12), 11)
    assert pace.expected_s(1000, 11) == 0  # too few to tell
    pace.report(load(14), 12)
    assert pace.expected_s(0, 12) == pytest.approx(33 / 2)
    pace.report(load(15, waiting=0), 13)
    assert pace.expected_s(1000, 13) == 0


def test_the_latest_ends_count() -> None:
    pace = Pace()
    for report in range(100):
        pace.report(load(100 * report), report)
    assert pace.expected_s(0, 99) == pytest.approx(0.33)
    for report in range(20):
        pace.report(load(9900 + report + 1), 100 + report)
    assert pace.expected_s(0, 119) == pytest.approx(33)


@pytest.mark.parametrize("at_once", [8, 64])
def test_ends_in_groups_count_once(at_once: int) -> None:
    """Those that begin together end together, every two seconds: wherever the window begins."""
    pace = Pace()
    for half in range(40):
        now_s = 100 + half / 2
        pace.report(load(at_once * (half // 4), running=at_once), now_s)
        if half >= 16:
            place = 20 + 1 + 1.5 * at_once
            assert pace.expected_s(0, now_s) == pytest.approx(place * 2 / at_once)


def test_of_many_at_once_the_first_few_ends_tell_nothing() -> None:
    pace = Pace()
    pace.report(load(0, running=64), 8)
    pace.report(load(4, running=64), 10)
    assert pace.expected_s(0, 10) == 0
    pace.report(load(64, running=64), 10.5)
    assert pace.expected_s(0, 10.5) == pytest.approx((20 + 1 + 96) * 2.5 / 64)


def test_a_line_that_comes_again_is_known_before_its_first_ends() -> None:
    pace = Pace()
    for second in range(5):
        pace.report(load(8 * second), second)
    pace.report(load(40, waiting=0, running=8), 5)
    assert pace.expected_s(50, 5) == 0  # who is placed since may have ended already
    pace.report(load(41, waiting=1), 6)
    assert pace.expected_s(0, 6) == pytest.approx((8 + 1 + 1 + 4) / 8)
    assert pace.expected_s(0, 14.1) == 0  # that was long ago


def test_another_start_of_the_worker_begins_anew() -> None:
    pace = Pace()
    for report in range(3):
        pace.report(load(1000 + 10 * report), report)
    pace.report(load(3), 3)
    assert pace.expected_s(0, 3) == 0


def test_a_worker_that_does_not_count_is_never_too_slow() -> None:
    pace = Pace()
    for report in range(1000):
        pace.report(load(0), report)
    assert pace.expected_s(1000, 1000) == 0
