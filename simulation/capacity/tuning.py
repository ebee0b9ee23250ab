"""The search for a configuration: candidates are simulated with the same traffic, and ranked.

    first candidates (tuning_candidates.py) ─▶ simulate ─▶ rank ─┬▶ the best with prefill workers ─┐
           ▲                                                     └▶ the best colocated one        ─┤
           └──────────── its neighbours, until none is better, or the simulations are spent ◀──────┘

Ranked by the share of requests that meet the objectives. The best few are simulated again with all
times longer and shorter by the error of the timing model: the range of their shares. Where no
layout meets the objectives for enough requests, the nearest that one could meet are both times
multiplied by the least factor that suffices. Texts: tuning_report.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from baton.planner.timing_fit import FitError
from baton.planner.timing_model import TimingModel
from baton.planner.traces import TraceRequest
from baton.runtime.errors import ConfigError
from baton.simulation.capacity.capacity_report import CapacityReport, make_report
from baton.simulation.capacity.capacity_run import run_fleet
from baton.simulation.capacity.layout import CapacityScenario, Layout, Objectives
from baton.simulation.capacity.request_record import RequestRecord
from baton.simulation.capacity.tuning_candidates import (
    Candidate,
    WorkerSize,
    first_candidates,
    neighbours,
)

WITH_RANGE = 3  # of the best candidates
MIN_SIMULATIONS, SIMULATIONS = 20, 60  # of a search, with the ranges and the sensitivities
AFTERWARDS = 2 * WITH_RANGE + 4  # of these: ranges and sensitivities
FIRST_SHARE = 0.6  # of the others: for the first candidates

Progress = Callable[[str], Callable[[int, int], None]]


@dataclass(frozen=True, slots=True)
class Advice:
    """One candidate's result. `factor`: the objectives times this are met by the wanted share of
    requests; infinite if too many are refused. `low`, `high`: of `good_share`, if simulated."""

    candidate: Candidate
    report: CapacityReport
    factor: float
    low: float | None = None
    high: float | None = None

    @property
    def layout(self) -> Layout:
        return self.candidate.layout

    @property
    def rank(self) -> tuple[float, float, float]:
        """Order by the share of good requests, then by how near the others are, then by latency.
        Differences of less than one in a thousand are none: the first one tried stays first."""
        latency = self.report.e2e_s
        mean_s = latency.mean if latency else math.inf
        return -self.report.good_share, float(f"{self.factor:.3g}"), float(f"{mean_s:.3g}")

    def to_json(self) -> dict[str, Any]:
        """Return the report, and what the search adds."""
        factor = None if math.isinf(self.factor) else self.factor
        return {
            **self.report.to_json(),
            "objective_factor": factor,
            "good_share_low": self.low,
            "good_share_high": self.high,
        }


@dataclass(frozen=True, slots=True)
class Search:
    """`base` has the first limits of a worker's steps. `attainment`: the wanted share of requests
    that meet the objectives. `simulations`: the most of all, with ranges and sensitivities."""

    gpus: int
    base: Layout
    objectives: Objectives
    attainment: float = 0.9
    gpu_hour_price: float = 0.0
    simulations: int = SIMULATIONS


def tune(
    search: Search, sizes: Sequence[WorkerSize], trace: list[TraceRequest], progress: Progress
) -> list[Advice]:
    """Return all candidates that were simulated, the best first. Raises ConfigError without an
    objective, if there are GPUs for no worker, or if the first candidates are too many."""
    if math.isinf(search.objectives.ttft_s) and math.isinf(search.objectives.itl_s):
        raise ConfigError("there is no objective to search for: give --slo ttft=500ms,itl=40ms")
    allowed = search.simulations - AFTERWARDS
    first = first_candidates(search.gpus, search.base, sizes, int(FIRST_SHARE * allowed))
    if len(first) > allowed:
        raise ConfigError(
            f"--simulations {search.simulations} is too few for {len(sizes)} sizes of a worker: "
            f"give {len(first) + AFTERWARDS} or more, or fewer sizes"
        )
    tried = _Tried(search, trace, progress, allowed)
    for each in first:
        tried.simulate(each)
    for kind in (False, True):
        best = min(
            (e for e in tried.all if bool(e.layout.colocated) is kind), key=_rank, default=None
        )
        share = tried.left if kind else tried.left // 2
        if best is not None:
            tried.improve(best, share)
    found = sorted(tried.all, key=_rank)
    found[:WITH_RANGE] = [_with_range(search, each, trace, progress) for each in found[:WITH_RANGE]]
    return found


@dataclass(slots=True)
class _Tried:
    """The simulations of one search, at most `left` more."""

    search: Search
    trace: list[TraceRequest]
    progress: Progress
    left: int
    found: dict[Any, Advice] = field(default_factory=dict)

    @property
    def all(self) -> list[Advice]:
        return [*self.found.values()]

    def simulate(self, candidate: Candidate) -> Advice | None:
        """Return a candidate's result; None if it would be one simulation too many."""
        known = self.found.get(candidate.key)
        if known is None and self.left:
            self.left -= 1
            model = candidate.size.fit.model
            known = _simulated(self.search, candidate, model, self.trace, self.progress)
            self.found[candidate.key] = known
        return known

    def improve(self, best: Advice, most: int) -> None:
        """Go from the best to its best neighbour until none is better, or `most` were simulated."""
        until = self.left - most
        while self.left > until:
            tried = []
            for each in neighbours(best.candidate):
                if self.left > until and (advice := self.simulate(each)) is not None:
                    tried.append(advice)
            better = min(tried, key=_rank, default=best)
            if _rank(better) >= _rank(best):
                return
            best = better


def _rank(advice: Advice) -> tuple[float, float, float]:
    return advice.rank


def timing_error(errors: Mapping[str, FitError]) -> float:
    """Return the largest median error of chunks and steps; 0 if none is known."""
    return max((errors[kind].median for kind in ("chunk", "step") if kind in errors), default=0.0)


def needed_factor(
    records: Sequence[RequestRecord], objectives: Objectives, attainment: float
) -> float:
    """Return the least factor by which both objectives have to be multiplied so that this share of
    requests meets them."""
    ratios = sorted(
        math.inf
        if record.refused is not None
        else max(record.ttft_s / objectives.ttft_s, record.mean_gap_s / objectives.itl_s)
        for record in records
    )
    return ratios[math.ceil(attainment * len(ratios)) - 1]


def _simulated(
    search: Search,
    candidate: Candidate,
    timing: TimingModel,
    trace: list[TraceRequest],
    progress: Progress,
) -> Advice:
    scenario = CapacityScenario(
        candidate.layout, search.objectives, search.gpu_hour_price, placement=candidate.placement
    )
    fleet = run_fleet(scenario, timing, trace, progress(candidate.layout.name))
    factor = needed_factor(fleet.records, search.objectives, search.attainment)
    return Advice(candidate, make_report(fleet, scenario, timing, 0.0), factor)


def _with_range(
    search: Search, advice: Advice, trace: list[TraceRequest], progress: Progress
) -> Advice:
    fit, shares = advice.candidate.size.fit, [advice.report.good_share]
    if not (error := timing_error(fit.errors)):
        return advice
    for factor in (1 + error, 1 / (1 + error)):
        scaled = _simulated(search, advice.candidate, fit.model.scaled(factor), trace, progress)
        shares.append(scaled.report.good_share)
    return replace(advice, low=min(shares), high=max(shares))
