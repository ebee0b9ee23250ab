"""The role changes that the brakes need: those under way, those of the last hour, reversals.

    took ─▶ ChangeHistory ─ written ─▶ kept outside the process ─ read_history ─▶ the next leader

A written history has ages instead of times, since processes share no clock. Whatever a leader has
ordered must be in it before the order is sent: then no successor knows less than the workers do.
Pure: time is given. Owned by the controller.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.planner.controller_load import FleetSample, WorkerRole, WorkerSample

CHANGE_S = 120.0  # a change that takes longer has failed
UNTAKEN_S = 20.0  # a worker that is as it was for longer has not got the order, and will not
HOUR_S = 3600.0
_FIELDS = {"last_role", "reversed_ago_s", "ended_ago_s", "taken_ago_s", "under_way"}
_CHANGE_FIELDS = {"worker_id", "boot_id", "role", "begun_ago_s"}


@dataclass(frozen=True, slots=True)
class RoleStep:
    """One worker changes its role. The order names its boot."""

    worker_id: str
    boot_id: str
    role: WorkerRole  # the new one


@dataclass(frozen=True, slots=True)
class RoleChange:
    """A step that its worker has accepted, or may have accepted."""

    step: RoleStep
    begun_s: float


class ChangeHistory:
    """`last_role` is the direction of the last change, `reversed_s` the time of the last reversal,
    `ended_s` of the last end of a change; None: there was none."""

    def __init__(self) -> None:
        self.last_role: WorkerRole | None = None
        self.reversed_s: float | None = None
        self.ended_s: float | None = None
        self._taken: deque[float] = deque()
        self._changes: dict[str, RoleChange] = {}  # by worker id

    @property
    def under_way(self) -> frozenset[str]:
        """Return the ids of the workers whose change has not ended."""
        return frozenset(self._changes)

    def taken(self, now_s: float) -> int:
        """Return the changes of the last hour."""
        while self._taken and now_s - self._taken[0] > HOUR_S:
            self._taken.popleft()
        return len(self._taken)

    def took(self, step: RoleStep, now_s: float) -> None:
        """Record that a worker has accepted the order, or may have."""
        if self.last_role not in (None, step.role):
            self.reversed_s = now_s
        self.last_role = step.role
        self._changes[step.worker_id] = RoleChange(step, now_s)
        self._taken.append(now_s)

    def settle(self, sample: FleetSample, now_s: float) -> list[str]:
        """End changes that the sample shows as done, and those that took too long. Return the
        workers that do not have their new role."""
        failed = []
        boots = {each.worker_id: each for each in sample.workers}
        for worker_id, change in list(self._changes.items()):
            found = boots.get(worker_id)
            done = (
                found is not None
                and found.boot_id != change.step.boot_id
                and found.state == "ready"
            )
            if done or _failed(change, found, sample.at_s, now_s):
                del self._changes[worker_id]
                self.ended_s = now_s
                if not done or (found is not None and found.role != change.step.role):
                    failed.append(worker_id)
        return failed

    def counts(self, sample: FleetSample) -> dict[WorkerRole, int]:
        """Return the ready workers of each role once the changes under way have ended."""
        counts: dict[WorkerRole, int] = {}
        for role in ("prefill", "decode"):
            stay = [e for e in sample.of(role, "ready") if not self.leaves(e)]
            coming = [c for c in self._changes.values() if c.step.role == role]
            counts[role] = len(stay) + len(coming)
        return counts

    def leaves(self, worker: WorkerSample) -> bool:
        """Return whether this boot has an order to change its role."""
        change = self._changes.get(worker.worker_id)
        return change is not None and change.step.boot_id == worker.boot_id

    def written(self, now_s: float, step: RoleStep | None = None) -> dict[str, object]:
        """Return the history as JSON can hold it; as if `step` had just been accepted, where one
        is given."""
        made = self
        if step is not None:
            made = read_history(self.written(now_s), now_s)
            made.took(step, now_s)
        made.taken(now_s)  # drops what is older than an hour
        return {
            "last_role": made.last_role,
            "reversed_ago_s": _ago(made.reversed_s, now_s),
            "ended_ago_s": _ago(made.ended_s, now_s),
            "taken_ago_s": [_ago(each, now_s) for each in made._taken],
            "under_way": [
                {
                    "worker_id": each.step.worker_id,
                    "boot_id": each.step.boot_id,
                    "role": each.step.role,
                    "begun_ago_s": _ago(each.begun_s, now_s),
                }
                for each in made._changes.values()
            ],
        }


def read_history(found: Mapping[str, Any], written_s: float) -> ChangeHistory:
    """Return the history from what `written` returned at this time. Raises ValueError for anything
    else."""
    if not isinstance(found, Mapping) or found.keys() != _FIELDS:
        raise ValueError(f"a history has {sorted(_FIELDS)}, not {str(found)[:80]}")
    history = ChangeHistory()
    history.last_role = None if found["last_role"] is None else _role(found["last_role"])
    history.reversed_s = _time(found["reversed_ago_s"], written_s)
    history.ended_s = _time(found["ended_ago_s"], written_s)
    history._taken = deque(sorted(written_s - each for each in ages_of(found["taken_ago_s"])))
    for each in _list(found["under_way"]):
        if not isinstance(each, dict) or each.keys() != _CHANGE_FIELDS:
            raise ValueError(f"a change has {sorted(_CHANGE_FIELDS)}")
        step = RoleStep(str(each["worker_id"]), str(each["boot_id"]), _role(each["role"]))
        begun_s = written_s - age_of(each["begun_ago_s"])
        history._changes[step.worker_id] = RoleChange(step, begun_s)
    return history


def _failed(change: RoleChange, found: WorkerSample | None, at_s: float, now_s: float) -> bool:
    """Return whether a change took too long, or never began."""
    if now_s - change.begun_s > CHANGE_S:
        return True
    as_before = found is not None and (found.boot_id, found.state) == (change.step.boot_id, "ready")
    return as_before and at_s - change.begun_s > UNTAKEN_S


def _ago(time_s: float | None, now_s: float) -> float | None:
    return None if time_s is None else round(max(0.0, now_s - time_s), 3)


def _time(age: object, written_s: float) -> float | None:
    return None if age is None else written_s - age_of(age)


def age_of(found: object) -> float:
    """Return an age in seconds that was written. Raises ValueError for anything else."""
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError(f"{str(found)[:80]} is no age in seconds")
    if not 0 <= found < math.inf:
        raise ValueError(f"{found} is no age in seconds")
    return float(found)


def ages_of(found: object) -> list[float]:
    """Return ages that were written. Raises ValueError as `age_of`."""
    return [age_of(each) for each in _list(found)]


def _list(found: object) -> list[Any]:
    if not isinstance(found, list):
        raise ValueError(f"{str(found)[:80]} is no list")
    return found


def _role(found: object) -> WorkerRole:
    if found not in ("prefill", "decode"):
        raise ValueError(f"{str(found)[:80]} is no role")
    return found
