"""Watches the workers that were asked for, and reports those that do not get ready in time.

    each tick: number, FleetSample ─▶ OverdueWorkers ─▶ baton_overdue_workers, log: workers overdue
    every PROBLEM_INTERVAL_S, while workers are missing: orchestrator ─▶ why

Problems are read beside the decisions: a slow orchestrator delays a reason, and nothing else. Owned
by the size loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence

from baton.planner.control import control_metrics
from baton.planner.control.size_step import WorkerPool, within_call_time
from baton.planner.control.worker_count import WorkerCount
from baton.planner.controller_load import FleetSample
from baton.planner.overdue_workers import (
    OVERDUE_REASONS,
    OverdueReason,
    OverdueWorker,
    OverdueWorkers,
    WorkerProblem,
)
from baton.runtime import logs
from baton.runtime.errors import BatonError

PROBLEM_INTERVAL_S = 15.0  # between two readings of problems
PROBLEM_AFTER_S = 30.0  # for which a worker is missing before its problem is asked for
MAX_NAMED = 8  # workers in an event of the log
REMEDIES: Mapping[OverdueReason, str] = {
    "no_pod": "see the events of the StatefulSet or RayCluster with `kubectl describe`: a quota or "
    "an admission rule may refuse the pod",
    "no_node": "add a node with what the pod requests, or lower the most of --workers (the chart's "
    "autoscaling.baton.maxWorkers)",
    "image": "name an image that the nodes can pull, and the Secret of its registry (the chart's "
    "image.worker and image.pullSecrets)",
    "config": "create the Secret that the pod names (the notes of `helm upgrade` list those that "
    "are missing), or correct what keeps its node from starting the container",
    "crash": "read the log of its last start with `kubectl logs POD --previous`",
    "not_ready": "read its log and its /readyz; `kubectl describe pod` has the events of its pod, "
    "and on Ray the log of `baton fleet` says what it waits for",
}

log = logs.get(__name__)


class OverdueWatch:
    """`start_s`: the longest start of a worker. `clock` returns seconds."""

    def __init__(self, pool: WorkerPool, start_s: float, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._clock = clock
        self._workers = OverdueWorkers(start_s)
        self._reading: asyncio.Task[Mapping[str, WorkerProblem]] | None = None
        self._read_s = -math.inf  # when the last reading began
        self._problems: Mapping[str, WorkerProblem] = {}
        self._failure = ""
        self._logged: dict[OverdueReason, list[str]] = {}

    def look(self, seen: WorkerCount, sample: FleetSample) -> list[OverdueWorker]:
        """Return the workers that are overdue now, as the leader."""
        missing = self._workers.missing(seen.worker_ids, sample, self._clock())
        self._take_problems()
        self._ask([name for name, age_s in missing.items() if age_s >= PROBLEM_AFTER_S])
        found = self._workers.found(missing, self._problems)
        self._report(found)
        return found

    def rest(self) -> None:
        """Forget all: another controller leads, and reports."""
        self._workers.clear()
        self._problems = {}
        self._logged = {}
        publish_overdue(())

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, BatonError):
                await self._reading

    def _take_problems(self) -> None:
        """Take a reading that has ended. One that failed leaves what was known."""
        if self._reading is None or not self._reading.done():
            return
        reading, self._reading = self._reading, None
        try:
            self._problems, self._failure = reading.result(), ""
        except BatonError as error:
            if str(error) != self._failure:
                log.warning("worker problems not read", reason=str(error))
            self._failure = str(error)

    def _ask(self, names: Sequence[str]) -> None:
        if not names:
            self._problems = {}
        elif self._reading is None and self._clock() - self._read_s >= PROBLEM_INTERVAL_S:
            self._read_s = self._clock()
            asked = self._pool.problems(names)
            self._reading = asyncio.create_task(
                within_call_time("the reading of workers' problems", asked)
            )

    def _report(self, found: Sequence[OverdueWorker]) -> None:
        """Set the gauge, and log each reason whose workers have changed."""
        publish_overdue(found)
        groups: dict[OverdueReason, list[OverdueWorker]] = {}
        for each in found:
            groups.setdefault(each.problem.reason, []).append(each)
        names = {reason: [each.worker_id for each in group] for reason, group in groups.items()}
        for reason, group in groups.items():
            if names[reason] != self._logged.get(reason):
                log.warning(
                    "workers overdue",
                    count=len(group),
                    workers=names[reason][:MAX_NAMED],
                    reason=reason,
                    detail=group[0].problem.detail,
                    remedy=REMEDIES[reason],
                )
        if self._logged and not names:
            log.info("overdue workers resolved")
        self._logged = names


def publish_overdue(found: Sequence[OverdueWorker]) -> None:
    """Set the gauge of overdue workers."""
    for reason in OVERDUE_REASONS:
        count = sum(each.problem.reason == reason for each in found)
        control_metrics.OVERDUE_WORKERS.labels(reason).set(count)
