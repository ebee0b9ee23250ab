"""The report of a simulated fleet: latencies, goodput, utilisation and cost, as a table or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from baton.planner.latency import Latency, latency_lines, latency_of
from baton.planner.timing_model import TimingModel
from baton.simulation.capacity.capacity_fleet import CapacityFleet
from baton.simulation.capacity.decode_stage import DecodeStage
from baton.simulation.capacity.layout import CapacityScenario, Objectives
from baton.simulation.capacity.prefill_stage import PrefillStage
from baton.simulation.capacity.request_record import RequestRecord
from baton.simulation.capacity.use_over_time import mean_use


@dataclass(frozen=True, slots=True)
class RoleUse:
    """`busy`: mean share of the time in steps. `most_busy`: of the busiest worker. `most_pool`:
    the largest share of a pool that was held at once. `over_time`: `busy` in windows of
    `window_s`."""

    workers: int
    busy: float
    most_busy: float
    most_pool: float
    window_s: float
    over_time: list[float]


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """Rates are of the time from the first arrival to the last end. `good_share`: requests that
    met all objectives, of all of the trace. `cost_per_million`: of a million output tokens."""

    layout: str
    pool_tokens: int  # of each worker
    timing: str
    requests: int
    finished: int
    refused: dict[str, int]
    seconds: float
    output_tokens: int
    output_tokens_per_s: float
    ttft_s: Latency | None
    itl_s: Latency | None  # of all tokens
    e2e_s: Latency | None
    goodput_per_s: float
    good_share: float
    cached_share: float  # of the prompt tokens of finished requests
    preemptions: int
    roles: dict[str, RoleUse]
    gpus: int
    cost_per_million: float | None
    wall_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def make_report(
    fleet: CapacityFleet, scenario: CapacityScenario, timing: TimingModel, wall_s: float
) -> CapacityReport:
    """Return the report of a fleet of which each request has ended."""
    layout = scenario.layout
    finished = [record for record in fleet.records if record.refused is None]
    seconds = max((record.end_s for record in fleet.records), default=0.0)
    tokens = sum(record.tokens for record in finished)
    good = sum(meets(record, scenario.objectives) for record in finished)
    prompts = sum(record.request.prompt_tokens for record in finished)
    gpus = layout.workers * layout.gpus_per_worker
    cost = scenario.gpu_hour_price * gpus * seconds / 3600
    decode_role = "colocated" if layout.colocated else "decode"
    roles: dict[str, list[PrefillStage | DecodeStage]] = {
        "prefill": [*fleet.prefill.values()],
        decode_role: [*fleet.decode.values()],
    }
    return CapacityReport(
        layout=layout.name,
        pool_tokens=layout.pool_tokens,
        timing=timing.name,
        requests=len(fleet.records),
        finished=len(finished),
        refused=dict(Counter(r.refused for r in fleet.records if r.refused is not None)),
        seconds=seconds,
        output_tokens=tokens,
        output_tokens_per_s=tokens / seconds if seconds else 0.0,
        ttft_s=latency_of([record.ttft_s for record in finished]),
        itl_s=latency_of(fleet.gaps.seconds, fleet.gaps.counts),
        e2e_s=latency_of([record.end_s - record.request.arrived_s for record in finished]),
        goodput_per_s=good / seconds if seconds else 0.0,
        good_share=good / len(fleet.records),
        cached_share=sum(record.cached_tokens for record in finished) / max(1, prompts),
        preemptions=sum(stage.scheduler.preemptions for stage in fleet.decode.values()),
        roles={role: _use(stages, seconds) for role, stages in roles.items() if stages},
        gpus=gpus,
        cost_per_million=cost / tokens * 1e6 if cost and tokens else None,
        wall_s=wall_s,
    )


def meets(record: RequestRecord, objectives: Objectives) -> bool:
    """Return whether a finished request met all objectives."""
    return objectives.met_by(record.ttft_s, record.mean_gap_s)


def _use(stages: Sequence[PrefillStage | DecodeStage], seconds: float) -> RoleUse:
    busy = [stage.busy_s / seconds if seconds else 0.0 for stage in stages]
    pools = [stage.most_held / stage.pool.total for stage in stages]
    window_s, over_time = mean_use([stage.use for stage in stages], seconds)
    mean = sum(busy) / len(busy)
    return RoleUse(len(stages), mean, max(busy), max(pools), window_s, over_time)


def table(report: CapacityReport) -> str:
    """Return the report as lines of text."""
    refused = ", ".join(f"{count} {code}" for code, count in sorted(report.refused.items()))
    lines = [
        f"layout          {report.layout} ({report.gpus} GPUs), timing: {report.timing}",
        f"pool            {report.pool_tokens} tokens of KV a worker",
        f"requests        {report.finished} of {report.requests} finished"
        + (f"; refused: {refused}" if refused else ""),
        f"time            {report.seconds:.1f} s simulated in {report.wall_s:.1f} s",
        f"output          {report.output_tokens} tokens, {report.output_tokens_per_s:.1f} per s",
        f"goodput         {report.goodput_per_s:.3f} per s, {report.good_share:.1%} of requests",
        f"cached          {report.cached_share:.1%} of the prompt tokens",
        f"preemptions     {report.preemptions}",
    ]
    if report.cost_per_million is not None:
        lines.append(f"cost            {report.cost_per_million:.3f} per million output tokens")
    latencies = {"TTFT": report.ttft_s, "ITL": report.itl_s, "E2E": report.e2e_s}
    lines += ["", *latency_lines(latencies)]
    lines += ["", f"{'role':<12}{'workers':>12}{'busy':>12}{'busiest':>12}{'most pool':>12}"]
    for role, use in report.roles.items():
        shares = "".join(f"{each:>12.1%}" for each in (use.busy, use.most_busy, use.most_pool))
        lines.append(f"{role:<12}{use.workers:>12}{shares}")
    return "\n".join(lines)
