"""Simulate the role controller on the conversation trace with traffic that changes.

    python -m benchmarks.controller --trace conversation_trace.jsonl [--quick] [--json FILE]

    decision_delay_s_worst    from the begin of a breach to the first step towards its role, over
                              all patterns; 0 where that step came before
    reversals_in_300_s_worst  changes of direction within any five minutes
    shifting_goodput_ratio    requests that met both objectives, per worker-hour, over those of the
                              best fixed ratio of as many workers: each is simulated

Patterns keep the trace's lengths and block hashes, and draw arrivals from a rate that changes
(planner/traffic_patterns.py). In `saturating`, three of twelve workers prefill, which saturates at
4.5 requests a second, and 8 are offered. `shifting` alternates between the quarter of the trace
with the least prompt for an output token, and the quarter with the most.

A breach begins where for BREACH_S the prompts queued on prefill workers need longer than the TTFT
objective, or decode steps take longer than the ITL objective, and no such time was within
CALM_S before. Timings are those of vLLM on H200 by aiconfigurator, fitted by `baton calibrate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from baton.planner.controller import REVERSAL_S, Decision
from baton.planner.controller_load import FleetSample, WorkerRole
from baton.planner.timing_model import (
    AttentionTiming,
    ChunkTiming,
    StepTiming,
    TimingModel,
    TransferTiming,
)
from baton.planner.traces import TraceRequest, read_trace
from baton.planner.traffic_patterns import Pattern, arrivals, burst, daily, sine
from baton.simulation.capacity.capacity_fleet import CapacityFleet
from baton.simulation.capacity.capacity_report import meets
from baton.simulation.capacity.capacity_run import run_fleet
from baton.simulation.capacity.layout import CapacityScenario, Layout, Objectives
from baton.simulation.capacity.role_changes import ControlledFleet
from benchmarks.figures.report import Figure, at_least, at_most, parser, report

PREFILL_SCALE = 1.06  # three prefill workers saturate at 4.5 requests a second of this trace
LLAMA = TimingModel(
    "Llama 3.1 70B, four H200",
    163_840,
    ChunkTiming(0.036 * PREFILL_SCALE, 5.28e-5 * PREFILL_SCALE),
    StepTiming(0.0094, 1.64e-5),
    AttentionTiming(0.0, 4.24e-8),
    TransferTiming(0.002, 1 / 50e9),
)
GPT_OSS = TimingModel(
    "gpt-oss-120b, one H200",
    73_728,
    ChunkTiming(0.0431, 4.45e-5),
    StepTiming(0.0055, 2.55e-4),
    AttentionTiming(0.0, 2.76e-8),
    TransferTiming(0.002, 1 / 50e9),
)
SEED = 1
DELAY_LIMIT_S = 10.0
RATIO_LIMIT = 1.2
BREACH_S = 3.0
CALM_S = 30.0
LEAD_S = 30.0  # a change takes some 15 s, and several follow each other
BLIND_S = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """One pattern on a fleet that begins with `prefill` of `workers` as prefill workers."""

    pattern: Pattern
    timing: TimingModel
    workers: int
    prefill: int
    objectives: Objectives

    def scenario(self, prefill: int) -> CapacityScenario:
        layout = Layout(prefill=prefill, decode=self.workers - prefill)
        return CapacityScenario(layout, self.objectives)


@dataclass(frozen=True, slots=True)
class Breach:
    """From `begun_s` on, the workers of a role did not meet the objective."""

    role: WorkerRole
    begun_s: float


@dataclass(slots=True)
class BreachWatch:
    """Finds breaches in the fleet's true state, and not in what the controller makes of it."""

    case: Case
    found: list[Breach] = field(default_factory=list)
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """A controlled run; `delays` in seconds, by breach."""

    case: Case
    requests: int
    good: int
    delays: dict[Breach, float]
    steps: list[Decision]

    @property
    def reversals(self) -> int:
        """Return the most changes of direction within REVERSAL_S."""
        taken = [(each.at_s, each.step.role) for each in self.steps if each.step is not None]
        turned = [at_s for (_, before), (at_s, role) in pairwise(taken) if role != before]
        return max(
            (sum(first <= at_s < first + REVERSAL_S for at_s in turned) for first in turned),
            default=0,
        )


def cases(scale: float) -> list[Case]:
    """Return the patterns; `scale` shortens them."""
    llama = (LLAMA, 12, 3, Objectives(5.0, 0.025))
    period_s = 900 * scale
    heavy_s = period_s * 2 / 3
    mix = burst(0.0, 1.0, period_s, heavy_s)
    rates = burst(15.0, 3.8, period_s, heavy_s)
    step_up = burst(3.0, 8.0, 300.0, 240.0)
    bursts = burst(3.0, 8.0, 600 * scale, 240 * scale)
    return [
        Case(Pattern("saturating", 300.0, step_up, 8.0), *llama),
        Case(Pattern("sine", 1200 * scale, sine(1.5, 8.0, 600 * scale), 8.0), *llama),
        Case(Pattern("burst", 1200 * scale, bursts, 8.0), *llama),
        Case(Pattern("daily", 1200 * scale, daily(1.0, 8.0, 1200 * scale), 8.0), *llama),
        Case(
            Pattern("shifting", 2 * period_s, rates, 15.0, mix),
            GPT_OSS,
            8,
            4,
            Objectives(8.0, 0.013),
        ),
    ]


def controlled(case: Case, requests: list[TraceRequest]) -> Outcome:
    """Simulate a case with a controller."""
    scenario, watch = case.scenario(case.prefill), BreachWatch(case)
    controlled_fleet = ControlledFleet(scenario, watch.observed)
    fleet = run_fleet(scenario, case.timing, requests, begun=controlled_fleet.begun)
    steps = controlled_fleet.steps
    delays = {each: delay_s(each, steps) for each in watch.found}
    return Outcome(case, len(requests), good(fleet, case), delays, steps)


def delay_s(breach: Breach, steps: Sequence[Decision]) -> float:
    """Return the seconds from a breach to the first step towards its role, BLIND_S if there is
    none by then. A step of the LEAD_S before counts: its change may be under way."""
    taken = [
        each.at_s
        for each in steps
        if each.step is not None
        and each.step.role == breach.role
        and breach.begun_s - LEAD_S <= each.at_s <= breach.begun_s + BLIND_S
    ]
    return max(0.0, min(taken) - breach.begun_s) if taken else BLIND_S


def good(fleet: CapacityFleet, case: Case) -> int:
    """Count the requests that met both objectives."""
    return sum(not each.refused and meets(each, case.objectives) for each in fleet.records)


def fixed_ratios(case: Case, requests: list[TraceRequest]) -> dict[int, int]:
    """Return the good requests of each fixed number of prefill workers."""
    return {
        prefill: good(run_fleet(case.scenario(prefill), case.timing, requests), case)
        for prefill in range(1, case.workers)
    }


def measure(trace: list[TraceRequest], scale: float) -> tuple[list[Figure], list[str]]:
    """Run all cases; return the figures, and notes with each step and breach."""
    figures, notes, outcomes = [], [], []
    for case in cases(scale):
        name, requests = case.pattern.name, arrivals(trace, case.pattern, SEED)
        outcome = controlled(case, requests)
        outcomes.append(outcome)
        share = outcome.good / outcome.requests
        if name == "shifting":
            fixed = fixed_ratios(case, requests)
            best = max(fixed, key=lambda prefill: fixed[prefill])
            hours = case.workers * case.pattern.seconds / 3600
            figures += [
                at_least("shifting_goodput_ratio", outcome.good / max(1, fixed[best]), RATIO_LIMIT),
                Figure("shifting_per_worker_hour", outcome.good / hours, "1/h"),
                Figure("shifting_best_fixed", fixed[best] / hours, "1/h",
                       f"{best} prefill, {case.workers - best} decode"),
            ]  # fmt: skip
            notes.append(f"shifting, good requests by prefill workers: {fixed}")
        else:
            fixed_good = good(run_fleet(case.scenario(case.prefill), case.timing, requests), case)
            beside = f"{fixed_good / outcome.requests:.3f} without a controller"
            figures.append(Figure(f"{name}_good_share", share, "", beside))
        notes += describe(outcome)
    delays = [delay for each in outcomes for delay in each.delays.values()]
    figures += [
        Figure("breaches", len(delays)),
        at_most("decision_delay_s_worst", max(delays, default=BLIND_S), DELAY_LIMIT_S, "s"),
        at_most("reversals_in_300_s_worst", max(each.reversals for each in outcomes), 1),
    ]
    return figures, notes


def describe(outcome: Outcome) -> list[str]:
    """Return a line for the outcome and for each step and breach."""
    name = outcome.case.pattern.name
    lines = [f"{name}: {outcome.good} of {outcome.requests} requests good, "
             f"{len(outcome.steps)} steps"]  # fmt: skip
    lines += [f"  {each.at_s:6.0f} s  {each.text}" for each in outcome.steps]
    lines += [
        f"  {breach.begun_s:6.0f} s  breach of {breach.role}, step after {delay:.0f} s"
        for breach, delay in outcome.delays.items()
    ]
    return lines


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--trace", type=Path, required=True, metavar="FILE", help="Mooncake's")
    made.add_argument("--quick", action="store_true", help="a fifth of each pattern's time")
    options = made.parse_args()
    figures, notes = measure(read_trace(options.trace), 0.2 if options.quick else 1.0)
    report(figures, options.json, notes)


if __name__ == "__main__":
    main()
