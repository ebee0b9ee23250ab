"""Finds when an objective is breached, in the fleet's true state and not in a controller's view."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.planner.controller_load import FleetSample, WorkerRole
from benchmarks.controller.controller_cases import ControllerCase

BREACH_S = 3.0
CALM_S = 30.0


@dataclass(frozen=True, slots=True)
class Breach:
    """A time, from `begun_s` on, in which the workers of a role did not meet the objective."""

    role: WorkerRole
    begun_s: float


@dataclass(slots=True)
class BreachWatch:
    """Finds breaches in the fleet's true state, and not in what the controller makes of it."""

    case: ControllerCase
    found: list[Breach] = field(default_factory=list)
    ends: dict[Breach, float] = field(default_factory=dict)  # when the objective was met again
    _last: FleetSample | None = None
    _since: dict[WorkerRole, float] = field(default_factory=dict)
    _calm_s: dict[WorkerRole, float] = field(default_factory=dict)

    def observed(self, sample: FleetSample) -> FleetSample:
        over: dict[WorkerRole, bool] = {
            "prefill": self._wait_s(sample) > self.case.objectives.ttft_s,
            "decode": self._step_s(sample) > self.case.objectives.itl_s,
        }
        for role, is_over in over.items():
            self._note(role, sample.at_s, is_over=is_over)
        self._last = sample
        return sample

    def _note(self, role: WorkerRole, now_s: float, *, is_over: bool) -> None:
        calm_s = self._calm_s.setdefault(role, 0.0)
        if not is_over:
            self._since.pop(role, None)
            for breach in self.found:
                if breach.role == role:
                    self.ends.setdefault(breach, now_s)
            return
        since_s = self._since.setdefault(role, now_s)
        if now_s - since_s >= BREACH_S:
            begun = not self.found or calm_s < now_s - CALM_S
            if begun or not any(each.role == role for each in self.found):
                self.found.append(Breach(role, since_s))
            self._calm_s[role] = now_s

    def _wait_s(self, sample: FleetSample) -> float:
        ready = sample.of("prefill", "ready")
        rate = max(1, len(ready)) / self.case.timing.chunk.per_token_s
        return sum(each.queued_tokens for each in ready) / rate

    def _step_s(self, sample: FleetSample) -> float:
        before = {} if self._last is None else {e.boot_id: e for e in self._last.workers}
        ready = [e for e in sample.of("decode", "ready") if e.boot_id in before]
        steps = sum(each.steps - before[each.boot_id].steps for each in ready)
        busy_s = sum(each.busy_s - before[each.boot_id].busy_s for each in ready)
        return busy_s / steps if steps else 0.0
