"""Compare orders of prompts in a prefill worker's steps: simulated, and in real processes.

    python -m benchmarks.chunk_orders [--fleet] [--quick] [--json FILE]

One prefill and one decode worker with the times of a model of 0.45 B parameters on one core each:
400 tokens of prompt a second. Every prompt goes to the prefill worker. Orders:
fleets/chunk_orders.py.

simulated_SHAPE_ORDER  mean TTFT on virtual time, beside its percentiles and the mean of the TTFT
                       over that of the prompt alone
fleet_SHAPE_ORDER      the same of router, workers and client as processes, whose steps sleep for
                       these times, four times as fast (`--fleet`)

Shapes: `bursts`, four prompts of 1,500 tokens every 20 s beside short ones; `mixed`, 80 % of what
the worker can compute; `long_tail`, the same with prompts of very different lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from baton.planner.timing_model import StepWork
from baton.planner.trace_distributions import draw_trace
from baton.planner.traces import TraceRequest, in_order
from baton.runtime.config import PlacementMode
from baton.runtime.worker.attention_pairs import causal_pairs
from baton.simulation.capacity.capacity_run import run_fleet
from baton.simulation.capacity.layout import CapacityScenario, Objectives
from benchmarks.figures.report import Figure, parser, report
from benchmarks.fleets.chunk_orders import ORDERS, prompts_in_order
from benchmarks.fleets.sleeping_fleet import measure
from benchmarks.inputs.one_core_timing import LAYOUT, TIMING

REQUESTS, QUICK_REQUESTS, FLEET_REQUESTS = 600, 60, 120
FASTER = 4.0  # the processes than the simulation
FLEET_SHAPES = ("bursts", "mixed")  # whose prompts the demonstration model's context holds
LONGEST_TOKENS = 1900
ANY = Objectives(math.inf, math.inf)
PLACEMENT: PlacementMode = "disaggregated"  # else decode workers compute what would wait


@dataclass(frozen=True, slots=True)
class PromptTime:
    tokens: int
    ttft_s: float


def traffic(requests: int) -> dict[str, list[TraceRequest]]:
    """Return the shapes, of about so many requests each."""
    text = "requests={count},rate={rate},prompt=lognormal:{prompt},output=exponential:40"
    return {
        "bursts": bursts(requests // 14 + 1),
        "mixed": draw_trace(text.format(count=requests, rate=0.6, prompt="400:0.8")),
        "long_tail": draw_trace(text.format(count=requests, rate=0.3, prompt="300:1.4")),
    }


def bursts(count: int) -> list[TraceRequest]:
    """Return bursts of four long prompts, 20 s apart, and a short one every 2 s."""
    seconds = 20.0 * count
    long = [
        TraceRequest(20.0 * n + 0.01 * each, 1500, 16) for n in range(count) for each in range(4)
    ]
    return in_order([*long, *(TraceRequest(2.0 * n, 80, 60) for n in range(int(seconds / 2)))])


def simulated(order: str, requests: list[TraceRequest]) -> list[PromptTime]:
    scenario = CapacityScenario(LAYOUT, placement=PLACEMENT)
    with prompts_in_order(order):
        fleet = run_fleet(scenario, TIMING, requests)
    return [PromptTime(each.request.prompt_tokens, each.ttft_s) for each in fleet.records]


def of_processes(order: str, requests: list[TraceRequest]) -> list[PromptTime]:
    """Measure real processes. Raises RuntimeError if a request fails."""
    quicker = [
        replace(
            each,
            arrived_s=each.arrived_s / FASTER,
            prompt_tokens=min(each.prompt_tokens, LONGEST_TOKENS),
        )
        for each in requests
    ]
    entry = ["-m", "benchmarks.fleets.chunk_orders", order]
    timing = TIMING.scaled(1 / FASTER)
    found = measure(LAYOUT, timing, quicker, ANY, entry, placement=PLACEMENT).measurements
    if failed := [each.message for each in found if each.error]:
        raise RuntimeError(f"{len(failed)} requests failed, as in: {failed[0]}")
    return [PromptTime(each.asked.prompt_tokens, each.ttft_s * FASTER) for each in found]


def figure(name: str, found: Sequence[PromptTime]) -> Figure:
    """Return the mean TTFT, beside what else there is to say of it."""
    seconds = np.array([each.ttft_s for each in found])
    alone = np.array([alone_s(each.tokens) for each in found])
    p50, p99 = np.percentile(seconds, [50, 99])
    beside = f"p50 {p50:.2f}, p99 {p99:.1f}, longest {seconds.max():.1f} s; "
    return Figure(
        name, float(seconds.mean()), "s", beside + f"{(seconds / alone).mean():.2f} times alone"
    )


def alone_s(tokens: int) -> float:
    """Return the time of a prompt's steps."""
    return sum(
        TIMING.step_s(StepWork(end - start, causal_pairs(start, end)))
        for start in range(0, tokens, LAYOUT.chunk_tokens)
        for end in [min(tokens, start + LAYOUT.chunk_tokens)]
    )


def main() -> None:
    made = parser((__doc__ or "").partition("\n")[0])
    made.add_argument(
        "--fleet", action="store_true", help="processes too, for two shapes: 8 minutes"
    )
    made.add_argument("--quick", action="store_true", help="a tenth of the requests")
    options = made.parse_args()
    figures = [
        figure(f"simulated_{shape}_{order}", simulated(order, requests))
        for shape, requests in traffic(QUICK_REQUESTS if options.quick else REQUESTS).items()
        for order in ORDERS
    ]
    if options.fleet:
        few = QUICK_REQUESTS if options.quick else FLEET_REQUESTS
        figures += [
            figure(f"fleet_{shape}_{order}", of_processes(order, requests))
            for shape, requests in traffic(few).items()
            if shape in FLEET_SHAPES
            for order in ORDERS
        ]
    report(figures, options.json)


if __name__ == "__main__":
    main()
