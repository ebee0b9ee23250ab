"""The console's rows for requests that have not ended, from the dispatcher's attempts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from baton.router.dispatch.attempt import Attempt
from baton.router.fleet.fleet import Fleet

MAX_SHOWN = 40  # of each list, the oldest


def active_requests(attempts: Iterable[Attempt], fleet: Fleet, now_s: float) -> dict[str, Any]:
    """Return the number of attempts by phase, the oldest attempts, and the handoffs among them:
    attempts whose prompt a prefill worker computes, or whose KV is still being read from it."""
    names = {link.boot_id: link.worker_id for link in fleet.links()}
    counts: Counter[str] = Counter()
    shown: list[dict[str, Any]] = []
    handoffs: list[dict[str, Any]] = []
    for attempt in attempts:
        phase = phase_of(attempt)
        counts[phase] += 1
        wanted = phase == "handoff" and len(handoffs) < MAX_SHOWN
        if not wanted and len(shown) >= MAX_SHOWN:
            continue
        row = _row(attempt, phase, names, now_s)
        if len(shown) < MAX_SHOWN:
            shown.append(row)
        if wanted:
            handoffs.append(row)
    return {"phases": dict(counts), "requests": shown, "handoffs": handoffs}


def phase_of(attempt: Attempt) -> str:
    if attempt.link is None:
        return "waiting"
    if attempt.prefill and not attempt.prefilled:
        return "handoff"
    return "decode" if attempt.answered else "prefill"


def _row(attempt: Attempt, phase: str, names: dict[bytes, str], now_s: float) -> dict[str, Any]:
    active_request = attempt.active_request
    return {
        "id": active_request.request_id,
        "phase": phase,
        "age_s": round(now_s - active_request.trace.begun_s, 1),
        "prompt": len(active_request.request.prompt),
        "output": sum(len(choice.accepted) for choice in active_request.choices),
        "decode": attempt.link.worker_id if attempt.link is not None else "",
        "prefill": names.get(attempt.prefill, ""),
        "attempt": attempt.attempt,
        "answered": attempt.answered,
    }
