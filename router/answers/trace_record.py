"""The record of a request's trace, for the store and for spans: plain values that JSON can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.router.requests.request_trace import RequestTrace
from baton.runtime.telemetry.timeline import Phase

LONG_REFUSAL_S = 1.0  # a refusal that took so long is a failure to its client
WAITS = frozenset({"place", "lost attempt", "lost handoff", "end"})  # phases of a refused request


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a request ended, and its counts of tokens; `trace_id` is that of a collector's trace, if
    it has one."""

    request_id: str
    outcome: str
    seconds: float  # from its first byte
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    migrations: int
    trace_id: str | None = None


def trace_record(trace: RequestTrace, end: RequestEnd, kept: list[str]) -> dict[str, Any]:
    """Return the record. `path` are the phases of the critical path, [name, microseconds, count,
    worker], one after another from the first byte; `after` those from the first token on, which
    reached the router `after_us` after the first byte. `offers` are the blocks of the handoff,
    [begin, landed, verified, blocks], in microseconds from the first byte; `hidden_us` for how long
    each was hidden behind the prefill: the rest of it is in `after`. `ttft_s` is None where no part
    of an answer was sent. `prompt_blocks` are the tokens that a name of the prompt's blocks stands
    for, and these names in hex, one after the other. `kept` is why a collector gets it whatever its
    sample ratio is."""
    after = trace.after
    return {
        "id": end.request_id,
        "trace_id": end.trace_id or "",  # the API's text without one
        "time": round(trace.begun_wall_s, 6),
        "ttft_s": round(trace.path.seconds, 6) if trace.answered else None,
        "total_s": round(end.seconds, 6),
        "outcome": end.outcome,
        "kept": kept,
        "prompt_tokens": end.prompt_tokens,
        "output_tokens": end.output_tokens,
        "cached_tokens": end.cached_tokens,
        "migrations": end.migrations,
        "preempted": trace.preempted,
        "decode_worker": trace.worker,
        "path": [_row(phase) for phase in trace.path.phases],
        "after_us": _us(after.begun_s - trace.begun_s) if after is not None else 0,
        "after": [_row(phase) for phase in after.phases] if after is not None else [],
        "offers": [
            [_us(each.begin_s), _us(each.landed_s), _us(each.verified_s), each.blocks]
            for each in trace.offers
        ],
        "hidden_us": [_us(each.hidden_s) for each in trace.offers],
        "read_bytes": trace.read_bytes,
        "reads": trace.reads,
        "transport": trace.transport,
        "prompt_blocks": [trace.named_tokens, trace.block_names.hex()],
    }


def reasons_to_keep(trace: RequestTrace, end: RequestEnd, *, slow: bool) -> list[str]:
    """Return why a collector should have the trace, whatever its sample ratio is."""
    reasons = {
        "slow": slow,
        "failed": end.outcome == "failed" or refused_late(trace, end),
        "migrated": end.migrations > 0,
        "preempted": trace.preempted,
    }
    return [reason for reason, holds in reasons.items() if holds]


def refused_late(trace: RequestTrace, end: RequestEnd) -> bool:
    """Return whether a request was refused after it had waited for a worker, or on one. One that is
    refused at once was not served: many of them would push out the traces of those that were."""
    waited_s = sum(phase.seconds for phase in trace.path.phases if phase.name in WAITS)
    return end.outcome == "refused" and waited_s >= LONG_REFUSAL_S


def _row(phase: Phase) -> list[str | int]:
    return [phase.name, _us(phase.seconds), phase.count, phase.where]


def _us(seconds: float) -> int:
    return round(1e6 * seconds)
