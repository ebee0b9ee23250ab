"""Placement by predicted times against weighted scores, on virtual time at 45 requests a second.

    python -m benchmarks.placement [--trace FILE | --drawn] [--requests N] [--parts K] [--json FILE]

    ttft_p99_ratio_P_D   TTFT p99 of Baton's placement over that of weighted scores, on the same
                         P prefill and D decode workers and requests: the median of the parts
    goodput_ratio_P_D    requests within the objectives (TTFT 5 s, mean gap 30 ms), the same way
    ttft_p99_least_P_D   TTFT p99 if each prompt had a prefill worker to itself, with what Baton's
                         placement found cached, over that of weighted scores: no queue is shorter
    ttft_p99_ratio_worst, goodput_ratio_worst    of the layouts

The workers have four H200 each, and the times of Llama 3.1 70B in FP8 that the published
measurements of ai-dynamo/aiconfigurator give (docs/planning.md). `--trace` is Mooncake's
conversation trace, played so fast that 45 requests come in a second; without it, and where it is
not in ../shared/traces, lengths are drawn. Each of the K parts has N requests of it, the next after
the last, and begins with empty caches. The router's view is as old as its load reports.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from baton.planner.trace_distributions import draw_trace
from baton.planner.traces import TraceRequest, at_rate, in_order, read_trace
from baton.router.fleet.placement import Placer, place
from baton.router.fleet.worker_costs import WorkerCosts
from baton.runtime.config import StepConfig
from baton.runtime.errors import ConfigError
from baton.simulation.capacity.capacity_fleet import CapacityFleet
from baton.simulation.capacity.capacity_report import make_report
from baton.simulation.capacity.capacity_run import run_fleet
from baton.simulation.capacity.layout import CapacityScenario, Layout, Objectives
from baton.simulation.capacity.request_record import RequestRecord
from benchmarks.figures.report import Figure, at_least, at_most, parser, report
from benchmarks.inputs.h200_timing import TIMING
from benchmarks.placement.weighted_scores import place_by_scores

RATE = 45.0  # requests a second
TTFT_RATIO, GOODPUT_RATIO = 0.75, 1.0
TRACE = Path(__file__).resolve().parents[3] / "shared/traces/mooncake/conversation_trace.jsonl"
DRAWN = "requests={count},seed={seed},rate=45,prompt=lognormal:12000:1.0,output=exponential:340"
OBJECTIVES = Objectives(5.0, 0.03)
SIZES = ((24, 16), (28, 28), (32, 20))
LAYOUTS = [Layout(prefill=prefill, decode=decode) for prefill, decode in SIZES]


class Compared(NamedTuple):
    """Ratios of one layout on one part: of TTFT p99, of goodput, and of the least TTFT p99."""

    ttft_p99: float
    goodput: float
    least: float


def traffic(trace: Path | None, count: int, parts: int) -> list[list[TraceRequest]]:
    """Return `parts` times `count` requests that come at RATE. Raises ConfigError if the trace has
    not so many."""
    if trace is None:
        return [draw_trace(DRAWN.format(count=count, seed=seed)) for seed in range(parts)]
    requests = read_trace(trace, count * parts)
    if len(requests) < count * parts:
        raise ConfigError(
            f"{trace} has {len(requests)} requests, and {parts} parts of {count} need "
            f"{count * parts}: give fewer"
        )
    return [_part(requests[count * part : count * (part + 1)]) for part in range(parts)]


def _part(requests: list[TraceRequest]) -> list[TraceRequest]:
    ordered = in_order(requests)
    return at_rate(ordered, RATE * ordered[-1].arrived_s / len(ordered))


def simulated(placer: Placer, layout: Layout, requests: list[TraceRequest]) -> CapacityFleet:
    return run_fleet(CapacityScenario(layout, OBJECTIVES), TIMING, requests, placer=placer)


def least_s(record: RequestRecord, step: StepConfig) -> float:
    """Return the time of the steps that compute what was not cached of a prompt."""
    tokens = record.request.prompt_tokens
    costs = WorkerCosts(TIMING, 1.0, step.prefill_tokens, step.chunk_tokens)
    return costs.compute_us(min(record.cached_tokens, tokens - 1), tokens) / 1e6


def compared(layout: Layout, requests: list[TraceRequest], note: Callable[[str], None]) -> Compared:
    """Run both placements on the requests."""
    p99_s, goodput, least = [], [], []
    for name, placer in (("predicted times", place), ("weighted scores", place_by_scores)):
        fleet = simulated(placer, layout, requests)
        made = make_report(fleet, CapacityScenario(layout, OBJECTIVES), TIMING, 0.0)
        assert made.ttft_s is not None
        times = [least_s(each, layout.steps()) for each in fleet.records if each.refused is None]
        p99_s.append(made.ttft_s.p99)
        goodput.append(made.goodput_per_s)
        least.append(float(np.percentile(times, 99)))
        note(
            f"{layout.name}, {name}: TTFT p50 {made.ttft_s.p50:.2f} s, "
            f"p90 {made.ttft_s.p90:.2f} s, p99 {made.ttft_s.p99:.2f} s (without queues "
            f"{least[-1]:.2f} s), goodput {made.goodput_per_s:.2f} a second, "
            f"{made.cached_share:.1%} of the prompt tokens cached"
        )
    found = Compared(p99_s[0] / p99_s[1], goodput[0] / goodput[1], least[0] / p99_s[1])
    note(f"  ratio of TTFT p99 {found.ttft_p99:.2f}, of goodput {found.goodput:.3f}")
    return found


def figures_of(parts: list[list[TraceRequest]], note: Callable[[str], None]) -> list[Figure]:
    """Return the figures of all layouts, each the median of the parts."""
    figures, medians = [], []
    for layout in LAYOUTS:
        found = [compared(layout, requests, note) for requests in parts]
        middle = Compared(*map(median, zip(*found, strict=True)))
        medians.append(middle)
        size = f"{layout.prefill}_{layout.decode}"
        figures.append(Figure(f"ttft_p99_ratio_{size}", middle.ttft_p99))
        figures.append(Figure(f"ttft_p99_least_{size}", middle.least))
        figures.append(Figure(f"goodput_ratio_{size}", middle.goodput))
    return [
        *figures,
        at_most("ttft_p99_ratio_worst", max(each.ttft_p99 for each in medians), TTFT_RATIO),
        at_least("goodput_ratio_worst", min(each.goodput for each in medians), GOODPUT_RATIO),
    ]


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--trace", type=Path, metavar="FILE", default=TRACE)
    made.add_argument("--drawn", action="store_true", help="draw lengths, whatever trace there is")
    made.add_argument("--requests", type=int, metavar="N", help="of each part, 3000 by default")
    made.add_argument("--parts", type=int, default=1, metavar="K")
    made.add_argument("--quick", action="store_true", help="300 requests by default")
    options = made.parse_args()
    trace = None if options.drawn or not options.trace.exists() else options.trace
    count = options.requests or (300 if options.quick else 3000)
    notes: list[str] = []
    figures = figures_of(traffic(trace, count, options.parts), notes.append)
    source = "drawn lengths" if trace is None else str(trace)
    notes.insert(0, f"{options.parts} parts of {count} requests: {source}")
    report(figures, options.json, notes)


if __name__ == "__main__":
    main()
