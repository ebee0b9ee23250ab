"""The console's row for each worker, from its link: state, load, and blocks by state."""

from __future__ import annotations

from typing import Any

from baton.router.fleet.fleet import Fleet
from baton.router.fleet.worker_link import WorkerLink

Row = dict[str, Any]
BLOCK_STATES = ("used", "leased", "pinned", "cached", "quarantined", "free")


def worker_rows(fleet: Fleet) -> dict[str, Row]:
    """Return a row for each worker that the registry names or that is linked, by its id."""
    passed_over = fleet.passed_over()
    return {link.worker_id: _row(link, link.boot_id in passed_over) for link in fleet.links()}


def _row(link: WorkerLink, passed_over: bool) -> Row:
    load = link.load
    state, reason = state_of(link, passed_over)
    return {
        "role": link.record.role,
        "state": state,
        "reason": reason,
        "address": link.record.address,
        "boot": link.boot_id.hex()[:8],
        "running": load.running,
        "waiting": load.waiting,
        "queued_tokens": load.queued_tokens,
        "handoffs": load.fetching,
        "step_ms": round(load.step_ms, 1),
        "degraded": len(load.degraded_peers),
        "blocks": {name: getattr(load.pool, name) for name in (*BLOCK_STATES, "total")},
    }


def state_of(link: WorkerLink, passed_over: bool) -> tuple[str, str]:
    """Return the state of a worker in one word or two, and the reason where there is one."""
    load = link.load
    states = (
        (link.refused_reason is not None, "refused", link.refused_reason or ""),
        (not link.up and link.worker_hello is not None, "lost", ""),
        (not link.up, "not linked", ""),
        (link.hung, "hung", f"its step is {load.overdue_ms / 1000:.1f} s overdue"),
        (link.quiet, "silent", "it sends no heartbeats"),
        (load.draining, "draining", ""),
        (bool(load.not_ready_reason), "not ready", load.not_ready_reason),
        (passed_over, "circuit open", "it failed requests, hung, or was much slower than others"),
    )
    found = ((state, reason) for holds, state, reason in states if holds)
    return next(found, ("ready", ""))
