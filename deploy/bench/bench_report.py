"""The report of a run: latencies, throughput, goodput and errors, as a table or JSON.

Latencies are those of requests that finished, and count from the intended send time. Requests of
the warm-up are in no figure. Goodput counts all others, failed ones as not good.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from baton.deploy.bench.answer import UNFINISHED, Measurement
from baton.deploy.bench.bench_run import BenchResult
from baton.planner.latency import Latency, latency_lines, latency_of
from baton.simulation.capacity.layout import Objectives

LAG_SHARE = 0.03  # of the median TTFT; a send lag above it is reported


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Rates are of the time from the first intended sending to the last end. `prompt_tokens` and
    `output_tokens` are those of finished requests, as the server counts them, or chunks of text
    where it does not (`tokens_from`). `errors`: requests by kind; `messages`: one of each."""

    server: str
    model: str
    load: str
    requests: int
    finished: int
    unfinished: int
    interrupted: bool
    errors: dict[str, int]
    messages: dict[str, str]
    retry_after: int  # refusals that say when to come back
    seconds: float
    requests_per_s: float
    prompt_tokens: int
    wanted_prompt_tokens: int  # of the same requests
    output_tokens: int
    wanted_output_tokens: int
    output_tokens_per_s: float
    tokens_from: str
    ttft_s: Latency | None
    itl_s: Latency | None  # between chunks of text
    tpot_s: Latency | None  # mean time between the tokens of a request
    e2e_s: Latency | None
    send_lag_s: Latency | None
    objectives: dict[str, float]
    goodput_per_s: float
    good_share: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def make_report(
    result: BenchResult, objectives: Objectives, *, server: str, model: str, load: str
) -> BenchReport:
    """Return the report of a run. Requests that its end left unfinished count for nothing."""
    measured = measured_requests(result)
    ended = [each for each in measured if each.error != UNFINISHED]
    finished = [each for each in ended if each.error is None]
    failed = [each for each in ended if each.error is not None]
    causes = [(each.error, each.message) for each in ended if each.error is not None]
    start_s = min((each.intended_s for each in measured), default=0.0)
    seconds = max((each.end_s for each in measured), default=0.0) - start_s
    good = sum(is_good(each, objectives) for each in finished)
    output = sum(each.tokens for each in finished)
    counted = all(each.output_tokens is not None for each in finished)
    streamed = [each for each in finished if each.chunks]
    return BenchReport(
        server=server,
        model=model,
        load=load,
        requests=len(ended),
        finished=len(finished),
        unfinished=len(measured) - len(ended),
        interrupted=result.interrupted,
        errors=dict(Counter(error for error, _ in causes).most_common()),
        messages=dict(reversed(causes)),
        retry_after=sum(each.retry_after_s is not None for each in failed),
        seconds=seconds,
        requests_per_s=_rate(len(finished), seconds),
        prompt_tokens=sum(each.prompt_tokens or 0 for each in finished),
        wanted_prompt_tokens=sum(each.asked.prompt_tokens for each in finished),
        output_tokens=output,
        wanted_output_tokens=sum(each.asked.output_tokens for each in finished),
        output_tokens_per_s=_rate(output, seconds),
        tokens_from="usage" if counted else "chunks",
        ttft_s=latency_of(each.ttft_s for each in streamed),
        itl_s=latency_of(gap for each in streamed for gap in each.gaps_s),
        tpot_s=latency_of(each.mean_gap_s for each in streamed if each.tokens > 1),
        e2e_s=latency_of(each.e2e_s for each in finished),
        send_lag_s=latency_of(each.send_lag_s for each in ended if not math.isnan(each.sent_s)),
        objectives={name: value for name, value in asdict(objectives).items() if value < math.inf},
        goodput_per_s=_rate(good, seconds),
        good_share=good / len(ended) if ended else 0.0,
    )


def measured_requests(result: BenchResult) -> list[Measurement]:
    """Return the requests after the warm-up."""
    return [each for each in result.measurements if not each.warm_up]


def is_good(measurement: Measurement, objectives: Objectives) -> bool:
    """Return whether a request finished and met all objectives. One that was not streamed has its
    whole time for its TTFT."""
    first_s = measurement.ttft_s if measurement.chunks else measurement.e2e_s
    return measurement.error is None and objectives.met_by(first_s, measurement.mean_gap_s)


def bench_table(report: BenchReport) -> str:
    """Return the report as lines of text."""
    unfinished = f", {report.unfinished} unfinished" if report.unfinished else ""
    lines = [
        f"server          {report.server}, model {report.model}",
        f"load            {report.load}" + (", interrupted" if report.interrupted else ""),
        f"requests        {report.finished} of {report.requests} finished{unfinished}",
        f"time            {report.seconds:.1f} s, {report.requests_per_s:.3f} requests per s",
        f"prompts         {report.prompt_tokens} tokens, {report.wanted_prompt_tokens} wanted",
        f"output          {report.output_tokens} tokens, {report.wanted_output_tokens} wanted, "
        f"{report.output_tokens_per_s:.1f} per s",
        f"goodput         {report.goodput_per_s:.3f} per s, {report.good_share:.1%} of requests",
    ]
    for kind, count in report.errors.items():
        lines.append(f"error           {count} {kind}: {report.messages[kind]}")
    if report.retry_after:
        lines.append(f"retry-after     in {report.retry_after} refusals")
    latencies = {
        "TTFT": report.ttft_s,
        "ITL": report.itl_s,
        "TPOT": report.tpot_s,
        "E2E": report.e2e_s,
        "send lag": report.send_lag_s,
    }
    return "\n".join([*lines, "", *latency_lines(latencies), *_remarks(report)])


def _remarks(report: BenchReport) -> list[str]:
    remarks = []
    if report.tokens_from == "chunks":
        remarks.append("the server does not report its usage: a chunk counts as a token")
    lag, ttft = report.send_lag_s, report.ttft_s or report.e2e_s
    if lag and ttft and lag.p99 > LAG_SHARE * ttft.p50:
        remarks.append(
            f"requests were sent late: {1000 * lag.p99:.1f} ms at p99 are this client's, and are "
            "in the latencies; a lower rate or idle cores reduce them"
        )
    return ["", *remarks] if remarks else []


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
