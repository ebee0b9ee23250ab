"""Placement by predicted times against weighted scores, on virtual time at 45 requests a second.

    python -m benchmarks.placement [--trace FILE | --drawn] [--requests N] [--json FILE]

    ttft_p99_ratio_P_D   TTFT p99 of Baton's placement over that of weighted scores, on the same
                         P prefill and D decode workers and requests
    goodput_ratio_P_D    requests within the objectives (TTFT 5 s, mean gap 30 ms), the same way
    ttft_p99_ratio_worst, goodput_ratio_worst

The workers have four H200 each, and the times of Llama 3.1 70B in FP8 that the published
measurements of ai-dynamo/aiconfigurator give (docs/planning.md). `--trace` is Mooncake's
conversation trace, played so fast that 45 requests come in a second; without it, and where it is
not in ../shared/traces, lengths are drawn. The router's view is as old as its load reports.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from baton.planner.timing_model import (
    AttentionTiming,
    ChunkTiming,
    StepTiming,
    TimingModel,
    TransferTiming,
)
from baton.planner.trace_distributions import draw_trace
from baton.planner.traces import TraceRequest, at_rate, read_trace
from baton.router.fleet.placement import place
from baton.simulation.capacity.capacity_report import CapacityReport, make_report
from baton.simulation.capacity.capacity_run import run_fleet
from baton.simulation.capacity.layout import CapacityScenario, Layout, Objectives
from baton.simulation.capacity.router_knowledge import Placer
from benchmarks.figures.report import Figure, at_least, at_most, parser, report
from benchmarks.placement.weighted_scores import place_by_scores

RATE = 45.0  # requests a second
TTFT_RATIO, GOODPUT_RATIO = 0.75, 1.0
TRACE = Path(__file__).resolve().parents[3] / "shared/traces/mooncake/conversation_trace.jsonl"
DRAWN = "requests={count},rate=45,prompt=lognormal:12000:1.0,output=exponential:340"
TIMING = TimingModel(
    "Llama 3.1 70B FP8, four H200",
    163_840.0,
    ChunkTiming(0.0360, 5.28e-5),
    StepTiming(0.0094, 1.64e-5),
    AttentionTiming(0.0, 4.24e-8),
    TransferTiming(0.002, 1 / 40e9),
)
OBJECTIVES = Objectives(5.0, 0.03)
SIZES = ((24, 16), (28, 28), (32, 20))
LAYOUTS = [Layout(prefill=prefill, decode=decode) for prefill, decode in SIZES]


def traffic(trace: Path | None, count: int) -> list[TraceRequest]:
    """Return `count` requests that come at RATE."""
    if trace is None:
        return draw_trace(DRAWN.format(count=count))
    requests = read_trace(trace, count)
    return at_rate(requests, RATE * requests[-1].arrived_s / len(requests))


def simulated(placer: Placer, layout: Layout, requests: list[TraceRequest]) -> CapacityReport:
    scenario = CapacityScenario(layout, OBJECTIVES)
    return make_report(run_fleet(scenario, TIMING, requests, placer=placer), scenario, TIMING, 0.0)


def ratios(
    layout: Layout, requests: list[TraceRequest], note: Callable[[str], None]
) -> tuple[float, float]:
    """Return the ratios of TTFT p99 and goodput of both placements."""
    p99_s, goodput = [], []
    for name, placer in (("predicted times", place), ("weighted scores", place_by_scores)):
        made = simulated(placer, layout, requests)
        assert made.ttft_s is not None
        p99_s.append(made.ttft_s.p99)
        goodput.append(made.goodput_per_s)
        note(
            f"{layout.name}, {name}: TTFT p50 {made.ttft_s.p50:.2f} s, "
            f"p90 {made.ttft_s.p90:.2f} s, p99 {made.ttft_s.p99:.2f} s, "
            f"goodput {made.goodput_per_s:.2f} a second, "
            f"{made.cached_share:.1%} of the prompt tokens cached"
        )
    return p99_s[0] / p99_s[1], goodput[0] / goodput[1]


def figures_of(requests: list[TraceRequest], note: Callable[[str], None]) -> list[Figure]:
    """Return the figures of all layouts."""
    figures, found = [], []
    for layout in LAYOUTS:
        p99, goodput = ratios(layout, requests, note)
        found.append((p99, goodput))
        size = f"{layout.prefill}_{layout.decode}"
        figures.append(Figure(f"ttft_p99_ratio_{size}", p99))
        figures.append(Figure(f"goodput_ratio_{size}", goodput))
    return [
        *figures,
        at_most("ttft_p99_ratio_worst", max(p99 for p99, _ in found), TTFT_RATIO),
        at_least("goodput_ratio_worst", min(goodput for _, goodput in found), GOODPUT_RATIO),
    ]


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--trace", type=Path, metavar="FILE", default=TRACE)
    made.add_argument("--drawn", action="store_true", help="draw lengths, whatever trace there is")
    made.add_argument("--requests", type=int, default=3000, metavar="N")
    options = made.parse_args()
    trace = None if options.drawn or not options.trace.exists() else options.trace
    notes: list[str] = []
    figures = figures_of(traffic(trace, options.requests), notes.append)
    source = "drawn lengths" if trace is None else str(trace)
    report(figures, options.json, [f"{options.requests} requests: {source}", *notes])


if __name__ == "__main__":
    main()
