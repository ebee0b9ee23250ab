"""Disaggregated against colocated serving on the same two cores: a prefill and a decode worker (D),
or two workers that do both (C), each with its best chunk.

    python -m benchmarks.disaggregation [--rounds N] [--seconds S] [--quick] [--json FILE]
    python -m benchmarks.disaggregation --predict

Real processes of `baton serve`, one thread a worker, with the random bf16 model of 0.45 B
parameters (`--quick`: baton-tiny); placement is `auto`. The client is this process. Traffic and
objectives: traffic_shapes.py. Their seconds are scaled by the idle prefill of 1,500 tokens and by
the decode step of four streams, both measured first: `pace_prompt`, `pace_step`. A round has a
fleet for the streams alone, a D for each objective, which `slo.*` tells it, and chunk, and a C for
each chunk (the objective has no effect on C: every worker does the same); figures are medians of
rounds, with the lowest and highest, and are reported after each.

itl_p99_ratio      ITL p99 of four streams of the strict D with the least chunk, beside bursts of
                   prompts, over theirs beside a bare loop of the same kernels on the other core
                   (fleets/kernel_loop.py): two cores that stream share one memory, whatever is
                   served
itl_p99_over_alone the same over the streams alone; `..._floor` is the loop's; `..._colocated` that
                   of C with the chunk that is best for it
second_token_SHAPE_over_steps
                   p99 of the gap from first to second token of the requests of the strict D whose
                   KV moved, less the transfer that was not hidden, over the p99 of the later gaps
                   of that run
SHAPE_OBJECTIVE    requests that meet the objective, D over C, each with the best chunk for this
                   cell; all rounds together
goodput_ratio_best, goodput_ratio_worst
                   the best of the strict objective's cells, the worst of all. `cells_lost`: below 1
predicted_SHAPE_OBJECTIVE
                   with `--predict`, and nothing else: the cells on virtual time, 20 minutes of it
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np

from baton.deploy.bench.answer import Measurement
from baton.models.embedded import embedded_model
from baton.planner.traces import TraceRequest
from benchmarks.disaggregation.predicted_cells import predicted_cells
from benchmarks.disaggregation.second_token import SecondToken, second_tokens
from benchmarks.disaggregation.traffic_shapes import (
    LONG_TOKENS,
    OBJECTIVES,
    PERIOD_S,
    PROMPT_S,
    SHAPES,
    STEP_S,
    STREAM_PROMPT,
    STRICT,
    Objective,
    Pace,
    stream_gaps,
    streams,
)
from benchmarks.figures.report import Figure, at_least, parser, progress, report
from benchmarks.fleets.kernel_loop import beside_kernel_loop
from benchmarks.fleets.served_fleet import ServedFleet
from benchmarks.inputs.cached_model import cached_model

ITL_LIMIT, BEST_LIMIT, WORST_LIMIT, SECOND_LIMIT = 1.1, 1.5, 0.97, 2.2
CHUNK_TOKENS = 256
LOCAL_CHUNKS = (64, 128, 256)  # beside streams, of D's decode worker and of C
POOL_TOKENS = 8_192  # all of them allocated before the first request
SECONDS, QUICK_SECONDS = 60.0, 12.0
PREDICTED_SECONDS = 1200.0


@dataclass(slots=True)
class ComparisonResults:
    """All measurements. ITL p99 in seconds, one entry a round; good requests of all rounds."""

    pace: Pace | None = None
    alone: list[float] = field(default_factory=list)
    beside_loop: list[float] = field(default_factory=list)
    bursts: list[float] = field(default_factory=list)
    colocated: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    # by shape: the gaps to the second token, and the p99 of the later gaps, of the strict D
    second: dict[str, list[list[SecondToken]]] = field(default_factory=lambda: defaultdict(list))
    later: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    # by shape, D's objective and its chunk, or C's chunk: the requests of each round
    requests: dict[tuple[str, str, int], list[list[Measurement]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    of_chunk: dict[tuple[str, int], list[list[Measurement]]] = field(
        default_factory=lambda: defaultdict(list)
    )


class Comparison:
    """Starts fleets one after the other and sends them their traffic."""

    def __init__(self, model: Path, seconds: float, chunks: Sequence[int]) -> None:
        self._model, self._seconds, self._chunks = model, seconds, chunks
        self._runs = 0
        self.found = ComparisonResults()

    def round(self, number: int) -> None:
        progress(f"round {number}: streams alone")
        with self._disaggregated() as fleet:
            self._warm_up(fleet)
            pace = self._pace(fleet)
            for times, beside in (
                (self.found.alone, nullcontext()),
                (self.found.beside_loop, beside_kernel_loop(self._model, CHUNK_TOKENS)),
            ):
                with beside:
                    asked = streams(self._seconds, pace)
                    times.append(p99(stream_gaps(self._send(fleet, asked))))
        for objective, chunk in product(OBJECTIVES, self._chunks):
            progress(f"round {number}: disaggregated, {objective.name}, chunks of {chunk}")
            self._serve(objective, chunk, pace)
        for chunk in self._chunks:
            progress(f"round {number}: colocated, chunks of {chunk}")
            with self._fleet(0, 2, [f"step.local_prefill_tokens={chunk}"]) as fleet:
                self._warm_up(fleet)
                for shape, traffic in SHAPES.items():
                    requests = self._send(fleet, traffic(self._seconds, pace))
                    self.found.of_chunk[shape, chunk].append(requests)
                    if shape == "bursts":
                        self.found.colocated[chunk].append(p99(stream_gaps(requests)))

    def _serve(self, objective: Objective, chunk: int, pace: Pace) -> None:
        """Send all traffic to a fleet that knows the objective."""
        found, own = self.found, objective.at(pace)
        known = [f"slo.ttft_s={own.ttft_s:.3f}", f"slo.itl_s={own.gap_s:.3f}"]
        known.append(f"step.local_prefill_tokens={chunk}")
        with self._disaggregated(known) as fleet:
            self._warm_up(fleet)
            for shape, traffic in SHAPES.items():
                requests = self._send(fleet, traffic(self._seconds, pace))
                found.requests[shape, objective.name, chunk].append(requests)
                if objective != STRICT or chunk != self._chunks[0]:
                    continue
                found.second[shape].append(second_tokens(fleet.traces()[: len(requests)]))
                found.later[shape].append(p99([s for each in requests for s in each.gaps_s[1:]]))
                if shape == "bursts":
                    found.bursts.append(p99(stream_gaps(requests)))

    def _pace(self, fleet: ServedFleet) -> Pace:
        """Return what the first fleet of all measured."""
        found = self.found
        if found.pace is None:
            found.pace = self._measured_pace(fleet)
            runs = 2 + len(SHAPES) * len(self._chunks) * (len(OBJECTIVES) + 1)
            minutes = runs * self._seconds * found.pace.prompt / 60
            progress(
                f"prompts take {found.pace.prompt:.1f} times as long as in traffic_shapes.py: "
                f"a round takes more than {minutes:.0f} minutes; --seconds shortens it"
            )
        return found.pace

    def _disaggregated(self, known: Sequence[str] = ()) -> ServedFleet:
        chunks = [f"step.chunk_tokens={CHUNK_TOKENS}", f"step.prefill_tokens={CHUNK_TOKENS}"]
        return self._fleet(1, 1, [*chunks, *known])

    def _fleet(self, prefill: int, decode: int, settings: list[str]) -> ServedFleet:
        pool = f"pool.blocks={POOL_TOKENS // 16}"
        return ServedFleet(self._model, prefill, decode, [pool, "pool.block_size=16", *settings])

    def _warm_up(self, fleet: ServedFleet) -> None:
        """Let each worker compute prompts and tokens, and meet its peer."""
        for tokens in (LONG_TOKENS, STREAM_PROMPT):
            self._send(fleet, [TraceRequest(0.0, tokens, 4)] * 4)

    def _measured_pace(self, fleet: ServedFleet) -> Pace:
        (prompt,) = self._send(fleet, [TraceRequest(0.0, LONG_TOKENS, 2)])
        four = stream_gaps(self._send(fleet, streams(PERIOD_S, Pace(1.0, 1.0))))
        return Pace(prompt.ttft_s / PROMPT_S, statistics.median(four) / STEP_S)

    def _send(self, fleet: ServedFleet, requests: list[TraceRequest]) -> list[Measurement]:
        """Send requests with prompts that no run had. Raises RuntimeError if one fails."""
        self._runs += 1
        return fleet.send(requests, self._runs)


def p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))


def cell(found: ComparisonResults, shape: str, objective: Objective) -> Figure:
    """Return the ratio of good requests of all rounds, beside their numbers, the rounds' ratios and
    the objective."""

    def good(rounds: Sequence[Sequence[Measurement]]) -> list[int]:
        return [sum(map(objective.met_by, requests)) for requests in rounds]

    def best(of_chunk: dict[int, list[int]]) -> int:
        return max(of_chunk, key=lambda chunk: sum(of_chunk[chunk]))

    named = shape, objective.name
    rounds = {chunk: each for (*of, chunk), each in found.requests.items() if tuple(of) == named}
    disaggregated = {chunk: good(each) for chunk, each in rounds.items()}
    colocated = {chunk: good(each) for (of, chunk), each in found.of_chunk.items() if of == shape}
    own_chunk, chunk = best(disaggregated), best(colocated)
    own, other = disaggregated[own_chunk], colocated[chunk]
    each = list(map(over, own, other))
    beside = (
        f"{sum(own)} and {sum(other)} of {sum(map(len, rounds[own_chunk]))}, "
        f"chunks {own_chunk} and {chunk}; "
        f"{min(each):.2f} to {max(each):.2f}; {objective.text}"
    )
    return Figure(f"{shape}_{objective.name}", over(sum(own), sum(other)), "", beside)


def over(own: int, other: int) -> float:
    """Return the ratio of two counts; over none it is the count, and 1 if both are none."""
    return own / other if other else float(own or 1)


def ratio(
    name: str,
    above: Sequence[float],
    below: Sequence[float],
    beside: str = "",
    limit: float | None = None,
) -> Figure:
    """Return the median of the rounds' ratios, with their range."""
    each = [a / b for a, b in zip(above, below, strict=True)]
    value = statistics.median(each)
    limited = "" if limit is None else f"limit: at most {limit:g}; "
    return Figure(
        name,
        value,
        "",
        f"{limited}{beside}{min(each):.2f} to {max(each):.2f}",
        None if limit is None else value <= limit,
    )


def figures(found: ComparisonResults) -> list[Figure]:
    """Return the figures of the module's head."""
    assert found.pace is not None
    best = min(found.colocated, key=lambda chunk: statistics.median(found.colocated[chunk]))
    objectives = [each.at(found.pace) for each in OBJECTIVES]
    cells = {(s, o.name): cell(found, s, o) for s in SHAPES for o in objectives}
    values = [each.value for each in cells.values()]
    lost = [each.name for each in cells.values() if each.value < 1]
    strict = max(cells[shape, STRICT.name].value for shape in SHAPES)
    return [
        ratio("itl_p99_ratio", found.bursts, found.beside_loop, limit=ITL_LIMIT),
        ratio("itl_p99_over_alone", found.bursts, found.alone),
        ratio("itl_p99_over_alone_floor", found.beside_loop, found.alone),
        ratio(
            "itl_p99_over_alone_colocated", found.colocated[best], found.alone, f"chunk {best}; "
        ),
        Figure("itl_p99_alone_ms", 1000 * statistics.median(found.alone), "ms"),
        *(each for shape in SHAPES for each in second_token(found, shape)),
        *cells.values(),
        at_least("goodput_ratio_best", strict, BEST_LIMIT),
        at_least("goodput_ratio_worst", min(values), WORST_LIMIT),
        Figure("cells_lost", len(lost), "", ", ".join(lost)),
        Figure(
            "pace_prompt", found.pace.prompt, "", f"times {PROMPT_S:g} s for {LONG_TOKENS} tokens"
        ),
        Figure("pace_step", found.pace.step, "", f"times {1000 * STEP_S:g} ms"),
        Figure("rounds", len(found.bursts)),
    ]


def second_token(found: ComparisonResults, shape: str) -> list[Figure]:
    """Return the gap from first to second token over later ones, and where it went; nothing if the
    KV of no request moved."""
    rounds = zip(found.second[shape], found.later[shape], strict=True)
    moved = [(each, later) for each, later in rounds if each]
    if not moved:
        return []
    own = [p99([one.own_s for one in each]) for each, _ in moved]
    later = [seconds for _, seconds in moved]
    requests = [one for each, _ in moved for one in each]
    name = f"second_token_{shape}"
    return [
        ratio(f"{name}_over_steps", own, later, f"{len(requests)} requests; ", SECOND_LIMIT),
        *(
            Figure(
                f"{name}_{part}_ms",
                1000 * float(np.percentile([getattr(each, f"{part}_s") for each in requests], 50)),
                "ms",
                f"p99 {1000 * p99([getattr(each, f'{part}_s') for each in requests]):.1f}",
            )
            for part in ("transfer", "queue", "step")
        ),
    ]


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--rounds", type=int, default=1)
    made.add_argument("--seconds", type=float, help="of traffic in each run, before its pace")
    made.add_argument("--quick", action="store_true", help="the small embedded model, one chunk")
    made.add_argument("--predict", action="store_true", help="on virtual time alone, in seconds")
    options = made.parse_args()
    if options.predict:
        report(predicted_cells(PREDICTED_SECONDS, LOCAL_CHUNKS), options.json)
        return
    model = embedded_model() if options.quick else cached_model()
    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    comparison = Comparison(model, seconds, LOCAL_CHUNKS[:1] if options.quick else LOCAL_CHUNKS)
    for number in range(1, options.rounds + 1):
        comparison.round(number)
        report(figures(comparison.found), options.json)  # of all rounds so far


if __name__ == "__main__":
    main()
