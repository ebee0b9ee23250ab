"""The controller of the number of workers, under traffic that no ratio of the first ones serves.

    rush    2 requests a second, 7 for four minutes, then 1
    tide    a slow rise to 7 and fall, in fifteen minutes

A fleet begins with the least number of workers; one that is asked for starts START_S later. Judged
are breaches (breach_watch.py) that begin while fewer than the most are asked for: the first request
for more workers has to follow within DELAY_LIMIT_S, or have been made so late before that its
workers were not yet of use. A breach that ends without more workers was one for a change of roles.
Workers have to leave within the time that the controller's own brakes take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.planner.controller_load import FleetSample
from baton.planner.fleet_size import (
    SETTLE_S,
    SHRINK_GAP_S,
    SizeBounds,
    SizeDecision,
    SizeStep,
)
from baton.planner.traces import TraceRequest
from baton.planner.traffic_patterns import Curve, Pattern, arrivals, daily
from baton.simulation.capacity.capacity_report import meets
from baton.simulation.capacity.capacity_run import run_fleet
from baton.simulation.capacity.layout import Objectives
from baton.simulation.capacity.role_changes import DRAIN_S, ControlledFleet
from baton.simulation.capacity.size_changes import SizedFleet
from benchmarks.controller.breach_watch import Breach, BreachWatch
from benchmarks.controller.controller_cases import LLAMA, ControllerCase
from benchmarks.figures.report import Figure, at_most

SEED = 1
START_S = 60.0  # from a request for a worker to its first prompt
DELAY_LIMIT_S = 10.0
BLIND_S = 60.0
BOUNDS = SizeBounds(least=5, most=12, release_s=60.0)
FIRST_PREFILL = 2
LEAVE_S = SHRINK_GAP_S + DRAIN_S + SETTLE_S  # for each worker that leaves
RISE_S, FALL_S = 120.0, 360.0  # of `rush`
HIGH_PER_S = 7.0


@dataclass(frozen=True, slots=True)
class NumberRun:
    """A run. `steps` are the numbers that were asked for, with their times; `delays_s` by breach
    that more workers had to end. `seconds` of the pattern."""

    name: str
    seconds: float
    requests: int
    good: int
    good_at_most: int  # with the most workers all the time
    steps: Sequence[tuple[float, SizeStep]]
    delays_s: dict[Breach, float]
    by_roles: int  # breaches that ended without more workers
    roles_empty: int  # seconds in which a role had no worker

    def asked(self, now_s: float) -> int:
        """Return how many workers were asked for at this time."""
        before = [step.workers for at_s, step in self.steps if at_s <= now_s]
        return before[-1] if before else BOUNDS.least

    @property
    def worker_hours(self) -> float:
        """Return the time of all workers that were asked for, from the request on."""
        times = [0.0, *(at_s for at_s, _ in self.steps if at_s < self.seconds), self.seconds]
        spans = zip(times, times[1:], strict=False)
        return sum((end - begin) * self.asked(begin) for begin, end in spans) / 3600

    @property
    def late_s(self) -> float:
        """Return for how long after the fall of a rush more than the least were asked for."""
        shrunk = [at_s for at_s, step in self.steps if step.workers == BOUNDS.least]
        last_s = shrunk[-1] if shrunk and self.asked(self.seconds) == BOUNDS.least else self.seconds
        return max(0.0, last_s - FALL_S)


def rush(now_s: float) -> float:
    """Return the rate of a rush."""
    if now_s < RISE_S:
        return 2.0
    return HIGH_PER_S if now_s < FALL_S else 1.0


def patterns(quick: bool) -> list[Pattern]:
    """Return the patterns; the delay is judged in whole ones alone."""
    leaves_s = BOUNDS.release_s + (BOUNDS.most - BOUNDS.least) * LEAVE_S
    curves: list[tuple[str, float, Curve]] = [("rush", FALL_S + leaves_s, rush)]
    if not quick:
        curves.append(("tide", 900.0, daily(1.0, HIGH_PER_S, 900.0)))
    return [Pattern(name, seconds, curve, HIGH_PER_S) for name, seconds, curve in curves]


def run(trace: list[TraceRequest], pattern: Pattern) -> NumberRun:
    """Simulate a pattern, and the same with the most workers all the time."""
    requests = arrivals(trace, pattern, SEED)
    goals = Objectives(5.0, 0.025)
    case = ControllerCase(pattern, LLAMA, BOUNDS.least, FIRST_PREFILL, goals)
    watch, roles_empty = BreachWatch(case), 0

    def observed(sample: FleetSample) -> FleetSample:
        nonlocal roles_empty
        roles_empty += not {"prefill", "decode"} <= {each.role for each in sample.workers}
        return watch.observed(sample)

    scenario = case.scenario(FIRST_PREFILL)
    sized = SizedFleet(scenario, BOUNDS, START_S, observed)
    fleet = run_fleet(scenario, LLAMA, requests, begun=sized.begun)
    most = ControllerCase(pattern, LLAMA, BOUNDS.most, BOUNDS.most // 2, goals)
    whole = ControlledFleet(most.scenario(most.prefill))
    beside = run_fleet(most.scenario(most.prefill), LLAMA, requests, begun=whole.begun)
    delays, by_roles = ask_delays(watch, sized.sizes)
    return NumberRun(
        name=pattern.name,
        seconds=pattern.seconds,
        requests=len(requests),
        good=sum(meets(each, goals) for each in fleet.records),
        good_at_most=sum(meets(each, goals) for each in beside.records),
        steps=steps_of(sized.sizes),
        delays_s=delays,
        by_roles=by_roles,
        roles_empty=roles_empty,
    )


def steps_of(decisions: Sequence[SizeDecision]) -> list[tuple[float, SizeStep]]:
    return [(each.at_s, each.step) for each in decisions if each.step is not None]


def ask_delays(
    watch: BreachWatch, decisions: Sequence[SizeDecision]
) -> tuple[dict[Breach, float], int]:
    """Return the seconds from each breach to the first request for more workers, BLIND_S if there
    was none by then, and how many breaches ended without one. One of the START_S and SETTLE_S
    before counts: its workers are under way. Breaches with the most workers are left out."""
    steps = steps_of(decisions)
    grown_s = [at_s for at_s, step in steps if step.workers > step.before]
    delays: dict[Breach, float] = {}
    by_roles = 0
    for breach in watch.found:
        earlier = [step.workers for at_s, step in steps if at_s < breach.begun_s]
        first_s = breach.begun_s - START_S - SETTLE_S
        answers = [at_s for at_s in grown_s if first_s <= at_s <= breach.begun_s + BLIND_S]
        if answers:
            delays[breach] = max(0.0, answers[0] - breach.begun_s)
        elif earlier and earlier[-1] >= BOUNDS.most:
            continue
        elif watch.ends.get(breach, breach.begun_s + BLIND_S) < breach.begun_s + BLIND_S:
            by_roles += 1
        else:
            delays[breach] = BLIND_S
    return delays, by_roles


def judged(runs: Sequence[NumberRun]) -> tuple[list[Figure], list[str]]:
    """Return the figures of all runs, and a line for each and for each step."""
    figures: list[Figure] = []
    for each in runs:
        per_hour = each.good / each.worker_hours
        at_most_hours = BOUNDS.most * each.seconds / 3600
        figures += [
            Figure(f"{each.name}_good_share", each.good / each.requests, "",
                   f"{each.good_at_most / each.requests:.3f} with {BOUNDS.most} workers"),
            Figure(f"{each.name}_good_per_worker_hour", per_hour, "1/h",
                   f"{each.good_at_most / at_most_hours:.0f} with {BOUNDS.most} workers"),
        ]  # fmt: skip
    delays = [delay for each in runs for delay in each.delays_s.values()]
    counts = [step.workers for each in runs for _, step in each.steps]
    outside = [count for count in counts if not BOUNDS.least <= count <= BOUNDS.most]
    first = runs[0]
    early = [
        step for at_s, step in first.steps if RISE_S <= at_s < FALL_S and step.workers < step.before
    ]
    peak = max((step.workers for _, step in first.steps), default=BOUNDS.least)
    limit_s = BOUNDS.release_s + (peak - BOUNDS.least) * LEAVE_S
    figures += [
        Figure("ask_breaches", len(delays)),
        Figure("ask_breaches_ended_by_roles", sum(each.by_roles for each in runs)),
        at_most("ask_delay_s_worst", max(delays, default=BLIND_S), DELAY_LIMIT_S, "s"),
        at_most("numbers_outside_bounds", len(outside), 0),
        at_most("removed_during_rush", len(early), 0),
        at_most("roles_without_worker_s", sum(each.roles_empty for each in runs), 0, "s"),
        at_most("least_after_rush_s", first.late_s, limit_s, "s"),
    ]
    return figures, [line for each in runs for line in describe(each)]


def describe(found: NumberRun) -> list[str]:
    """Return a line for the run, and for each step and breach."""
    lines = [f"{found.name}: {found.good} of {found.requests} requests good, "
             f"{found.worker_hours:.2f} worker-hours"]  # fmt: skip
    lines += [f"  {at_s:6.0f} s  {e.before} to {e.workers} workers" for at_s, e in found.steps]
    return lines + [
        f"  {breach.begun_s:6.0f} s  breach of {breach.role}, more asked for after {delay:.0f} s"
        for breach, delay in found.delays_s.items()
    ]
