"""Explains a placement: the cost of each worker in its parts, and why the prompt goes where.

Pure, from the same roster and the same costs as placement.py. Places nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.router.fleet.placement import FleetView, Placement, PlacementInput
from baton.router.fleet.placement_costs import (
    DecodeCosts,
    DecodeParts,
    LocalPrefill,
    PrefillCosts,
    PrefillParts,
)
from baton.router.fleet.request_need import Need
from baton.router.fleet.worker_view import WorkerView, hands_over
from baton.runtime.worker.kv_bridge import most_targets

UNIT = "s"
MAX_SHOWN = 64  # workers of a role, the cheapest


@dataclass(frozen=True, slots=True)
class WorkerCost:
    """The cost of a request on one worker, in microseconds: `cost_us` is the sum of its `parts`.
    `uncached_tokens` of its prompt are not there. `obstacle` is why the worker gets no such request
    now; None: it may get it."""

    worker_id: str
    cost_us: int
    parts: DecodeParts | PrefillParts
    uncached_tokens: int
    queued_tokens: int
    running: int
    waiting: int
    room_tokens: int
    obstacle: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """`local_us` and `remote_us` are the predicted times of the prompt's prefill on the chosen
    decode worker and on the best prefill worker, with its transfer; `remote_us` is None without a
    candidate. Workers are sorted by cost, at most MAX_SHOWN of a role. `timing` names the model of
    which the chosen decode worker's times are."""

    placement: Placement
    prompt_tokens: int
    local_us: int
    remote_us: int | None
    timing: str
    decode: Sequence[WorkerCost]
    prefill: Sequence[WorkerCost]


def explain(given: PlacementInput, placement: Placement) -> Explanation:
    """Return the costs behind a placement and what it was made from."""
    need, fleet = given.need, given.fleet
    chosen = placement.decode
    costs = placement.costs or PrefillCosts(need, fleet.deferred, chosen.kv_format)
    views = {view.worker_id: view for view in fleet.roster.views()}
    lacks = {name: given.uncached(view) for name, view in views.items()}
    prefill = []
    for name, view in views.items():
        if view.role == "prefill":
            obstacle = _obstacle(view, fleet) or _prefill_obstacle(view, chosen, need)
            prefill.append(_cost(view, costs.parts(view, lacks[name]), lacks[name], obstacle))
    usable = [each for each in _sorted(prefill) if each.obstacle is None]
    there = None
    if placement.candidates or usable:  # candidates may be workers that are passed over
        best = placement.candidates[0].worker_id if placement.candidates else usable[0].worker_id
        there = costs.remote(views[best], lacks[best])
    decode = []
    takes = {name for group in given.groups for name in group.open}
    configured = placement.reason == "configured"
    for name, view in views.items():
        if view.role == "decode":
            refused = None if name in takes else "full, or too small for this request"
            used = None if configured and placement.local else there
            all_costs = DecodeCosts.of(
                need, view.costs, lacks[name], used, auto=not configured, deferred=fleet.deferred
            )
            parts, obstacle = all_costs.parts(view), _obstacle(view, fleet) or refused
            decode.append(_cost(view, parts, lacks[name], obstacle))
    here, wait_us = lacks[chosen.worker_id], 0 if there is None else there.wait_us
    return Explanation(
        placement=placement,
        prompt_tokens=need.tokens,
        local_us=LocalPrefill.of(chosen.costs, need, here).total_us(chosen, wait_us),
        remote_us=None if there is None else there.total_us(here),
        timing=chosen.costs.timing.name,
        decode=_sorted(decode)[:MAX_SHOWN],
        prefill=_sorted(prefill)[:MAX_SHOWN],
    )


def _cost(
    view: WorkerView, parts: DecodeParts | PrefillParts, uncached: int, obstacle: str | None
) -> WorkerCost:
    return WorkerCost(
        worker_id=view.worker_id,
        cost_us=sum(parts),
        parts=parts,
        uncached_tokens=uncached,
        queued_tokens=view.queue_tokens,
        running=view.running,
        waiting=view.queued_requests,
        room_tokens=view.room_tokens,
        obstacle=obstacle,
    )


def _obstacle(view: WorkerView, fleet: FleetView) -> str | None:
    if view.draining:
        return "draining"
    return "its circuit is open" if view.boot_id in fleet.passed_over else None


def _prefill_obstacle(view: WorkerView, decode: WorkerView, need: Need) -> str | None:
    """Return why `decode` cannot use this prefill worker for the request."""
    if not hands_over(view.kv_format, decode.kv_format):
        return "another KV format than the decode worker's"
    targets = most_targets(view.kv_format[1], decode.kv_format[1])
    room = min(view.total_blocks // (1 + targets) * view.block_size, view.max_context)
    return f"its pool holds {room} tokens" if need.tokens > room else None


def _sorted(costs: Sequence[WorkerCost]) -> list[WorkerCost]:
    def order(each: WorkerCost) -> tuple[bool, int, str]:
        return each.obstacle is not None, each.cost_us, each.worker_id

    return sorted(costs, key=order)


def explained(explanation: Explanation) -> dict[str, object]:
    """Return the body for one prompt. It holds sizes and the names of workers, no text."""
    placement, remote_us = explanation.placement, explanation.remote_us
    return {
        "decision": "local" if placement.local else "disaggregated",
        "reason": placement.reason,
        "prompt_tokens": explanation.prompt_tokens,
        "decode_worker": placement.decode.worker_id,
        "prefill_candidates": [worker.worker_id for worker in placement.candidates],
        "read_from": placement.source.worker.worker_id if placement.source else None,
        "timing": explanation.timing,
        "prefill_cost": {
            "here": explanation.local_us / 1e6,
            "remote": None if remote_us is None else remote_us / 1e6,
            "unit": UNIT,
        },
        "decode_costs": {"unit": UNIT, "workers": [_row(each) for each in explanation.decode]},
        "prefill_costs": {"unit": UNIT, "workers": [_row(each) for each in explanation.prefill]},
    }


def _row(cost: WorkerCost) -> dict[str, Any]:
    parts = cost.parts._asdict()
    return {
        "worker_id": cost.worker_id,
        "cost": cost.cost_us / 1e6,
        "parts": {name.removesuffix("_us"): us / 1e6 for name, us in parts.items()},
        "uncached_tokens": cost.uncached_tokens,
        "queued_tokens": cost.queued_tokens,
        "running": cost.running,
        "waiting": cost.waiting,
        "room_tokens": cost.room_tokens,
        "obstacle": cost.obstacle or "",  # the API's text without one
    }
