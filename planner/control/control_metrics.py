"""The metrics of the role controller. They are not in `runtime/metrics.py`, so that no other
process exports a recommendation of 0 workers. Otherwise that module's rules hold."""

from __future__ import annotations

from typing import get_args

from baton.planner.controller import Reason
from baton.planner.fleet_size import SizeReason
from baton.planner.overdue_workers import OVERDUE_REASONS
from baton.runtime.metric_factory import counter, gauge

RECOMMENDED_WORKERS = gauge(
    "baton_recommended_workers",
    "Workers of a role with which nine of ten requests would meet the role's objective, by the "
    "role controller's last forecast; absent before the first one.",
    "role",  # its series begin with a forecast: an autoscaler would follow a 0
)
CONTROL_DECISIONS = counter(
    "baton_role_decisions_total",
    "Decisions of the role controller, one a second: a step, or the reason for none.",
    "reason",
    get_args(Reason),
)
FORECAST_SHARE = gauge(
    "baton_forecast_good_ratio",
    "Forecast share of requests that will meet the objectives, now and with one prefill worker "
    "less or more; 0: there is no such ratio, or no forecast now.",
    "ratio",
    ("less_prefill", "now", "more_prefill"),
)
SIZE_DECISIONS = counter(
    "baton_size_decisions_total",
    "Decisions of a role controller with --resize that leads, one a second: a number of workers "
    "to ask for, or the reason for none.",
    "reason",
    get_args(SizeReason),
)
SIZE_FAILURES = counter(
    "baton_size_failures_total",
    "Calls about the number of workers that the orchestrator refused or did not answer, and "
    "workers that did not drain when the controller asked them to.",
)
ASKED_WORKERS = gauge(
    "baton_asked_workers",
    "Workers that the orchestrator has been asked for, as a role controller with --resize has "
    "read; 0 before the first reading.",
)
OVERDUE_WORKERS = gauge(
    "baton_overdue_workers",
    "Workers that a role controller with --resize that leads has asked for and that do not get "
    "ready in time, by why: it asks for no more than the least until they are.",
    "reason",
    OVERDUE_REASONS,
)
CONTROL_LEADS = gauge(
    "baton_controller_leads", "Whether this role controller is the one that acts."
)
CONTROL_ACTS = gauge(
    "baton_controller_acts", "Whether this role controller has --act, so that it may lead."
)
