"""The simulator against measured systems: its errors for each layout, and the worst of them.

    python -m benchmarks.simulator [--quick] [--rounds N] [--a100 FOLDER] [--json FILE]

    ttft_error_mean_worst, ttft_error_p99_worst, tpot_error_worst
        relative differences of simulated and measured times, over six layouts of up to four
        workers. The timing model is fitted to the steps and traces of a run with other traffic
    a100_mean_error_worst, a100_mean_error_with_room
        the same of mean TTFT and TPOT over logs that other systems measured on A100, at the rates
        that the fit has not seen; and only where the simulated pools had room (`--a100`; left out
        without it)

The layouts are real but for the device: the steps of workers sleep for modelled times
(benchmarks/fleets/sleeping_workers.py), of which the fit knows nothing. The logs name no steps: a
prompt that met no other one gives the time of a chunk, a request's mean gap with those that decoded
beside it that of a step. Where KV is short, Baton waits before it computes a prompt, and those
systems after the first token: the wait moves from TPOT to TTFT, and both errors are large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

import numpy as np

from baton.planner.timing_fit import Fit, fit_timing
from baton.planner.timing_model import ChunkTiming, StepTiming, TimingModel, causal_pairs
from baton.planner.trace_distributions import draw_trace
from baton.planner.traces import TraceRequest
from baton.simulation.capacity.capacity_run import run_fleet
from baton.simulation.capacity.layout import CapacityScenario, Layout, Objectives
from benchmarks.figures.report import Figure, at_most, parser, report
from benchmarks.fleets.sleeping_fleet import LayoutRun, measure
from benchmarks.simulator.measured_logs import (
    RateLog,
    chunk_samples,
    middle,
    read_logs,
    step_samples,
)

TPOT_LIMIT, TTFT_LIMIT, P99_LIMIT, A100_LIMIT = 0.08, 0.10, 0.15, 0.08
TIMING = TimingModel("sleeping", 256.0, ChunkTiming(0.04, 5e-4), StepTiming(0.05, 2e-3))
SIZE = Layout(
    colocated=1, pool_tokens=65_536, chunk_tokens=512, local_chunk_tokens=256, max_sequences=64
)
WHOLE = replace(
    SIZE, chunk_tokens=2048, local_chunk_tokens=2048, max_sequences=256, block_tokens=16
)
SPLITS = ((1, 1), (1, 3), (2, 2), (3, 1))
LAYOUTS = (
    *(replace(SIZE, prefill=prefill, decode=decode, colocated=0) for prefill, decode in SPLITS),
    replace(SIZE, colocated=2),
    replace(SIZE, colocated=4),
)
FITTED_ON = "requests=120,rate=2,prompt=lognormal:200:0.8,output=exponential:30"
TRAFFIC = "requests={count},rate={rate},prompt=lognormal:250:0.6,output=exponential:40"
REQUESTS, QUICK_REQUESTS = 160, 50
RATE_OF_A_WORKER = 0.9  # requests a second
FULL_POOL = 0.9  # share of the blocks
WARM = 0.1  # of the requests: the simulated fleet begins empty
# Their prefill and decode stages are one engine each, with pools of the GPUs' memory.
SYSTEMS = {
    "distserve": replace(WHOLE, prefill=1, decode=1, colocated=0),
    "distserve-c21d11": replace(WHOLE, prefill=1, decode=1, colocated=0),
    "distserve-c21d12": replace(WHOLE, prefill=1, decode=1, colocated=0, pool_tokens=131_072),
    "vllm": replace(WHOLE, colocated=1),
}
KV_BYTES = 819_200.0  # of a token of OPT-13B in 16 bits


@dataclass(frozen=True, slots=True)
class TimePair:
    """Mean TTFT, its 99th percentile, and mean time between tokens, in seconds."""

    ttft_s: float
    ttft_p99_s: float
    tpot_s: float

    def errors(self, measured: TimePair) -> TimePair:
        """Return the relative differences."""
        return TimePair(
            abs(self.ttft_s / measured.ttft_s - 1),
            abs(self.ttft_p99_s / measured.ttft_p99_s - 1),
            abs(self.tpot_s / measured.tpot_s - 1),
        )


def times_of(ttfts_s: Sequence[float], gaps_s: Sequence[float]) -> TimePair:
    return TimePair(mean(ttfts_s), float(np.percentile(ttfts_s, 99)), mean(gaps_s))


def simulated(
    layout: Layout, timing: TimingModel, traffic: list[TraceRequest]
) -> tuple[TimePair, float]:
    """Return the simulated times of a layout, without the first requests, and the largest share of
    a decode worker's pool that was held."""
    scenario = CapacityScenario(layout, placement="disaggregated" if layout.prefill else "local")
    fleet = run_fleet(scenario, timing, traffic)
    records = fleet.records
    kept = [each for each in records[int(WARM * len(records)) :] if not each.refused]
    times = times_of(
        [each.ttft_s for each in kept], [each.mean_gap_s for each in kept if each.tokens > 1]
    )
    return times, max(each.most_held / each.pool.total for each in fleet.decode.values())


def measured(run: LayoutRun) -> TimePair:
    """Return what clients measured. Raises RuntimeError if a request failed."""
    kept = run.measurements[int(WARM * len(run.measurements)) :]
    if failed := [each.message for each in kept if each.error]:
        raise RuntimeError(f"{len(failed)} requests failed, as in: {failed[0]}")
    return times_of([each.ttft_s for each in kept], [m.mean_gap_s for m in kept if m.tokens > 1])


def of_layouts(count: int, rounds: int) -> tuple[list[Figure], list[str]]:
    """Measure all layouts, and compare them with their simulation."""
    goals = Objectives(10.0, 1.0)
    seen = measure(LAYOUTS[0], TIMING, draw_trace(FITTED_ON)[:count], goals).fleet
    timing, found = seen.fit.model, []
    for layout in LAYOUTS:
        text = TRAFFIC.format(count=count, rate=RATE_OF_A_WORKER * layout.workers)
        traffic = draw_trace(text)
        known = replace(layout, block_tokens=seen.layout.block_tokens)
        runs = [measured(measure(layout, TIMING, traffic, goals)) for _ in range(rounds)]
        real = TimePair(
            median(each.ttft_s for each in runs),
            median(each.ttft_p99_s for each in runs),
            median(each.tpot_s for each in runs),
        )
        found.append((layout, real, simulated(known, timing, traffic)[0]))
    errors = [made.errors(real) for _, real, made in found]
    notes = [
        f"{layout.name}: TTFT {1e3 * real.ttft_s:.0f} ms ({1e3 * made.ttft_s:.0f} simulated), "
        f"p99 {1e3 * real.ttft_p99_s:.0f} ({1e3 * made.ttft_p99_s:.0f}), "
        f"TPOT {1e3 * real.tpot_s:.1f} ({1e3 * made.tpot_s:.1f})"
        for layout, real, made in found
    ]
    figures = [
        at_most("ttft_error_mean_worst", max(each.ttft_s for each in errors), TTFT_LIMIT),
        at_most("ttft_error_p99_worst", max(each.ttft_p99_s for each in errors), P99_LIMIT),
        at_most("tpot_error_worst", max(each.tpot_s for each in errors), TPOT_LIMIT),
    ]
    return figures, notes


def of_logs(folder: Path) -> list[Figure]:
    """Fit every other rate of each system, and predict the rates between. Raises ValueError if the
    folder has no logs."""
    figures, worst, with_room = [], [], []
    for system, layout in SYSTEMS.items():
        logs = read_logs(folder, system)
        if len(logs) < 2:
            raise ValueError(f"{folder} has {len(logs)} logs of {system}, and two are needed")
        timing = fitted(system, logs[::2], together=bool(layout.colocated)).model
        for log in logs[1::2]:
            requests = middle(log.requests)
            real = times_of(
                [each.ttft_s for each in requests],
                [each.mean_gap_s for each in requests if each.output_tokens > 1],
            )
            made, held = simulated(layout, timing, log.traffic())
            errors = made.errors(real)
            worst.append(max(errors.ttft_s, errors.tpot_s))
            if held < FULL_POOL:
                with_room.append(worst[-1])
            beside = f"TTFT {errors.ttft_s:.3f}, TPOT {errors.tpot_s:.3f}, KV held {held:.0%}"
            name = f"a100_{system}_{log.rate:g}_of_{len(log.requests)}".replace("-", "_")
            figures.append(Figure(name, worst[-1], "", beside))
    return [
        *figures,
        at_most("a100_mean_error_worst", max(worst), A100_LIMIT),
        at_most("a100_mean_error_with_room", max(with_room, default=1.0), A100_LIMIT),
    ]


def fitted(system: str, logs: Sequence[RateLog], *, together: bool) -> Fit:
    """Return the timing model of a system by its logs. `together`: prompts hold up the sequences
    that decode."""
    chunks = [sample for log in logs for sample in chunk_samples(log)]
    alone = [sample for log in logs for sample in step_samples(log)]
    fit = fit_timing(system, KV_BYTES, [*chunks, *alone])
    if not together:
        return fit
    chunk, pair_s = fit.model.chunk, fit.model.attention.per_pair_s

    def prompt_s(tokens: int) -> float:
        return chunk.fixed_s + chunk.per_token_s * tokens + pair_s * causal_pairs(0, tokens)

    rest = [sample for log in logs for sample in step_samples(log, prompt_s)]
    return fit_timing(system, KV_BYTES, [*chunks, *rest])


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--quick", action="store_true", help=f"{QUICK_REQUESTS} requests a layout")
    made.add_argument("--rounds", type=int, default=1, help="of each layout (default: 1)")
    made.add_argument("--a100", type=Path, metavar="FOLDER", help="logs of DistServe's simulator")
    made.add_argument("--only-logs", action="store_true", help="measure no layout here")
    options = made.parse_args()
    figures, notes = list[Figure](), list[str]()
    if not options.only_logs:
        count = QUICK_REQUESTS if options.quick else REQUESTS
        figures, notes = of_layouts(count, options.rounds)
    if options.a100 is None:
        notes.append("a100_mean_error_worst: left out, no --a100 was given")
    else:
        figures += of_logs(options.a100)
    report(figures, options.json, notes)


if __name__ == "__main__":
    main()
