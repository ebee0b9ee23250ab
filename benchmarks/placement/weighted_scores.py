"""Placement by weighted scores, as endpoint pickers of other systems do it: the baseline.

    score = 3 * cached share of the prompt + 2 * (1 - queue / longest queue) + 2 * (1 - KV in use)

Weights and scores are those of llm-d's default profile (prefix-cache-scorer 3, queue-scorer 2,
kv-cache-utilization-scorer 2): each score is relative to the other workers and knows no time. The
queue is counted in requests, and a prompt is prefilled remotely unless fewer than 64 of its tokens
are missing, as Baton did before. Pure; a `Placer`, as `router.fleet.placement.place`.
"""

from __future__ import annotations

from baton.router.fleet.placement import MAX_CANDIDATES, Placement, PlacementInput
from baton.router.fleet.worker_view import WorkerView

PREFIX_WEIGHT, QUEUE_WEIGHT, KV_WEIGHT = 3.0, 2.0, 2.0
LOCAL_TOKENS = 64


def place_by_scores(given: PlacementInput) -> Placement:
    """Return the workers of the highest scores."""
    uncached = given.uncached

    def ranked(workers: list[WorkerView]) -> list[WorkerView]:
        longest = max((_queue(each) for each in workers), default=0)

        def score(worker: WorkerView) -> float:
            cached = 1 - uncached(worker) / given.need.tokens
            queue = 1 - _queue(worker) / longest if longest else 1.0
            free = worker.free_blocks / worker.total_blocks
            return PREFIX_WEIGHT * cached + QUEUE_WEIGHT * queue + KV_WEIGHT * free

        return sorted(workers, key=lambda each: (-score(each), each.worker_id))

    decode = ranked([view for group in given.groups for view in group.open.values()])[0]
    if given.mode == "local" or (given.mode == "auto" and uncached(decode) < LOCAL_TOKENS):
        return Placement(decode, (), local=True)
    prefill = [v for g in given.fleet.roster.groups("prefill") for v in g.open.values()]
    candidates = tuple(ranked(prefill)[:MAX_CANDIDATES])
    return Placement(decode, candidates, local=not candidates)


def _queue(worker: WorkerView) -> int:
    return worker.running + worker.queued_requests
