"""One log event at the begin of an outage and one at its end, and a metric that follows both."""

from __future__ import annotations

from structlog.testing import capture_logs

from baton.runtime import metrics
from baton.runtime.shared_registry.outage_log import CALM_S, OutageLog
from tests.support.metric_values import metric_value


def events_of(*steps: tuple[str, str, float]) -> list[str]:
    """The events that are logged for steps: what happened, on which side, when."""
    outage = OutageLog("redis://host:6379/0")
    with capture_logs() as logs:
        for what, side, now_s in steps:
            if what == "failed":
                outage.failed(side, "no answer", now_s)
            else:
                outage.worked(side, now_s)
    return [line["event"] for line in logs]


def test_an_outage_is_two_events() -> None:
    steps = (("failed", "read", 0.0), ("failed", "read", 1.0), ("worked", "read", 1.0 + CALM_S))
    assert events_of(*steps) == ["registry unavailable", "registry available again"]


def test_a_connection_that_flaps_begins_no_second_outage() -> None:
    flaps = [("failed", "read", 0.0), ("worked", "read", 0.1), ("failed", "read", 0.2)]
    assert events_of(*flaps) == ["registry unavailable"]
    ends = [("worked", "read", 0.3), ("worked", "read", 5.3), ("worked", "read", 10.3)]
    assert events_of(*flaps, *ends) == ["registry unavailable", "registry available again"]


def test_an_outage_lasts_until_both_sides_work() -> None:
    steps = [("failed", "write", 0.0), ("worked", "read", 10.0)]
    assert events_of(*steps) == ["registry unavailable"]
    assert events_of(*steps, ("worked", "write", 11.0))[1:] == ["registry available again"]


def test_two_outages_are_four_events() -> None:
    outage = [("failed", "read", 0.0), ("worked", "read", CALM_S)]
    again = [("failed", "read", 9.0), ("worked", "read", 9.0 + CALM_S)]
    assert len(events_of(*outage, *again)) == 4


def test_the_metric_follows_each_failure_and_success() -> None:
    outage = OutageLog("redis://host:6379/0")
    outage.failed("read", "no answer", 0.0)
    outage.worked("read", 0.1)
    assert metric_value(metrics.REGISTRY_UP) == 1
    outage.failed("read", "no answer", 0.2)
    assert metric_value(metrics.REGISTRY_UP) == 0
    outage.worked("read", 0.3)
    assert metric_value(metrics.REGISTRY_UP) == 1
