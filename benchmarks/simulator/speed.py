"""How long the simulator computes: a recorded trace, in runs of steps and with each token alone,
and a fleet of a thousand workers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from baton.planner.trace_distributions import draw_trace
from baton.planner.traces import TraceRequest, read_trace
from baton.runtime.errors import ConfigError
from baton.simulation.capacity.capacity_run import run_fleet
from baton.simulation.capacity.layout import CapacityScenario, Layout
from benchmarks.figures.report import Figure, at_most, progress
from benchmarks.inputs.h200_timing import TIMING

REQUESTS = 12_000
RUNS_LIMIT_S, TOKENS_LIMIT_S = 10.0, 60.0  # where an iteration of a loop that adds takes USUAL_NS
LOOPS, USUAL_NS = 1_000_000, 40.0
EIGHT = Layout(prefill=3, decode=5)
THOUSAND = Layout(prefill=500, decode=500)
DRAWN = "requests={count},rate=400,prompt=lognormal:4000:0.8,output=exponential:200"
WIDE_REQUESTS = 10_000
MILLION = 1_000_000


def of_speed(trace: Path, count: int = REQUESTS, wide: int = WIDE_REQUESTS) -> list[Figure]:
    """Simulate `count` requests of the trace twice, and `wide` drawn ones. Raises ConfigError if
    the trace has fewer."""
    requests = read_trace(trace, count)
    before_ns = _loop_ns()
    if len(requests) < count:
        raise ConfigError(f"{trace} has {len(requests)} requests: {count} are needed")
    progress(f"{count} requests in runs of steps")
    runs_s = _processor_s(EIGHT, requests)
    progress(f"{count} requests, each token alone")
    tokens_s = _processor_s(EIGHT, requests, every_token=True)
    progress(f"{wide} requests on {THOUSAND.workers} workers")
    wide_s = _processor_s(THOUSAND, draw_trace(DRAWN.format(count=wide)))
    beside = f"{THOUSAND.workers} workers, {wide} requests: {wide_s:.1f} s"
    loop_ns = (before_ns + _loop_ns()) / 2
    slowness = max(1.0, loop_ns / USUAL_NS)  # of this machine's Python
    usual = f"{USUAL_NS:.0f} where the limits are {RUNS_LIMIT_S:.0f} and {TOKENS_LIMIT_S:.0f} s"
    return [
        at_most("trace_s", runs_s, RUNS_LIMIT_S * slowness, "s"),
        at_most("trace_every_token_s", tokens_s, TOKENS_LIMIT_S * slowness, "s"),
        Figure("loop_ns", loop_ns, "ns", f"an iteration, before and after; {usual}"),
        Figure("wide_us_per_request", 1e6 * wide_s / wide, "us", beside),
        Figure("wide_million_s", MILLION * wide_s / wide, "s", "a million requests, at that pace"),
    ]


def _loop_ns() -> float:
    """Return the processor time of an iteration of a loop that adds, of five runs the
    median, in nanoseconds."""
    times_s = list[float]()
    for _ in range(5):
        begun_s = time.process_time()
        total = 0
        for number in range(LOOPS):
            total += number
        times_s.append(time.process_time() - begun_s)
    return 1e9 * median(times_s) / LOOPS


def _processor_s(
    layout: Layout, requests: Sequence[TraceRequest], *, every_token: bool = False
) -> float:
    """Return the processor time of a run in seconds, in which every request ends."""
    scenario = CapacityScenario(layout, every_token=every_token)
    begun_s = time.process_time()
    fleet = run_fleet(scenario, TIMING, [*requests])
    took_s = time.process_time() - begun_s
    refused = sum(record.refused is not None for record in fleet.records)
    if refused:
        raise ConfigError(f"{refused} of {len(requests)} requests fit no worker of {layout.name}")
    return took_s
