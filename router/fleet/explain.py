"""Explains a placement: what each worker would cost a request, and why the prompt goes where.

Pure, from the same roster and the same costs as placement.py. Places nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from baton.router.fleet.placement import (
    FleetView,
    Need,
    Placement,
    PrefillCosts,
    decode_cost,
    local_cost,
    uncached_tokens,
    wanted_tokens,
)
from baton.router.fleet.radix_index import Holders
from baton.router.fleet.roster import WorkerGroup
from baton.router.fleet.worker_view import KvFormat, WorkerView, hands_over
from baton.runtime.worker.kv_bridge import most_targets

MAX_SHOWN = 64  # workers of a role, the cheapest
UNIT = "tenths of a prompt token's computation"


@dataclass(frozen=True, slots=True)
class WorkerCost:
    """The cost of a request on one worker. `uncached_tokens` of its prompt are not there.
    `cost` is in tenths of a prompt token's computation; of a prefill worker it counts what it READs
    from the prompt's source. `obstacle` is why the worker gets no such request now; empty: it may
    get it."""

    worker_id: str
    cost: int
    uncached_tokens: int
    queued_tokens: int
    running: int
    waiting: int
    room_tokens: int
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """`local_cost` and `remote_cost` are those of the prompt's prefill on the chosen decode worker
    and on the best prefill worker, in tenths of a prompt token's computation; `remote_cost` is None
    without a candidate. Workers are sorted by cost, at most MAX_SHOWN of a role."""

    placement: Placement
    prompt_tokens: int
    local_cost: int
    remote_cost: int | None
    decode: Sequence[WorkerCost]
    prefill: Sequence[WorkerCost]


def explain(
    need: Need,
    fleet: FleetView,
    open_decode: Sequence[WorkerGroup],
    held: Callable[[KvFormat], Holders],
    placement: Placement,
) -> Explanation:
    """Return the costs behind `placement`, which was made for `need` on the `open_decode` groups
    of this fleet."""
    chosen = placement.decode
    costs = placement.costs or PrefillCosts(need, None, chosen.kv_format)
    takes = {name for group in open_decode for name in group.open}
    decode, prefill = [], []
    views = {view.worker_id: view for view in fleet.roster.views()}
    for view in views.values():
        uncached = uncached_tokens(need, held(view.kv_format).blocks(view), view.capacity)
        if view.role == "decode":
            cost = decode_cost(view, uncached, wanted_tokens(need))
            obstacle = "" if view.worker_id in takes else "full, or too small for this request"
            decode.append(_cost(view, cost, uncached, _obstacle(view, fleet) or obstacle))
        else:
            cost = costs.total(view, uncached)
            obstacle = _prefill_obstacle(view, chosen, need)
            prefill.append(_cost(view, cost, uncached, _obstacle(view, fleet) or obstacle))
    here = uncached_tokens(need, held(chosen.kv_format).blocks(chosen), chosen.capacity)
    remote = None
    usable = [each for each in _sorted(prefill) if not each.obstacle]
    if usable:
        best = placement.candidates[0].worker_id if placement.candidates else usable[0].worker_id
        (there,) = [each.uncached_tokens for each in prefill if each.worker_id == best]
        remote = costs.remote(views[best], here, there)
    return Explanation(
        placement=placement,
        prompt_tokens=need.tokens,
        local_cost=local_cost(here),
        remote_cost=remote,
        decode=_sorted(decode)[:MAX_SHOWN],
        prefill=_sorted(prefill)[:MAX_SHOWN],
    )


def _cost(view: WorkerView, cost: int, uncached: int, obstacle: str) -> WorkerCost:
    return WorkerCost(
        worker_id=view.worker_id,
        cost=cost,
        uncached_tokens=uncached,
        queued_tokens=view.queue_tokens,
        running=view.running,
        waiting=view.queued_requests,
        room_tokens=view.room_tokens,
        obstacle=obstacle,
    )


def _obstacle(view: WorkerView, fleet: FleetView) -> str:
    if view.draining:
        return "draining"
    if view.boot_id in fleet.passed_over:
        return "its circuit is open"
    return "slow start: it has had its share" if view.boot_id in fleet.deferred else ""


def _prefill_obstacle(view: WorkerView, decode: WorkerView, need: Need) -> str:
    """Return why `decode` cannot use this prefill worker for the request."""
    if not hands_over(view.kv_format, decode.kv_format):
        return "another KV format than the decode worker's"
    targets = most_targets(view.kv_format[1], decode.kv_format[1])
    room = min(view.total_blocks // (1 + targets) * view.block_size, view.max_context)
    if need.tokens > room:
        return f"its pool holds {room} tokens"
    return "slow pair with the decode worker" if view.boot_id in decode.degraded else ""


def _sorted(costs: Sequence[WorkerCost]) -> list[WorkerCost]:
    return sorted(costs, key=lambda each: (bool(each.obstacle), each.cost, each.worker_id))


def explained(explanation: Explanation) -> dict[str, object]:
    """Return the JSON of one prompt's explanation: sizes and the names of workers, no text."""
    placement = explanation.placement
    return {
        "decision": "local" if placement.local else "disaggregated",
        "reason": placement.reason,
        "prompt_tokens": explanation.prompt_tokens,
        "decode_worker": placement.decode.worker_id,
        "prefill_candidates": [worker.worker_id for worker in placement.candidates],
        "read_from": placement.source.worker.worker_id if placement.source else None,
        "prefill_cost": {
            "here": explanation.local_cost,
            "remote": explanation.remote_cost,
            "unit": UNIT,
        },
        "decode_costs": {"unit": UNIT, "workers": [asdict(each) for each in explanation.decode]},
        "prefill_costs": {"unit": UNIT, "workers": [asdict(each) for each in explanation.prefill]},
    }
