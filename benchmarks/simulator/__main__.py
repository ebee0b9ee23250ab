"""The simulator against measured systems: its errors for each layout, and the worst of them.

    python -m benchmarks.simulator [--quick] [--rounds N] [--layout NAME] [--a100 FOLDER]
        [--json FILE]
    python -m benchmarks.simulator --real | --speed FILE

    layout_PREFILL_DECODE, layout_COLOCATED
        the largest relative difference of simulated and measured times of a layout, medians of the
        rounds
    ttft_error_mean_worst, ttft_error_p99_worst, tpot_error_worst
        the largest of six layouts of up to four workers, beyond the spread of the rounds: how far
        the median of the simulated times is from the nearest that was measured in a round, and 0
        between two rounds. The timing model is fitted to the steps and traces of a run with other
        traffic, once a round. With one round these are the differences themselves
    real_PREFILL_DECODE, real_COLOCATED, real_ttft_error_mean_worst and so on
        with `--real`, and nothing else: the same of two layouts of two workers that compute
    a100_mean_error_worst
        the same of mean TTFT and TPOT over logs that other systems measured on A100, at the rates
        that the fit has not seen (`--a100`; left out without it)
    trace_s, trace_every_token_s
        with `--speed`, and nothing else: processor seconds to simulate 12,000 requests of a
        Mooncake trace on eight workers, in runs of steps and with each token alone
    wide_us_per_request, wide_million_s
        the same of drawn requests on a thousand workers, for one and for a million

Without `--real` the layouts are real but for the device: the steps of workers sleep for modelled
times (benchmarks/fleets/sleeping_workers.py), of which the fit knows nothing. The logs are of
systems with schedulers of their own, which other_schedulers.py has: against them the timing model,
its fit and virtual time are tested, not Baton's schedulers.

A round takes 15 minutes, two are the default, and limits are judged on five; `--quick` takes 5
minutes a round, and its p99 says little. Router, workers and clients share the machine: run it
where nothing else does.
"""

from __future__ import annotations

from baton.runtime import tls_version  # noqa: F401  before anything imports grpc

# isort: split
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from statistics import mean, median

import numpy as np

from baton.planner.timing_model import ChunkTiming, StepTiming, StepWork, TimingModel
from baton.planner.trace_distributions import draw_trace
from baton.planner.traces import TraceRequest
from baton.simulation.capacity.capacity_run import run_fleet
from baton.simulation.capacity.layout import CapacityScenario, Layout, Objectives
from benchmarks.figures.report import Figure, at_most, parser, progress, report
from benchmarks.fleets.sleeping_fleet import LayoutRun, measure
from benchmarks.simulator.logged_systems import SYSTEMS, halves, logs_of, predictions
from benchmarks.simulator.real_engine import FITTED_ON as REAL_FITTED_ON
from benchmarks.simulator.real_engine import LAYOUTS as REAL_LAYOUTS
from benchmarks.simulator.real_engine import TRAFFIC as REAL_TRAFFIC
from benchmarks.simulator.real_engine import measure_real
from benchmarks.simulator.speed import of_speed

TPOT_LIMIT, TTFT_LIMIT, P99_LIMIT, A100_LIMIT = 0.08, 0.10, 0.15, 0.08
TIMING = TimingModel("sleeping", 256.0, ChunkTiming(0.04, 5e-4), StepTiming(0.05, 2e-3))
SIZE = Layout(
    colocated=1, pool_tokens=65_536, chunk_tokens=512, local_chunk_tokens=256, max_sequences=64
)
SPLITS = ((1, 1), (1, 3), (2, 2), (3, 1))
LAYOUTS = (
    *(replace(SIZE, prefill=prefill, decode=decode, colocated=0) for prefill, decode in SPLITS),
    replace(SIZE, colocated=2),
    replace(SIZE, colocated=4),
)
FITTED_ON = "requests=120,rate=2,prompt=lognormal:200:0.8,output=exponential:30"
TRAFFIC = "requests={count},rate={rate},prompt=lognormal:250:0.6,output=exponential:40"
REQUESTS, QUICK_REQUESTS, REAL_REQUESTS, ROUNDS = 320, 50, 100, 2
RATE_OF_A_WORKER = 0.9  # requests a second
GOALS = Objectives(10.0, 1.0)  # of which the measured and the simulated router know the second
WARM = 0.1  # of the requests: the simulated fleet begins empty


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


def name_of(layout: Layout) -> str:
    """Return its name in figures and options: "1_prefill_3_decode"."""
    return layout.name.replace(", ", "_").replace(" ", "_")


def times_of(ttfts_s: Sequence[float], gaps_s: Sequence[float]) -> TimePair:
    return TimePair(mean(ttfts_s), float(np.percentile(ttfts_s, 99)), mean(gaps_s))


def middle_of(pairs: Sequence[TimePair]) -> TimePair:
    """Return the median of each time."""
    return TimePair(*(median(column) for column in zip(*map(astuple, pairs), strict=True)))


def simulated(layout: Layout, timing: TimingModel, traffic: list[TraceRequest]) -> TimePair:
    """Return the simulated times of a layout, without the first requests. Placement is the
    default's, as in the router that is measured."""
    records = run_fleet(CapacityScenario(layout, GOALS), timing, traffic).records
    kept = [each for each in records[int(WARM * len(records)) :] if each.refused is None]
    return times_of(
        [each.ttft_s for each in kept], [each.mean_gap_s for each in kept if each.tokens > 1]
    )


def measured(run: LayoutRun) -> TimePair:
    """Return what clients measured. Raises RuntimeError if a request failed."""
    kept = run.measurements[int(WARM * len(run.measurements)) :]
    if failed := [each.message for each in kept if each.error]:
        raise RuntimeError(f"{len(failed)} requests failed, as in: {failed[0]}")
    return times_of([each.ttft_s for each in kept], [m.mean_gap_s for m in kept if m.tokens > 1])


@dataclass(slots=True)
class LayoutOutcome:
    """One layout, round by round: what clients measured, what was simulated with the fit of that
    round, and with `exact_steps`: the times for which workers really sleep, or the fit of this very
    run; and a fit of its own steps, which only tells how busy the machine was."""

    layout: Layout
    exact_steps: str = "the true steps"
    real: list[TimePair] = field(default_factory=list)
    made: list[TimePair] = field(default_factory=list)
    exact: list[TimePair] = field(default_factory=list)
    own_fits: list[TimingModel] = field(default_factory=list)

    @property
    def errors(self) -> TimePair:
        return middle_of(self.made).errors(middle_of(self.real))

    @property
    def errors_beyond_spread(self) -> TimePair:
        """Return how far the simulated times are from the nearest measured in any round."""
        made = middle_of(self.made)
        columns = zip(*map(astuple, self.real), strict=True)
        nearest = [
            min(max(time_s, min(rounds)), max(rounds))
            for time_s, rounds in zip(astuple(made), columns, strict=True)
        ]
        return made.errors(TimePair(*nearest))

    def figure(self) -> Figure:
        """Return the worst error, beside the times in milliseconds."""
        real, made, exact = map(middle_of, (self.real, self.made, self.exact))
        names = ("TTFT", "p99", "TPOT")
        rounds = list(zip(*map(astuple, self.real), strict=True))
        cells = [
            f"{name} {1e3 * a:.1f} (rounds {1e3 * min(each):.1f} to {1e3 * max(each):.1f}; "
            f"{1e3 * b:.1f} simulated, {1e3 * c:.1f} with {self.exact_steps})"
            for name, a, b, c, each in zip(
                names, *map(astuple, (real, made, exact)), rounds, strict=True
            )
        ]
        worst = max(astuple(self.errors))
        return Figure(
            f"layout_{name_of(self.layout)}",
            worst,
            "",
            ", ".join([*cells, *([slowness(self.own_fits)] if self.own_fits else [])]),
        )


def of_layouts(
    layouts: Sequence[Layout], count: int, rounds: int
) -> tuple[list[Figure], list[str]]:
    """Measure the layouts, and compare them with their simulation. Each round has its own
    fit of the timing model, so that a machine that is slower for a while is so for both."""
    found = [LayoutOutcome(each) for each in layouts]
    fits = list[TimingModel]()
    for number in range(1, rounds + 1):
        progress(f"round {number} of {rounds}: traffic for the fit")
        seen = measure(LAYOUTS[0], TIMING, draw_trace(FITTED_ON)[:count], GOALS).fleet
        fits.append(seen.fit.model)
        for each in found:
            rate = RATE_OF_A_WORKER * each.layout.workers
            traffic = draw_trace(TRAFFIC.format(count=count, rate=rate))
            known = replace(each.layout, block_tokens=seen.layout.block_tokens)
            seconds = traffic[-1].arrived_s
            progress(f"round {number} of {rounds}: {known.name}, {seconds:.0f} s of traffic")
            run = measure(each.layout, TIMING, traffic, GOALS)
            each.real.append(measured(run))
            each.own_fits.append(run.fleet.fit.model)
            each.made.append(simulated(known, seen.fit.model, traffic))
            exact = replace(TIMING, host=seen.fit.model.host, transfer=seen.fit.model.transfer)
            each.exact.append(simulated(known, exact, traffic))
    errors = [each.errors_beyond_spread for each in found]
    figures = [
        *(each.figure() for each in found),
        at_most("ttft_error_mean_worst", max(each.ttft_s for each in errors), TTFT_LIMIT),
        at_most("ttft_error_p99_worst", max(each.ttft_p99_s for each in errors), P99_LIMIT),
        at_most("tpot_error_worst", max(each.tpot_s for each in errors), TPOT_LIMIT),
    ]
    return figures, [f"traffic for the fit: {slowness(fits)}"]


def of_real_engine(count: int, rounds: int) -> list[Figure]:
    """Measure layouts of two workers that compute, and compare them with their simulation."""
    found = [LayoutOutcome(each, "its own fit") for each in REAL_LAYOUTS]
    for number in range(1, rounds + 1):
        progress(f"real engine, round {number} of {rounds}: traffic for the fit")
        seen = measure_real(REAL_LAYOUTS[0], REAL_FITTED_ON, count, GOALS).fleet
        for each in found:
            progress(f"real engine, round {number} of {rounds}: {each.layout.name}")
            run = measure_real(each.layout, REAL_TRAFFIC, count, GOALS)
            traffic = [one.asked for one in run.measurements]
            each.real.append(measured(run))
            each.made.append(simulated(run.layout, seen.fit.model, traffic))
            each.exact.append(simulated(run.layout, run.fleet.fit.model, traffic))
    errors = [each.errors_beyond_spread for each in found]
    return [
        *(replace(each.figure(), name=f"real_{name_of(each.layout)}") for each in found),
        at_most("real_ttft_error_mean_worst", max(each.ttft_s for each in errors), TTFT_LIMIT),
        at_most("real_ttft_error_p99_worst", max(each.ttft_p99_s for each in errors), P99_LIMIT),
        at_most("real_tpot_error_worst", max(each.tpot_s for each in errors), TPOT_LIMIT),
    ]


def slowness(fits: Sequence[TimingModel]) -> str:
    """Return how much longer steps took than the workers meant to sleep: a busy machine's part."""
    typical = {
        "chunk": StepWork(prompt_tokens=250, pairs=250 * 251 / 2),
        "decode": StepWork(sequences=6, context_tokens=6 * 270),
    }
    parts = [
        f"{name} {median(fit.step_s(work) for fit in fits) / TIMING.step_s(work) - 1:+.1%}"
        for name, work in typical.items()
    ]
    return f"steps took longer than meant by {', '.join(parts)}"


def of_logs(folder: Path) -> list[Figure]:
    """Fit every other rate of each system, and predict the rates between. Raises ValueError if the
    folder lacks logs."""
    figures, errors = list[Figure](), list[float]()
    for system in SYSTEMS:
        fitted, judged = halves(logs_of(folder, system))
        progress(f"{system.name}: {len(fitted)} logs for the fit, {len(judged)} to predict")
        for each in predictions(system, fitted, judged):
            errors.append(each.error)
            ttft, tpot, e2e = astuple(each.errors)
            beside = (
                f"TTFT {ttft:+.3f}, TPOT {tpot:+.3f}, E2E {e2e:+.3f}, KV held {each.most_held:.0%}"
            )
            name = f"a100_{each.system}_{each.rate:g}_of_{each.count}"
            figures.append(Figure(name, each.error, "", beside))
    within = sum(each <= A100_LIMIT for each in errors)
    return [
        *figures,
        Figure("a100_within_limit", within, "", f"of {len(errors)} logs"),
        at_most("a100_mean_error_worst", max(errors), A100_LIMIT),
    ]


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--quick", action="store_true", help=f"{QUICK_REQUESTS} requests a layout")
    made.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    made.add_argument("--layout", choices=[*map(name_of, LAYOUTS)], help="this one alone")
    made.add_argument("--a100", type=Path, metavar="FOLDER", help="logs of DistServe's simulator")
    made.add_argument("--only-logs", action="store_true", help="measure no layout here")
    made.add_argument("--real", action="store_true", help="workers that compute, and nothing else")
    made.add_argument("--speed", type=Path, metavar="FILE", help="how fast it simulates this trace")
    options = made.parse_args()
    if options.speed is not None:
        report(of_speed(options.speed), options.json)
        return
    if options.real:
        count = QUICK_REQUESTS if options.quick else REAL_REQUESTS
        report(of_real_engine(count, options.rounds), options.json)
        return
    figures, notes = list[Figure](), list[str]()
    if not options.only_logs:
        count = QUICK_REQUESTS if options.quick else REQUESTS
        layouts = [each for each in LAYOUTS if options.layout in (None, name_of(each))]
        figures, notes = of_layouts(layouts, count, options.rounds)
    if options.a100 is None:
        notes.append("a100_mean_error_worst: left out, no --a100 was given")
    else:
        figures += of_logs(options.a100)
    report(figures, options.json, notes)


if __name__ == "__main__":
    main()
