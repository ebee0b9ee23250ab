"""How long a worker's line is in seconds: known while a request waits, and of the latest ends."""

from __future__ import annotations

import pytest

from baton.proto import worker_pb2
from baton.router.fleet.wait_estimator import WaitEstimator


def load(served: int, waiting: int = 20, running: int = 8) -> worker_pb2.Load:
    return worker_pb2.Load(
        completed_requests=served,
        waiting=waiting,
        open_requests=waiting + running,
        active_requests=running,
    )


def test_the_position_in_the_queue_times_the_pace() -> None:
    estimator = WaitEstimator()
    for report in range(4):
        estimator.report(load(100 + 10 * report), 50 + 0.5 * report)  # one ends every 50 ms
    position = 29 + 4  # of eight at once half: they may end together
    assert estimator.expected_s(0, 51.5) == pytest.approx(position * 0.05)
    assert estimator.expected_s(10, 51.5) == pytest.approx((position + 10) * 0.05)
    # some have ended since
    assert estimator.expected_s(10, 51.9) == pytest.approx((position + 10) * 0.05 - 0.4)
    assert estimator.expected_s(0, 56) == 0


def test_without_waiters_the_estimate_is_unknown() -> None:
    """The estimator of a worker that is not full is that of its clients."""
    estimator = WaitEstimator()
    assert estimator.expected_s(1000, 0) == 0
    for second in range(10):
        estimator.report(load(second, waiting=0), second)
    assert estimator.expected_s(1000, 10) == 0
    estimator.report(load(10), 10)
    assert estimator.expected_s(1000, 10) == 0  # nothing has ended since a request waits
    estimator.report(load(12), 11)
    assert estimator.expected_s(1000, 11) == 0  # too few to tell
    estimator.report(load(14), 12)
    assert estimator.expected_s(0, 12) == pytest.approx(33 / 2)
    estimator.report(load(15, waiting=0), 13)
    assert estimator.expected_s(1000, 13) == 0


def test_the_latest_ends_count() -> None:
    estimator = WaitEstimator()
    for report in range(100):
        estimator.report(load(100 * report), report)
    assert estimator.expected_s(0, 99) == pytest.approx(0.33)
    for report in range(20):
        estimator.report(load(9900 + report + 1), 100 + report)
    assert estimator.expected_s(0, 119) == pytest.approx(33)


@pytest.mark.parametrize("at_once", [8, 64])
def test_ends_in_groups_count_once(at_once: int) -> None:
    """Those that begin together end together, every two seconds: wherever the window begins."""
    estimator = WaitEstimator()
    for half in range(40):
        now_s = 100 + half / 2
        estimator.report(load(at_once * (half // 4), running=at_once), now_s)
        if half >= 16:
            position = 20 + 1 + 1.5 * at_once
            assert estimator.expected_s(0, now_s) == pytest.approx(position * 2 / at_once)


def test_of_many_at_once_the_first_few_ends_tell_nothing() -> None:
    estimator = WaitEstimator()
    estimator.report(load(0, running=64), 8)
    estimator.report(load(4, running=64), 10)
    assert estimator.expected_s(0, 10) == 0
    estimator.report(load(64, running=64), 10.5)
    assert estimator.expected_s(0, 10.5) == pytest.approx((20 + 1 + 96) * 2.5 / 64)


def test_a_line_that_comes_again_is_known_before_its_first_ends() -> None:
    estimator = WaitEstimator()
    for second in range(5):
        estimator.report(load(8 * second), second)
    estimator.report(load(40, waiting=0, running=8), 5)
    assert estimator.expected_s(50, 5) == 0  # who is placed since may have ended already
    estimator.report(load(41, waiting=1), 6)
    assert estimator.expected_s(0, 6) == pytest.approx((8 + 1 + 1 + 4) / 8)
    assert estimator.expected_s(0, 14.1) == 0  # that was long ago


def test_another_start_of_the_worker_resets_the_estimate() -> None:
    estimator = WaitEstimator()
    for report in range(3):
        estimator.report(load(1000 + 10 * report), report)
    estimator.report(load(3), 3)
    assert estimator.expected_s(0, 3) == 0


def test_a_worker_that_does_not_count_is_never_too_slow() -> None:
    estimator = WaitEstimator()
    for report in range(1000):
        estimator.report(load(0), report)
    assert estimator.expected_s(1000, 1000) == 0
