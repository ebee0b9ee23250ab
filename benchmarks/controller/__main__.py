"""Simulate the controller on the conversation trace with traffic that changes.

    python -m benchmarks.controller --trace conversation_trace.jsonl [--quick] [--only-number]
                                    [--json FILE]

    decision_delay_s_worst    from the begin of a breach to the first step towards its role, over
                              all patterns; 0 where that step came before
    breaches_barred           without such a step in time, because it would have been a second
                              reversal within 300 s: not in the delay
    breaches_passed           without such a step, and over within 10 s: not in the delay
    reversals_in_300_s_worst  changes of direction within any five minutes
    shifting_goodput_ratio    requests that met both objectives, per worker-hour, over those of the
                              best fixed ratio of as many workers: each is simulated

and the controller of their number (worker_number.py):

    ask_delay_s_worst         from the begin of a breach that no ratio of the workers ends, to the
                              first request for more of them
    numbers_outside_bounds    requests for fewer than the least or more than the most
    removed_during_rush       workers that left while the traffic was high
    roles_without_worker_s    seconds in which a role had no worker
    least_after_rush_s        from the fall of the traffic until the least was asked for again

Patterns keep the trace's lengths and block hashes, and draw arrivals from a rate that changes
(planner/traffic_patterns.py). In `saturating`, three of twelve workers prefill, which saturates at
4.5 requests a second, and 8 are offered. `shifting` alternates between the quarter of the trace
with the least prompt for an output token, and the quarter with the most.

A breach begins where for BREACH_S the prompts queued on prefill workers need longer than the TTFT
objective, or decode steps take longer than the ITL objective, and no such time was within
CALM_S before. Timings are those of vLLM on H200 by aiconfigurator, fitted by `baton calibrate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from baton.planner.controller import REVERSAL_S, Decision
from baton.planner.traces import TraceRequest, read_trace
from baton.planner.traffic_patterns import arrivals
from baton.simulation.capacity.capacity_fleet import CapacityFleet
from baton.simulation.capacity.capacity_report import meets
from baton.simulation.capacity.capacity_run import run_fleet
from baton.simulation.capacity.role_changes import ControlledFleet
from benchmarks.controller import worker_number
from benchmarks.controller.breach_watch import Breach, BreachWatch
from benchmarks.controller.controller_cases import ControllerCase, cases
from benchmarks.figures.report import Figure, at_least, at_most, parser, report

SEED = 1
DELAY_LIMIT_S = 10.0
RATIO_LIMIT = 1.2
LEAD_S = 30.0  # a change takes some 15 s, and several follow each other
BLIND_S = 60.0


@dataclass(frozen=True, slots=True)
class ControlledRun:
    """A controlled run; `delays` in seconds, by breach."""

    case: ControllerCase
    requests: int
    good: int
    delays: dict[Breach, float]
    barred: set[Breach]  # whose step would have been a second reversal within REVERSAL_S
    passed: set[Breach]  # over within DELAY_LIMIT_S without a step
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


def controlled(case: ControllerCase, requests: list[TraceRequest]) -> ControlledRun:
    """Simulate a case with a controller."""
    scenario, watch = case.scenario(case.prefill), BreachWatch(case)
    controlled_fleet = ControlledFleet(scenario, watch.observed)
    fleet = run_fleet(scenario, case.timing, requests, begun=controlled_fleet.begun)
    steps = controlled_fleet.steps
    delays = {each: delay_s(each, steps) for each in watch.found}
    barred = {
        each
        for each, delay in delays.items()
        if delay > DELAY_LIMIT_S and is_barred(each, controlled_fleet.decisions)
    }
    passed = {
        each
        for each, delay in delays.items()
        if delay > DELAY_LIMIT_S and watch.ends.get(each, math.inf) - each.begun_s <= DELAY_LIMIT_S
    }
    return ControlledRun(case, len(requests), good(fleet, case), delays, barred, passed, steps)


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


def is_barred(breach: Breach, decisions: Sequence[Decision]) -> bool:
    """Return whether the controller wanted the step in time, and had reversed too lately."""
    return any(
        each.reason == "reversal"
        for each in decisions
        if breach.begun_s <= each.at_s <= breach.begun_s + DELAY_LIMIT_S
    )


def good(fleet: CapacityFleet, case: ControllerCase) -> int:
    """Count the requests that met both objectives."""
    return sum(each.refused is None and meets(each, case.objectives) for each in fleet.records)


def fixed_ratios(case: ControllerCase, requests: list[TraceRequest]) -> dict[int, int]:
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
    delays = [
        delay
        for each in outcomes
        for breach, delay in each.delays.items()
        if breach not in each.barred | each.passed
    ]
    figures += [
        Figure("breaches", len(delays)),
        Figure("breaches_passed", sum(len(each.passed) for each in outcomes)),
        Figure(
            "breaches_barred",
            sum(len(each.barred) for each in outcomes),
            "",
            "a step would have been a second reversal in 300 s",
        ),
        at_most("decision_delay_s_worst", max(delays, default=BLIND_S), DELAY_LIMIT_S, "s"),
        at_most("reversals_in_300_s_worst", max(each.reversals for each in outcomes), 1),
    ]
    return figures, notes


def describe(outcome: ControlledRun) -> list[str]:
    """Return a line for the outcome and for each step and breach."""
    name = outcome.case.pattern.name
    lines = [f"{name}: {outcome.good} of {outcome.requests} requests good, "
             f"{len(outcome.steps)} steps"]  # fmt: skip
    lines += [f"  {each.at_s:6.0f} s  {each.text}" for each in outcome.steps]
    lines += [
        f"  {breach.begun_s:6.0f} s  breach of {breach.role}, " + _answer(outcome, breach, delay)
        for breach, delay in outcome.delays.items()
    ]
    return lines


def _answer(outcome: ControlledRun, breach: Breach, delay: float) -> str:
    if breach in outcome.passed:
        return f"over within {DELAY_LIMIT_S:.0f} s without a step"
    if breach in outcome.barred:
        return "a step was barred: it would have been a second reversal"
    return f"step after {delay:.0f} s"


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--trace", type=Path, required=True, metavar="FILE", help="Mooncake's")
    made.add_argument("--quick", action="store_true", help="a fifth of each pattern's time")
    made.add_argument("--only-number", action="store_true", help="judge no change of roles")
    options = made.parse_args()
    trace = read_trace(options.trace)
    part = 0.2 if options.quick else 1.0
    figures, notes = ([], []) if options.only_number else measure(trace, part)
    runs = [worker_number.run(trace, each) for each in worker_number.patterns(options.quick)]
    more_figures, more_notes = worker_number.judged(runs)
    report([*figures, *more_figures], options.json, [*notes, *more_notes])


if __name__ == "__main__":
    main()
