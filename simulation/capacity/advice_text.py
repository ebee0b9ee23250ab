"""Advice in sentences, as a table, and as JSON for the console. Each finding is one sentence on why
TTFT or ITL is as it is, or on what to change; numbers are measured unless it says "simulated"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from baton.planner.timing_model import StepWork
from baton.planner.traced_requests import TracedRequest
from baton.simulation.capacity.layout import Objectives
from baton.simulation.capacity.live_advice import (
    ATTAINMENT,
    TRUSTED_ERROR,
    Alternative,
    FleetAdvice,
    MeasuredFleet,
    Times,
)
from baton.simulation.capacity.ratio_steps import RatioStep, ratio_steps

Level = Literal["good", "notice", "bad"]
CAUSE_WORDS = {
    "queue": "the wait for a worker's step",
    "compute": "the computation of the prompt",
    "credit": "the wait for KV room on a decode worker",
    "cached read": "the READ of KV that another worker holds",
    "rest": "the router and messages",
}
LEAST_SHARE = 0.05  # of the TTFT, for a cause to be named


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    text: str


def findings(fleet: MeasuredFleet, advice: FleetAdvice) -> list[Finding]:
    """Return the causes of TTFT and ITL, then the recommendation."""
    measured, goals = advice.measured, fleet.objectives
    return [
        Finding(_level(measured.ttft_p99_s, goals.ttft_s), _ttft_text(fleet, measured)),
        Finding(_level(measured.gap_p99_s, goals.itl_s), _itl_text(fleet, measured)),
        *_recommendations(advice, goals),
        *_guess(advice, goals),
    ]


def advice_json(fleet: MeasuredFleet, advice: FleetAdvice, at_s: float) -> dict[str, Any]:
    """Return what the console shows; `at_s` is of time.time()."""
    first, last = fleet.requests[0], fleet.requests[-1]
    window_s = last.begun_wall_s - first.begun_wall_s
    shown = [advice.now, *_with_ranges(advice)]
    return {
        "time": at_s,
        "requests": len(fleet.requests),
        "window_s": round(window_s, 1),
        "error": round(advice.error, 4),
        "findings": [asdict(each) for each in findings(fleet, advice)],
        "ratios": [_ratio_row(each, len(fleet.requests), window_s) for each in ratio_steps(advice)],
        "alternatives": [_row(each) for each in shown],
    }


def advice_table(fleet: MeasuredFleet, advice: FleetAdvice) -> str:
    """Return findings and the simulated changes as lines of text."""
    lines = [each.text for each in findings(fleet, advice)]
    lines += ["", f"{'simulated':<44}{'good':>7}{'TTFT':>10}{'p99':>10}{'ITL':>9}{'p99':>9}"]
    for each in (advice.now, *advice.alternatives):
        times = each.times
        lines.append(
            f"{each.change.name:<44}{times.good_share:>7.1%}{_ms(times.ttft_s):>10}"
            f"{_ms(times.ttft_p99_s):>10}{_ms(times.gap_s):>9}{_ms(times.gap_p99_s):>9}"
        )
    measured = advice.measured
    lines.append(
        f"{'measured':<44}{measured.good_share:>7.1%}{_ms(measured.ttft_s):>10}"
        f"{_ms(measured.ttft_p99_s):>10}{_ms(measured.gap_s):>9}{_ms(measured.gap_p99_s):>9}"
    )
    return "\n".join(lines)


def _with_ranges(advice: FleetAdvice) -> list[Alternative]:
    """Return the alternatives, the recommended ones with their range."""
    ranged = {id(each.change): each for each in (advice.recommended, advice.growth) if each}
    return [ranged.get(id(each.change), each) for each in advice.alternatives]


def _row(found: Alternative) -> dict[str, Any]:
    change = found.change
    return {
        "kind": change.kind,
        "change": change.name,
        "how": change.how,
        **{name: round(value, 5) for name, value in asdict(found.times).items()},
        "low": found.low,
        "high": found.high,
    }


def _ratio_row(found: RatioStep, requests: int, window_s: float) -> dict[str, Any]:
    share = found.good_share
    rate = requests / window_s if window_s else 0.0
    goodput = None if share is None else round(share * rate, 4)
    return {**asdict(found), "goodput_per_s": goodput}


def _level(p99_s: float, objective_s: float) -> Level:
    return "bad" if p99_s > objective_s else "notice"


def _ttft_text(fleet: MeasuredFleet, measured: Times) -> str:
    shares = ttft_shares(fleet.requests)
    named = [
        f"{share:.0%} {CAUSE_WORDS[cause]}"
        for cause, share in sorted(shares.items(), key=lambda item: -item[1])
        if share >= LEAST_SHARE
    ]
    return (
        f"TTFT is {_ms(measured.ttft_s)} in the mean, p99 {_ms(measured.ttft_p99_s)}"
        f"{_objective(fleet.objectives.ttft_s)}: {', '.join(named)}."
    )


def ttft_shares(requests: Sequence[TracedRequest]) -> dict[str, float]:
    """Return the share of each cause in the sum of all TTFTs."""
    total = sum(each.ttft_s for each in requests) or 1.0
    return {cause: sum(each.causes[cause] for each in requests) / total for cause in CAUSE_WORDS}


def _itl_text(fleet: MeasuredFleet, measured: Times) -> str:
    """Describe the mean time between tokens by the parts of a decode step at the mean batch, which
    is Little's law: as many sequences as are between their first and their last token."""
    model, requests = fleet.fit.model, fleet.requests
    decoding_s = sum(each.mean_gap_s * (each.output_tokens - 1) for each in requests)
    window_s = requests[-1].begun_wall_s - requests[0].begun_wall_s
    workers = fleet.layout.decode + fleet.layout.colocated
    batch = max(1.0, decoding_s / window_s / workers) if window_s else 1.0
    context = sum(each.prompt_tokens + each.output_tokens / 2 for each in requests) / len(requests)
    parts = {
        "the fixed part of a step": model.step.fixed_s,
        "its sequences": model.step.per_sequence_s * batch,
        "their context": model.attention.per_context_token_s * batch * context,
    }
    step_s = model.step_s(StepWork(sequences=round(batch), context_tokens=batch * context))
    beside_s = measured.gap_s - step_s
    if beside_s > LEAST_SHARE * measured.gap_s:
        beside = "prompts in the same steps and waits" if fleet.layout.colocated else "waits"
        parts[beside] = beside_s
    named = ", ".join(
        f"{_ms(seconds)} {name}"
        for name, seconds in sorted(parts.items(), key=lambda item: -item[1])
        if seconds > LEAST_SHARE * measured.gap_s
    )
    return (
        f"ITL is {_ms(measured.gap_s)} in the mean of a request, p99 {_ms(measured.gap_p99_s)}"
        f"{_objective(fleet.objectives.itl_s)}, with {batch:.1f} sequences in a step: {named}."
    )


def _objective(seconds: float) -> str:
    return "" if math.isinf(seconds) else f" (objective {_ms(seconds)})"


def _recommendations(advice: FleetAdvice, goals: Objectives) -> list[Finding]:
    off = f"the simulated fleet as it is differs by {advice.error:.0%} from what was measured"
    if not advice.trusted:
        text = f"No recommendation: {off}, and {TRUSTED_ERROR:.0%} is the most."
        return [Finding("notice", text)]
    found = [each for each in (advice.recommended, advice.growth) if each is not None]
    if not found:
        well = advice.now.times.good_share >= ATTAINMENT or goals == Objectives()
        text = (
            f"Change nothing: no ratio, chunk, batch, pool or further worker gains enough ({off})."
        )
        return [Finding("good" if well else "notice", text)]
    return [
        Finding("bad", f"{_imperative(each)}: {_gain(each, advice.now, goals)}; {off}.")
        for each in found
    ]


def _gain(best: Alternative, now: Alternative, goals: Objectives) -> str:
    times = f"simulated TTFT {_ms(now.times.ttft_s)} → {_ms(best.times.ttft_s)}, "
    times += f"ITL {_ms(now.times.gap_s)} → {_ms(best.times.gap_s)}"
    if goals == Objectives():
        return times
    spread = f" ({best.low:.0%} to {best.high:.0%})" if best.low != best.high else ""
    return (
        f"requests within the objectives {now.times.good_share:.0%} → "
        f"{best.times.good_share:.0%}{spread}, {times}"
    )


def _guess(advice: FleetAdvice, goals: Objectives) -> list[Finding]:
    """Return what speculation would bring, where that would be much."""
    found = [each for each in advice.alternatives if each.change.kind == "guess"]
    if not advice.trusted or not found or advice.measured.gap_s <= 0:
        return []
    (guess,) = found
    late = advice.measured.gap_p99_s > goals.itl_s
    if not late or guess.times.gap_s > 0.9 * advice.now.times.gap_s:
        return []
    text = (
        f"Try {guess.change.how}: if a step then brings 1.5 tokens, which only your traffic can "
        f"show, simulated ITL {_ms(advice.now.times.gap_s)} → {_ms(guess.times.gap_s)}."
    )
    return [Finding("notice", text)]


def _imperative(found: Alternative) -> str:
    change = found.change
    if change.kind == "order":
        return f"Make it {change.name} ({change.how})"
    if change.kind == "setting":
        return f"Restart with {change.how} ({change.name})"
    return f"{change.how[0].upper()}{change.how[1:]} ({change.name})"


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
