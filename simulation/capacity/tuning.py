"""The search for a layout: each split of the GPUs is simulated with the same traffic, and ranked.

    every ratio of prefill to decode workers ─┐
    colocated workers, with several chunks   ─┴▶ simulate ─▶ share of requests that meet the
                                                             objectives, then cost

The best few are simulated again with all times longer and shorter by the error of the timing
model: the range of their shares. Where no layout meets the objectives for enough requests, the
nearest that one could meet are both times multiplied by the least factor that suffices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from baton.planner.timing_fit import Fit, FitError
from baton.planner.timing_model import TimingModel
from baton.planner.traces import TraceRequest
from baton.runtime.errors import ConfigError
from baton.simulation.capacity.capacity_report import CapacityReport, make_report
from baton.simulation.capacity.capacity_run import run_fleet
from baton.simulation.capacity.layout import CapacityScenario, Layout, Objectives
from baton.simulation.capacity.request_record import RequestRecord

MAX_RATIOS = 24
LOCAL_CHUNKS = (256, 512, 1024, 2048)
WITH_RANGE = 3  # of the best layouts

Progress = Callable[[str], Callable[[int, int], None]]


@dataclass(frozen=True, slots=True)
class Advice:
    """One layout's result. `factor`: the objectives times this are met by the wanted share of
    requests; infinite if too many are refused. `low`, `high`: of `good_share`, if simulated."""

    layout: Layout
    report: CapacityReport
    factor: float
    low: float | None = None
    high: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the report, the layout's flags, and what the search adds."""
        factor = None if math.isinf(self.factor) else self.factor
        return {
            **self.report.to_json(),
            "flags": _flags(self.layout),
            "objective_factor": factor,
            "good_share_low": self.low,
            "good_share_high": self.high,
        }


@dataclass(frozen=True, slots=True)
class Search:
    """`base` has the size of a worker, but for its chunk where it is colocated. `attainment`: the
    wanted share of requests that meet the objectives."""

    gpus: int
    base: Layout
    objectives: Objectives
    attainment: float = 0.9
    gpu_hour_price: float = 0.0


def layouts(search: Search) -> list[Layout]:
    """Return the layouts to simulate. Raises ConfigError if there are GPUs for no worker."""
    workers = search.gpus // search.base.gpus_per_worker
    if workers < 1:
        raise ConfigError(
            f"{search.gpus} GPUs are less than a worker's {search.base.gpus_per_worker}: give more"
        )
    splits = np.unique(np.linspace(1, workers - 1, min(MAX_RATIOS, workers - 1)).round())
    found = [
        replace(search.base, prefill=int(split), decode=workers - int(split), colocated=0)
        for split in splits
    ]
    return found + [
        replace(search.base, prefill=0, decode=0, colocated=workers, local_chunk_tokens=chunk)
        for chunk in LOCAL_CHUNKS
    ]


def tune(search: Search, fit: Fit, trace: list[TraceRequest], progress: Progress) -> list[Advice]:
    """Return all layouts, the best first. Raises ConfigError without an objective."""
    if math.isinf(search.objectives.ttft_s) and math.isinf(search.objectives.itl_s):
        raise ConfigError("there is no objective to search for: give --slo ttft=500ms,itl=40ms")
    found = [_simulated(search, each, fit.model, trace, progress) for each in layouts(search)]
    found.sort(key=_rank)
    error = timing_error(fit.errors)
    if error:
        found[:WITH_RANGE] = [
            _with_range(search, each, fit.model, error, trace, progress)
            for each in found[:WITH_RANGE]
        ]
    return found


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
        if record.refused
        else max(record.ttft_s / objectives.ttft_s, record.mean_gap_s / objectives.itl_s)
        for record in records
    )
    return ratios[math.ceil(attainment * len(ratios)) - 1]


def _rank(advice: Advice) -> tuple[float, float, float]:
    """Order by the share of good requests, then by how near the others are, then by latency."""
    latency = advice.report.e2e_s
    return -advice.report.good_share, advice.factor, latency.mean if latency else math.inf


def _simulated(
    search: Search,
    layout: Layout,
    timing: TimingModel,
    trace: list[TraceRequest],
    progress: Progress,
) -> Advice:
    scenario = CapacityScenario(layout, search.objectives, search.gpu_hour_price)
    fleet = run_fleet(scenario, timing, trace, progress(layout.name))
    factor = needed_factor(fleet.records, search.objectives, search.attainment)
    return Advice(layout, make_report(fleet, scenario, timing, 0.0), factor)


def _with_range(
    search: Search,
    advice: Advice,
    timing: TimingModel,
    error: float,
    trace: list[TraceRequest],
    progress: Progress,
) -> Advice:
    shares = [advice.report.good_share]
    for factor in (1 + error, 1 / (1 + error)):
        scaled = timing.scaled(factor)
        shares.append(_simulated(search, advice.layout, scaled, trace, progress).report.good_share)
    return replace(advice, low=min(shares), high=max(shares))


def tuning_table(found: Sequence[Advice], search: Search) -> str:
    """Return the ranking as lines of text, and what to use."""
    lines = [
        f"{'layout':<28}{'chunk':>7}{'good':>8}{'range':>15}{'goodput/s':>11}"
        f"{'TTFT p99':>11}{'ITL p99':>9}{'cost/M':>9}"
    ]
    for advice in found:
        report, chunk = advice.report, advice.layout.local_chunk_tokens
        spread = "-" if advice.low is None else f"{advice.low:.1%}-{advice.high:.1%}"
        cost = "-" if report.cost_per_million is None else f"{report.cost_per_million:.2f}"
        ttft, itl = (
            "-" if each is None else f"{1000 * each.p99:.0f} ms"
            for each in (report.ttft_s, report.itl_s)
        )
        lines.append(
            f"{report.layout:<28}{chunk:>7}{report.good_share:>8.1%}{spread:>15}"
            f"{report.goodput_per_s:>11.3f}{ttft:>11}{itl:>9}{cost:>9}"
        )
    return "\n".join([*lines, "", verdict(found, search)])


def met(found: Sequence[Advice], search: Search) -> bool:
    """Return whether the best layout meets the objectives for enough requests."""
    return found[0].report.good_share >= search.attainment


def verdict(found: Sequence[Advice], search: Search) -> str:
    """Return the layout to use, or the nearest objectives that one could meet."""
    asked, share = _text(search.objectives, 1.0), f"{search.attainment:.0%} of the requests"
    if met(found, search):
        return f"use {_flags(found[0].layout)}: {asked} is met by {share} or more"
    nearest = min(found, key=lambda each: each.factor)
    if math.isinf(nearest.factor):
        return f"no layout meets {asked} for {share}: more than the rest are refused by each"
    return (
        f"no layout meets {asked} for {share}; the nearest objective that one meets is "
        f"{_text(search.objectives, nearest.factor)}, by {_flags(nearest.layout)}"
    )


def _flags(layout: Layout) -> str:
    if layout.colocated:
        return f"--colocated {layout.colocated} --local-chunk-tokens {layout.local_chunk_tokens}"
    return f"--prefill {layout.prefill} --decode {layout.decode}"


def _text(objectives: Objectives, factor: float) -> str:
    parts = [("ttft", objectives.ttft_s), ("itl", objectives.itl_s)]
    return ",".join(
        f"{name}={math.ceil(1000 * seconds * factor - 1e-6)}ms"
        for name, seconds in parts
        if not math.isinf(seconds)
    )
