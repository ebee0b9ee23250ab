"""The result of a search as text: the ranking, what to use, and how to set it. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from baton.simulation.capacity.layout import Objectives
from baton.simulation.capacity.tuning import Advice, Search
from baton.simulation.capacity.tuning_candidates import Candidate

MAX_ROWS = 16
Settings = dict[str, int | str | float]


def tuning_table(found: Sequence[Advice], search: Search) -> str:
    """Return the ranking as lines of text, what to use, and how to set it."""
    lines = [
        f"{'layout':<24}{'GPUs':>5}{'prompts':>9}{'chunk':>7}{'local':>7}{'batch':>7}{'good':>8}"
        f"{'range':>15}{'goodput/s':>11}{'TTFT p99':>11}{'ITL p99':>9}{'cost/M':>9}"
    ]
    shown = [each for n, each in enumerate(found) if not any(_equal(each, e) for e in found[:n])]
    lines += [_row(each) for each in shown[:MAX_ROWS]]
    if more := len(found) - len(shown[:MAX_ROWS]):
        lines.append(f"... and {more} more of {len(found)}, equal to these or below them")
    how = how_to_set(named(found, search), search)
    return "\n".join([*lines, "", *_pools(found), verdict(found, search), "", *how])


def _pools(found: Sequence[Advice]) -> list[str]:
    pools = sorted({(each.layout.gpus_per_worker, each.layout.pool_tokens) for each in found})
    return [
        f"pool of a worker with {gpus} GPUs: {pool} tokens of KV (--pool-tokens)"
        for gpus, pool in pools
    ]


def _equal(one: Advice, other: Advice) -> bool:
    """Return whether a setting between two candidates of a layout changed nothing."""
    same = one.report.layout == other.report.layout and one.rank == other.rank
    return same and one.report.ttft_s == other.report.ttft_s


def _row(advice: Advice) -> str:
    report, layout = advice.report, advice.layout
    spread = "-" if advice.low is None else f"{advice.low:.1%}-{advice.high:.1%}"
    cost = "-" if report.cost_per_million is None else f"{report.cost_per_million:.2f}"
    ttft, itl = (
        "-" if each is None else f"{1000 * each.p99:.0f} ms"
        for each in (report.ttft_s, report.itl_s)
    )
    conditional = not layout.colocated and advice.candidate.placement == "auto"
    where = "-" if layout.colocated else ("auto" if conditional else "prefill")
    chunk = "-" if layout.colocated else layout.chunk_tokens
    local = layout.local_chunk_tokens if layout.colocated or conditional else "-"
    return (
        f"{report.layout:<24}{layout.gpus_per_worker:>5}{where:>9}{chunk:>7}{local:>7}"
        f"{layout.max_sequences:>7}{report.good_share:>8.1%}{spread:>15}"
        f"{report.goodput_per_s:>11.3f}{ttft:>11}{itl:>9}{cost:>9}"
    )


def met(found: Sequence[Advice], search: Search) -> bool:
    """Return whether the best candidate meets the objectives for enough requests."""
    return found[0].report.good_share >= search.attainment


def named(found: Sequence[Advice], search: Search) -> Candidate:
    """Return the candidate of the verdict: the best one, or that of the nearest objectives."""
    best = found[0] if met(found, search) else min(found, key=lambda each: each.factor)
    return best.candidate


def verdict(found: Sequence[Advice], search: Search) -> str:
    """Return the layout to use, or the nearest objectives that one could meet."""
    asked, share = _text(search.objectives, 1.0), f"{search.attainment:.0%} of the requests"
    best = found[0].report.layout
    if met(found, search):
        return f"use {best}: {asked} is met by {share} or more"
    nearest = min(found, key=lambda each: each.factor)
    if math.isinf(nearest.factor):
        return f"no layout meets {asked} for {share}: more than the rest are refused by each"
    return (
        f"no layout meets {asked} for {share}; the nearest objective that one meets is "
        f"{_text(search.objectives, nearest.factor)}, by {nearest.report.layout}"
    )


def configuration(candidate: Candidate, search: Search) -> dict[str, Settings]:
    """Return the settings of routers, prefill and decode workers, by their names in
    docs/settings.md. Placement was simulated with the objective for ITL, so routers have it."""
    layout, itl_s = candidate.layout, search.objectives.itl_s
    objective: Settings = {} if math.isinf(itl_s) else {"slo.itl_s": itl_s}
    split: Settings = {"worker.tp": layout.gpus_per_worker} if layout.gpus_per_worker > 1 else {}
    decode: Settings = {**split, "step.max_sequences": layout.max_sequences}
    if layout.colocated or candidate.placement == "auto":
        decode["step.local_prefill_tokens"] = layout.local_chunk_tokens
    if layout.colocated:
        return {"router": {"router.placement": "local", **objective}, "decode": decode}
    steps = layout.steps()
    prefill: Settings = {
        **split,
        "step.chunk_tokens": steps.chunk_tokens,
        "step.prefill_tokens": steps.prefill_tokens,
    }
    return {
        "router": {"router.placement": candidate.placement, **objective},
        "prefill": prefill,
        "decode": decode,
    }


def chart_values(candidate: Candidate, search: Search) -> dict[str, Any]:
    """Return the values of the chart that differ from its defaults: workers, GPUs, settings. A
    chart has one prefill worker at least, so there are none for colocated workers."""
    layout, found = candidate.layout, dict[str, Any]()
    if layout.colocated:
        return found
    counts = {"prefill": layout.prefill, "decode": layout.decode}
    for name, settings in configuration(candidate, search).items():
        ranks = settings.pop("worker.tp", 1)
        found[name] = {"settings": settings}
        if name in counts:
            workers = {"replicas": counts[name], "tp": ranks, "gpu": {"count": ranks}}
            found[name] = {**workers, "settings": settings}
    return found


def how_to_set(candidate: Candidate, search: Search) -> list[str]:
    """Return the flags of `baton serve` and the values of the chart, as lines of text."""
    layout, settings = candidate.layout, Settings()
    for each in configuration(candidate, search).values():
        settings |= each
    decode = layout.decode or layout.colocated
    flags = [f"--prefill {layout.prefill}", f"--decode {decode}"]
    flags += [f"--set {name}={value}" for name, value in settings.items()]
    lines = [f"one host     baton serve {' '.join(flags)}"]
    for name, values in chart_values(candidate, search).items():
        lines.append(f"{'chart' if len(lines) == 1 else '':<12} {name}: {json.dumps(values)}")
    if layout.colocated:
        lines.append("chart        it has one prefill worker at least: no values")
    return lines


def _text(objectives: Objectives, factor: float) -> str:
    parts = [("ttft", objectives.ttft_s), ("itl", objectives.itl_s)]
    return ",".join(
        f"{name}={math.ceil(1000 * seconds * factor - 1e-6)}ms"
        for name, seconds in parts
        if not math.isinf(seconds)
    )
