"""How much the result of a layout changes with one worker more, and with other traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from baton.planner.traces import TraceRequest, at_rate
from baton.simulation.capacity.capacity_run import simulate
from baton.simulation.capacity.layout import CapacityScenario, Layout
from baton.simulation.capacity.tuning import Advice, Progress, Search

TRAFFIC_FACTORS = (0.8, 1.2)


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The best layout after one change. `goodput_change`: of its goodput, relative; None if there
    was none."""

    change: str
    good_share: float
    goodput_per_s: float
    goodput_change: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def sensitivities(
    search: Search,
    best: Advice,
    trace: list[TraceRequest],
    progress: Progress,
) -> list[Sensitivity]:
    """Simulate the best layout with one worker more of each of its roles, and with less and more
    traffic."""
    found, timing = [], best.candidate.size.fit.model
    base = best.report.goodput_per_s
    for change, layout, requests in _changes(best.layout, trace):
        scenario = CapacityScenario(
            layout,
            search.objectives,
            search.gpu_hour_price,
            placement=best.candidate.placement,
        )
        report = simulate(scenario, timing, requests, progress(change))
        relative = report.goodput_per_s / base - 1 if base else None
        found.append(Sensitivity(change, report.good_share, report.goodput_per_s, relative))
    return found


def sensitivity_lines(found: Sequence[Sensitivity], best: Advice) -> list[str]:
    """Return a table, one line for each change."""
    lines = [f"{best.report.layout + ', and':<35}{'good':>8}{'goodput/s':>26}{'change':>11}"]
    for each in found:
        change = "-" if each.goodput_change is None else f"{each.goodput_change:+.1%}"
        lines.append(
            f"{each.change:<35}{each.good_share:>8.1%}{each.goodput_per_s:>26.3f}{change:>11}"
        )
    return lines


def _changes(
    layout: Layout, trace: list[TraceRequest]
) -> Iterator[tuple[str, Layout, list[TraceRequest]]]:
    if layout.colocated:
        more = replace(layout, colocated=layout.colocated + 1)
        yield "one colocated worker more", more, trace
    else:
        more = replace(layout, prefill=layout.prefill + 1)
        yield "one prefill worker more", more, trace
        yield "one decode worker more", replace(layout, decode=layout.decode + 1), trace
    for factor in TRAFFIC_FACTORS:
        yield f"{factor - 1:+.0%} traffic", layout, at_rate(trace, factor)
