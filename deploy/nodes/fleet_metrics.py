"""The metrics of `baton fleet`: what its driver wants, and what Ray and the nodes report. They are
not in `runtime/metrics.py`, so that no other process exports a fleet of 0 workers. Otherwise that
module's rules hold."""

from __future__ import annotations

from typing import Literal, get_args

from baton.runtime.metric_factory import ROLES, counter, gauge

RestartReason = Literal["ended", "role_changed", "moved", "replaced"]

WANTED_WORKERS = gauge(
    "baton_wanted_workers", "Workers of a role that `baton fleet` keeps.", "role", ROLES
)
REGISTERED_WORKERS = gauge(
    "baton_registered_workers",
    "Of them, those that run on a node of Ray and are registered, as their actors report.",
    "role",
    ROLES,
)
ADOPTED_WORKERS = gauge(
    "baton_adopted_workers",
    "Of them, those that ran already when their present actor was made.",
    "role",
    ROLES,
)
WORKER_RESTARTS = counter(
    "baton_worker_restarts_total",
    "Another boot of a worker was registered, by why: its process had ended, it changed its role, "
    "it moved to another node, or its settings had changed.",
    "reason",
    get_args(RestartReason),
)
RAY_UP = gauge("baton_ray_up", "Whether Ray answers `baton fleet`; workers serve on without it.")
RAY_NODES = gauge(
    "baton_ray_nodes", "Living nodes of the Ray cluster, its head included; 0 without an answer."
)
