"""Does advice come true? Four layouts of four workers are measured, and predicted from one of them.

    python -m benchmarks.advice [--quick] [--rounds N] [--json FILE]

    prediction_error_worst  difference between the predicted and the measured share of requests that
                            meet the objectives, over all layouts and mixes (medians of the rounds)
    advice_regret           of the layout with the best prediction: the best measured share over its
                            own, minus 1; the worst mix
    MIX_LAYOUT              that share as measured, beside its prediction, with the rounds' ranges

For each of three mixes, a fleet of two prefill and two decode workers serves the traffic; from its
traces and its workers' reports alone, as `baton advise` reads them, all layouts are predicted. Then
each layout serves the same requests at the same times. Routers, schedulers, handoffs and clients
are real; the steps of workers sleep for modelled times (benchmarks/fleets/sleeping_workers.py), so
that four workers fit on two cores. The predictions know nothing of that model.

A round takes 15 minutes, two are the default; `--quick` takes 6 minutes a round. Router, workers
and clients share the machine: run it where nothing else does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from statistics import median

from baton.planner.timing_model import ChunkTiming, StepTiming, TimingModel
from baton.planner.trace_distributions import draw_trace
from baton.planner.traced_requests import traffic_of
from baton.planner.traces import TraceRequest
from baton.simulation.capacity.layout import Layout, Objectives
from baton.simulation.capacity.live_advice import WARM_SHARE, MeasuredFleet, Times, simulated
from benchmarks.figures.report import Figure, at_most, parser, progress, report
from benchmarks.fleets.sleeping_fleet import LayoutRun, measure

ERROR_LIMIT, REGRET_LIMIT = 0.08, 0.03
TIMING = TimingModel("sleeping", 256.0, ChunkTiming(0.04, 5e-4), StepTiming(0.05, 2e-3))
SIZE = Layout(
    colocated=1, pool_tokens=65_536, chunk_tokens=512, local_chunk_tokens=256, max_sequences=64
)
LAYOUTS = (
    *(replace(SIZE, prefill=each, decode=4 - each, colocated=0) for each in (1, 2, 3)),
    replace(SIZE, colocated=4),
)
MEASURED = LAYOUTS[1]
QUICK_REQUESTS, ROUNDS = 60, 2


@dataclass(frozen=True, slots=True)
class Mix:
    name: str
    traffic: str
    objectives: Objectives


MIXES = (
    Mix(
        "prompts",
        "requests=240,rate=4,prompt=lognormal:450:0.5,output=constant:12",
        Objectives(1.2, 0.08),
    ),
    Mix(
        "outputs",
        "requests=240,rate=4,prompt=lognormal:110:0.3,output=constant:80",
        Objectives(1.0, 0.075),
    ),
    Mix(
        "mixed",
        "requests=300,rate=5,prompt=lognormal:250:0.6,output=exponential:40",
        Objectives(1.0, 0.08),
    ),
)


@dataclass(frozen=True)
class MixOutcome:
    """One mix: by layout, the predicted times and the measured shares of good requests, one entry a
    round."""

    mix: Mix
    predicted_rounds: dict[Layout, list[Times]]
    measured_rounds: dict[Layout, list[float]]

    @cached_property
    def predicted(self) -> dict[Layout, Times]:
        """Return the median of each predicted time and share."""
        return {layout: middle_of(found) for layout, found in self.predicted_rounds.items()}

    @cached_property
    def measured(self) -> dict[Layout, float]:
        """Return the median of each measured share."""
        return {layout: median(found) for layout, found in self.measured_rounds.items()}

    @property
    def error(self) -> float:
        """Return the largest difference of two shares."""
        return max(
            abs(times.good_share - self.measured[layout])
            for layout, times in self.predicted.items()
        )

    @property
    def advised(self) -> Layout:
        """Return the layout with the best prediction; of equal ones the one that ends sooner."""

        def rank(layout: Layout) -> tuple[float, float]:
            times = self.predicted[layout]
            return -times.good_share, times.end_s

        return min(self.predicted, key=rank)

    @property
    def regret(self) -> float:
        """Return what the best layout has more than the advised one, relative."""
        own = self.measured[self.advised]
        return max(self.measured.values()) / own - 1 if own else float("inf")


def predictions(fleet: MeasuredFleet) -> dict[Layout, Times]:
    """Return the times of each layout, predicted from what a running fleet records."""
    traffic = traffic_of(fleet.requests)
    known = fleet.layout
    return {
        layout: simulated(
            fleet,
            replace(layout, block_tokens=known.block_tokens, pool_tokens=known.pool_tokens),
            fleet.fit.model,
            traffic,
        )
        for layout in LAYOUTS
    }


def good_share(run: LayoutRun, objectives: Objectives) -> float:
    """Return the share of good requests without those of the beginning, as predictions have it."""
    warm = int(WARM_SHARE * len(run.measurements))
    return replace(run, measurements=run.measurements[warm:]).good_share(objectives)


def outcome(mix: Mix, traffic: Sequence[TraceRequest], rounds: int) -> MixOutcome:
    """Measure all layouts in rounds; in each, the run of MEASURED predicts."""
    shares: dict[Layout, list[float]] = {layout: [] for layout in LAYOUTS}
    predicted: dict[Layout, list[Times]] = {layout: [] for layout in LAYOUTS}
    seconds = traffic[-1].arrived_s
    for number in range(1, rounds + 1):
        for layout in LAYOUTS:
            progress(f"{mix.name}, round {number} of {rounds}: {layout.name}, {seconds:.0f} s")
            run = measure(layout, TIMING, traffic, mix.objectives)
            shares[layout].append(good_share(run, mix.objectives))
            if layout is MEASURED:
                for other, times in predictions(run.fleet).items():
                    predicted[other].append(times)
    return MixOutcome(mix, predicted, shares)


def middle_of(found: Sequence[Times]) -> Times:
    """Return the median of each time and share."""
    return Times(*(median(column) for column in zip(*map(astuple, found), strict=True)))


def figures_of(outcomes: Sequence[MixOutcome]) -> list[Figure]:
    """Return the figures: one for each mix and layout, and the two that are judged."""
    figures = []
    for each in outcomes:
        for layout, times in each.predicted.items():
            name = f"{each.mix.name}_{layout.name.replace(', ', '_').replace(' ', '_')}"
            advised = ", advised" if layout is each.advised else ""
            predicted = [one.good_share for one in each.predicted_rounds[layout]]
            beside = (
                f"{range_of(each.measured_rounds[layout])}; predicted {times.good_share:.3f}, "
                f"{range_of(predicted)}{advised}"
            )
            figures.append(Figure(name, each.measured[layout], "", beside))
    worst = max(each.regret for each in outcomes)
    return [
        *figures,
        at_most("prediction_error_worst", max(each.error for each in outcomes), ERROR_LIMIT),
        at_most("advice_regret", worst, REGRET_LIMIT),
    ]


def range_of(rounds: Sequence[float]) -> str:
    return f"{min(rounds):.3f} to {max(rounds):.3f}"


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--quick", action="store_true", help=f"{QUICK_REQUESTS} requests of each mix")
    made.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    options = made.parse_args()
    outcomes = []
    for mix in MIXES:
        traffic = draw_trace(mix.traffic)
        if options.quick:
            traffic = traffic[:QUICK_REQUESTS]
        outcomes.append(outcome(mix, traffic, options.rounds))
    report(figures_of(outcomes), options.json)


if __name__ == "__main__":
    main()
