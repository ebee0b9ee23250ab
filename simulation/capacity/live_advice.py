"""Advice for a fleet that runs: its recent traffic, simulated with one thing changed at a time.

    traces, steps of the workers ─▶ MeasuredFleet ─▶ the fleet as it is ─▶ error against what was
                                                                           measured
                                                  └▶ each change         ─▶ ranked, with its range

Each change names what an operator would do for it. The best order or setting is recommended where
it gains more than the error of the model may hide; another worker where too few requests would meet
the objectives with that; and nothing where the simulation of the fleet as it is differs too much
from what was measured. Pure, but for the time that simulations take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from baton.planner.timing_fit import Fit
from baton.planner.timing_model import StepTiming, TimingModel
from baton.planner.traced_requests import TracedRequest, traffic_of
from baton.planner.traces import TraceRequest
from baton.runtime.config import PlacementMode, RouterConfig
from baton.simulation.capacity.capacity_report import meets
from baton.simulation.capacity.capacity_run import run_fleet
from baton.simulation.capacity.layout import CapacityScenario, Layout, Objectives
from baton.simulation.capacity.request_record import RequestRecord
from baton.simulation.capacity.tuning import timing_error

WARM_SHARE = 0.1  # of the requests, the first ones: the simulated fleet begins empty
MIN_REQUESTS = 20
TRUSTED_ERROR = 0.25  # of the mean TTFT and gap of the fleet as it is
MIN_GAIN = 0.03  # of the share of good requests
ATTAINMENT = 0.9  # of the requests: with fewer within the objectives, a worker more is simulated
MIN_SPEEDUP = 0.1  # of the mean time to a request's end, where there is no objective
DRAFTS, SPECULATED_TOKENS = 2, 1.5  # assumed of speculation: proposals of a step, and its tokens

# How a change is made: by an order, by a setting and a restart, by a worker more; or a guess that
# no measurement supports yet.
Kind = Literal["none", "order", "setting", "worker", "guess"]


@dataclass(frozen=True, slots=True)
class MeasuredFleet:
    """A running fleet as far as it is known: its layout, the timing model of its workers, the
    requests that it served of late, and its objectives. `speculates`: steps verify proposals.
    `narrow_kv`: its KV is stored in 8 bits already. `placement`: of prompts, by its routers."""

    layout: Layout
    fit: Fit
    requests: Sequence[TracedRequest]
    objectives: Objectives
    speculates: bool = False
    narrow_kv: bool = False
    placement: PlacementMode = RouterConfig().placement


@dataclass(frozen=True, slots=True)
class Times:
    """Means and percentiles of some requests, in seconds; `good_share` of them met the objectives,
    refused ones did not."""

    ttft_s: float
    ttft_p99_s: float
    gap_s: float
    gap_p99_s: float
    end_s: float  # mean time from arrival to the last token
    good_share: float


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a fleet: the fleet after it in words, and what an operator does for it."""

    kind: Kind
    name: str
    how: str
    layout: Layout
    timing: TimingModel


@dataclass(frozen=True, slots=True)
class Alternative:
    """A simulated change. `low`, `high`: its share of good requests with all times longer and
    shorter by the error of the timing model; None where that was not simulated."""

    change: Change
    times: Times
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class FleetAdvice:
    """`now` is the fleet as it is, simulated; `alternatives` are sorted, the best first.
    `recommended` is an order or a setting that gains enough, `growth` a worker that gains enough
    beside that. `error`: the larger relative difference between `now` and `measured`, of the mean
    TTFT and the mean gap."""

    measured: Times
    now: Alternative
    alternatives: tuple[Alternative, ...]
    recommended: Alternative | None
    growth: Alternative | None
    error: float

    @property
    def trusted(self) -> bool:
        return self.error <= TRUSTED_ERROR


def advise(
    fleet: MeasuredFleet, progress: Callable[[str], None] = lambda name: None
) -> FleetAdvice:
    """Simulate the fleet and its changes. At least MIN_REQUESTS requests are there. `progress` gets
    the name of each change before it is simulated."""
    traffic = traffic_of(fleet.requests)
    found = []
    for change in changes(fleet):
        progress(change.name)
        times = simulated(fleet, change.layout, change.timing, traffic)
        found.append(Alternative(change, times))
    now = _with_range(fleet, found[0], traffic)
    others = sorted(found[1:], key=lambda each: _rank(each.times))
    measured = measured_times(fleet.requests[_warm(len(traffic)) :], fleet.objectives)
    error = _error(now.times, measured)
    recommended = growth = None
    if error <= TRUSTED_ERROR:
        recommended = _best(fleet, others, ("order", "setting"), now, traffic)
        so_far = recommended or now
        if so_far.times.good_share < ATTAINMENT:
            growth = _best(fleet, others, ("worker",), so_far, traffic)
    return FleetAdvice(measured, now, tuple(others), recommended, growth, error)


def _best(
    fleet: MeasuredFleet,
    sorted_changes: Sequence[Alternative],
    kinds: tuple[Kind, ...],
    now: Alternative,
    traffic: list[TraceRequest],
) -> Alternative | None:
    """Return the first change of these kinds that gains enough over `now`, with its range."""
    for each in sorted_changes:
        if each.change.kind in kinds and _gains(each.times, now.times, fleet.objectives):
            ranged = _with_range(fleet, each, traffic)
            if fleet.objectives == Objectives() or _is_certain(ranged, now):
                return ranged
    return None


def changes(fleet: MeasuredFleet) -> list[Change]:
    """Return the fleet as it is, then each change of it."""
    layout, timing = fleet.layout, fleet.fit.model
    found = [Change("none", "as it is", "", layout, timing)]
    moves = _colocated_moves(layout) if layout.colocated else _role_moves(layout)
    sizes = [*_chunk_changes(layout), *_batch_changes(layout)]
    if not fleet.narrow_kv:
        wider = replace(layout, pool_tokens=2 * layout.pool_tokens)
        sizes.append(("KV in 8 bits, twice the room", "--set pool.kv_dtype=int8", wider))
    found += [Change("order", *each, timing) for each in moves]
    found += [Change("setting", *each, timing) for each in sizes]
    found += [Change("worker", *each, timing) for each in _more_workers(layout)]
    if not fleet.speculates:
        name = f"speculation, if a step brings {SPECULATED_TOKENS:g} tokens"
        how = "--set worker.speculate=ngram"
        found.append(Change("guess", name, how, layout, _speculating(timing)))
    return found


def _colocated_moves(layout: Layout) -> list[tuple[str, str, Layout]]:
    """Return each ratio of prefill to decode workers."""
    found = []
    for prefill in range(1, layout.colocated):
        other = replace(layout, prefill=prefill, decode=layout.colocated - prefill, colocated=0)
        workers = "one worker" if prefill == 1 else f"{prefill} workers"
        found.append((other.name, f"`baton role WORKER prefill` for {workers}", other))
    return found


def _role_moves(layout: Layout) -> list[tuple[str, str, Layout]]:
    """Return the fleet with one worker in the other role, and with all of them colocated."""
    found = []
    for step, role in ((1, "prefill"), (-1, "decode")):
        prefill, decode = layout.prefill + step, layout.decode - step
        if prefill and decode:
            other = replace(layout, prefill=prefill, decode=decode)
            found.append((other.name, f"`baton role WORKER {role}` for one worker", other))
    together = replace(layout, prefill=0, decode=0, colocated=layout.workers)
    how = "`baton role WORKER decode` for each prefill worker"
    return [*found, (together.name, how, together)]


def _more_workers(layout: Layout) -> list[tuple[str, str, Layout]]:
    if layout.colocated:
        more = replace(layout, colocated=layout.colocated + 1)
        return [(more.name, "start one decode worker more", more)]
    prefill = replace(layout, prefill=layout.prefill + 1)
    decode = replace(layout, decode=layout.decode + 1)
    return [
        (prefill.name, "start one prefill worker more", prefill),
        (decode.name, "start one decode worker more", decode),
    ]


def _chunk_changes(layout: Layout) -> list[tuple[str, str, Layout]]:
    """Return half and twice the chunk; one is at least a block."""
    found = []
    for factor in (0.5, 2.0):
        if layout.colocated:
            tokens = int(layout.local_chunk_tokens * factor)
            other = replace(layout, local_chunk_tokens=tokens)
            how = f"--set step.local_prefill_tokens={tokens}"
        else:
            tokens = int(layout.chunk_tokens * factor)
            step = max(tokens, int(layout.prefill_tokens * factor))
            other = replace(layout, chunk_tokens=tokens, prefill_tokens=step)
            how = f"--set step.chunk_tokens={tokens} --set step.prefill_tokens={step}"
        if tokens >= layout.block_tokens:
            found.append((f"chunks of {tokens} tokens", how, other))
    return found


def _batch_changes(layout: Layout) -> list[tuple[str, str, Layout]]:
    """Return half and twice the batch limit."""
    counts = [layout.max_sequences // 2, layout.max_sequences * 2]
    return [
        (
            f"batches of {count} at most",
            f"--set step.max_sequences={count}",
            replace(layout, max_sequences=count),
        )
        for count in counts
        if count
    ]


def _speculating(timing: TimingModel) -> TimingModel:
    """Return the times of a token where each step verifies DRAFTS proposals more a sequence."""
    tokens = SPECULATED_TOKENS
    step, attention = timing.step, timing.attention
    per_sequence_s = step.per_sequence_s * (1 + DRAFTS)
    return replace(
        timing,
        step=StepTiming(step.fixed_s / tokens, per_sequence_s / tokens),
        attention=replace(attention, per_context_token_s=attention.per_context_token_s / tokens),
    )


def _with_range(
    fleet: MeasuredFleet, found: Alternative, traffic: list[TraceRequest]
) -> Alternative:
    error, change, shares = timing_error(fleet.fit.errors), found.change, [found.times.good_share]
    for factor in (1 + error, 1 / (1 + error)):
        times = simulated(fleet, change.layout, change.timing.scaled(factor), traffic)
        shares.append(times.good_share)
    return replace(found, low=min(shares), high=max(shares))


def simulated(
    fleet: MeasuredFleet, layout: Layout, timing: TimingModel, traffic: list[TraceRequest]
) -> Times:
    """Return the times of a layout with this traffic, without the first WARM_SHARE of it."""
    scenario = CapacityScenario(layout, fleet.objectives, placement=fleet.placement)
    records = run_fleet(scenario, timing, traffic).records[_warm(len(traffic)) :]
    return simulated_times(records, fleet.objectives)


def simulated_times(records: Sequence[RequestRecord], objectives: Objectives) -> Times:
    """Return the times of simulated requests."""
    served = [each for each in records if each.refused is None]
    good = sum(meets(each, objectives) for each in served)
    return _times(
        [each.ttft_s for each in served],
        [each.mean_gap_s for each in served if each.tokens > 1],
        [each.end_s - each.request.arrived_s for each in served],
        good / len(records),
    )


def measured_times(requests: Sequence[TracedRequest], objectives: Objectives) -> Times:
    """Return the times of traced requests."""
    good = sum(objectives.met_by(each.ttft_s, each.mean_gap_s) for each in requests)
    return _times(
        [each.ttft_s for each in requests],
        [each.mean_gap_s for each in requests if each.output_tokens > 1],
        [each.ttft_s + each.mean_gap_s * (each.output_tokens - 1) for each in requests],
        good / len(requests),
    )


def _times(
    ttft_s: Sequence[float], gaps_s: Sequence[float], ends_s: Sequence[float], good_share: float
) -> Times:
    return Times(
        *_mean_and_p99(ttft_s), *_mean_and_p99(gaps_s), _mean_and_p99(ends_s)[0], good_share
    )


def _mean_and_p99(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 0.0
    return float(np.mean(values)), float(np.percentile(values, 99))


def _warm(count: int) -> int:
    return int(WARM_SHARE * count)


def _error(simulated: Times, measured: Times) -> float:
    pairs = [(simulated.ttft_s, measured.ttft_s), (simulated.gap_s, measured.gap_s)]
    return max(abs(found / real - 1) if real else 0.0 for found, real in pairs)


def _rank(times: Times) -> tuple[float, float]:
    return -times.good_share, times.end_s


def _gains(times: Times, now: Times, objectives: Objectives) -> bool:
    """Return whether the times after a change are better by more than chance."""
    if objectives == Objectives():
        return times.end_s < (1 - MIN_SPEEDUP) * now.end_s
    return times.good_share >= now.good_share + MIN_GAIN


def _is_certain(ranged: Alternative, now: Alternative) -> bool:
    """Return whether the timing model's error leaves a change no worse than `now`."""
    assert ranged.low is not None and now.low is not None
    return ranged.low >= now.low
