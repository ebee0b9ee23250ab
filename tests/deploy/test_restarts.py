"""The restart rule on made-up times."""

from __future__ import annotations

import pytest

from baton.deploy.host.restarts import CONFIG_EXIT, UNHEALTHY_EXIT, RestartRule


def test_a_wrong_configuration_is_given_up_at_once() -> None:
    assert RestartRule().record_end(0.5, CONFIG_EXIT) is None


def test_a_job_that_never_ran_long_is_given_up() -> None:
    rule = RestartRule(attempts=3)
    assert [rule.record_end(0.1, -9) for _ in range(3)] == [0.1, 0.2, None]


@pytest.mark.parametrize("code", [CONFIG_EXIT, -9, 1])
def test_a_job_that_ran_long_once_is_never_given_up(code: int) -> None:
    rule = RestartRule(attempts=2)
    assert rule.record_end(rule.stable_s, -9) == 0.1
    pauses = [rule.record_end(0.0, code) for _ in range(2000)]
    assert None not in pauses
    assert pauses[-1] == rule.longest_pause_s


def test_pauses_grow_with_quick_deaths_and_reset_after_long_runs() -> None:
    rule = RestartRule(attempts=100)
    assert [rule.record_end(1.0, 1) for _ in range(4)] == [0.1, 0.2, 0.4, 0.8]
    assert rule.record_end(60.0, 1) == 0.1


def test_a_repeatedly_failing_worker_starts_ever_more_slowly() -> None:
    """It is up for some ten seconds each time before it knows: that is no long run."""
    rule = RestartRule(attempts=5)
    pauses = [rule.record_end(rule.stable_s + 5, UNHEALTHY_EXIT) for _ in range(8)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]  # and is never given up
    assert rule.record_end(rule.healthy_s, UNHEALTHY_EXIT) == 0.1  # it was well before


def test_a_worker_that_is_ill_at_each_start_is_given_up() -> None:
    rule = RestartRule(attempts=3)
    assert [rule.record_end(1.0, UNHEALTHY_EXIT) for _ in range(3)] == [0.1, 0.2, None]


def test_a_long_run_proves_a_job_before_it_ends() -> None:
    rule = RestartRule(attempts=1)
    rule.record_run(rule.stable_s - 0.1)
    assert not rule.proven
    rule.record_run(rule.stable_s)
    assert rule.proven and rule.record_end(0.0, CONFIG_EXIT) == 0.1


def test_what_is_never_given_up_has_the_same_pauses() -> None:
    rule = RestartRule(attempts=2)
    assert [rule.pause_s(0.1, CONFIG_EXIT) for _ in range(4)] == [0.1, 0.2, 0.4, 0.8]
    assert rule.pause_s(rule.stable_s, 1) == 0.1
