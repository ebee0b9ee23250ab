"""Finds workers that were asked for and do not get ready in time, and says why as far as is known.

    worker ids asked for, FleetSample ─▶ missing since ... ─ too long ─▶ OverdueWorker

A worker is missing while it is not registered, or registered and neither ready nor draining. One
whose pod states a problem (no node has room, the image does not load, it crashes) is overdue after
STUCK_S: nothing that it does by itself ends such a problem. Any other is overdue after the time
that a start may take. It stays overdue until it is ready or not asked for any more, so that a
crash loop, which runs between two crashes, does not come and go. Pure: time is given. Owned by the
leading controller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from baton.planner.controller_load import FleetSample

STUCK_S = 300.0  # with a problem: a cluster autoscaler may still make a node within it

OverdueReason = Literal["no_pod", "no_node", "image", "config", "crash", "not_ready"]
OVERDUE_REASONS: tuple[OverdueReason, ...] = get_args(OverdueReason)
_THERE = ("ready", "draining", "no counters")  # the last one serves, with a report of its version


@dataclass(frozen=True, slots=True)
class WorkerProblem:
    """Why a worker does not get ready: a code, and the orchestrator's words with the pod's name."""

    reason: OverdueReason
    detail: str


@dataclass(frozen=True, slots=True)
class OverdueWorker:
    """`missing_s`: since it was asked for, or was ready last."""

    worker_id: str
    missing_s: float
    problem: WorkerProblem


class OverdueWorkers:
    """`start_s` bounds the start of a worker without a problem. The time of a worker begins when
    this was first asked about it, so a successor counts again."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._missing_s: dict[str, float] = {}  # since when, by worker id
        self._overdue: set[str] = set()

    def missing(self, asked: Sequence[str], sample: FleetSample, now_s: float) -> dict[str, float]:
        """Record which workers are missing now, and return for how long each is, by its id."""
        there = {each.worker_id for each in sample.workers if each.state in _THERE}
        self._missing_s = {
            name: self._missing_s.get(name, now_s) for name in asked if name not in there
        }
        self._overdue &= self._missing_s.keys()
        return {name: now_s - since_s for name, since_s in self._missing_s.items()}

    def found(
        self, missing: Mapping[str, float], problems: Mapping[str, WorkerProblem]
    ) -> list[OverdueWorker]:
        """Return those of the `missing` workers that are overdue, in the order of `asked`."""
        for name, missing_s in missing.items():
            if missing_s >= (STUCK_S if name in problems else self._start_s):
                self._overdue.add(name)
        return [
            OverdueWorker(name, missing_s, problems.get(name, _unknown(missing_s)))
            for name, missing_s in missing.items()
            if name in self._overdue
        ]

    def clear(self) -> None:
        """Forget all: another controller leads."""
        self._missing_s.clear()
        self._overdue.clear()


def _unknown(missing_s: float) -> WorkerProblem:
    return WorkerProblem("not_ready", f"it has not been ready for {missing_s:.0f} s")
