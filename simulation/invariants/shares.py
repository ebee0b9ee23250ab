"""The share of placements that a worker gets which has joined a running fleet.

    placed on it <= 1 + the sum, over its role's placements, of its growing share of a fair share

Counted for each router, by its links' times, over the first ten seconds, while another worker of
the role, that has been there for longer and is as large, takes work. A request that others have
failed does not count: it goes to a worker that it has not tried.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from baton.router.dispatch.attempt import Attempt
from baton.router.fleet.worker_link import WorkerLink
from baton.router.fleet.worker_view import WorkerView
from baton.simulation.fleet.world import RouterProcess

OVER_S = 10.0
TOGETHER_S = 5.0
MORE = 1.0  # than the bound: one that was placed as its view changed


@dataclass(slots=True)
class _Share:
    late: bool  # the others of its role were there before
    allowed: float = 1.0
    placed: int = 0


class Shares:
    """`breaches` gets a line for each placement beyond the bound."""

    def __init__(self, breaches: list[str]) -> None:
        self._breaches = breaches

    def over_router(self, process: RouterProcess) -> None:
        """Watch a router that has just been started."""
        submitter, fleet = process.dispatcher._submitter, process.fleet
        try_place = submitter.try_place
        shares: dict[tuple[str, float], _Share] = {}

        def placed(attempt: Attempt) -> WorkerLink:
            before = {view.worker_id: view for view in fleet.views()}
            trusted = [e for e in before.values() if e.boot_id not in fleet.passed_over()]
            link = try_place(attempt)
            plain = not (attempt.avoid or attempt.left)
            now_s = asyncio.get_running_loop().time()
            chosen = [before[link.worker_id]]
            chosen += [e for e in before.values() if e.boot_id == attempt.prefill]
            for view in chosen:
                role = [e for e in trusted if e.role == view.role and not e.draining]
                said = self._count(shares, view, role, now_s, plain=plain)
                if said is not None:
                    self._breaches.append(f"{process.machine.name}: {said}")
            return link

        submitter.try_place = placed  # type: ignore[method-assign]  # wraps this instance alone

    def _count(
        self,
        shares: dict[tuple[str, float], _Share],
        chosen: WorkerView,
        role: list[WorkerView],
        now_s: float,
        *,
        plain: bool,
    ) -> str | None:
        first_s = min((view.joined_s for view in role), default=now_s)
        for view in role:
            late = view.joined_s - first_s > TOGETHER_S
            share = shares.setdefault((view.worker_id, view.joined_s), _Share(late))
            share.allowed += min(1.5, 0.1 + 0.14 * (now_s - view.joined_s)) / len(role)
        share = shares.get((chosen.worker_id, chosen.joined_s), _Share(late=False))
        others = [
            view
            for view in role
            if view.capacity == chosen.capacity
            and view.waiting == 0
            and not shares[view.worker_id, view.joined_s].late
        ]
        if not (plain and share.late and others and now_s - chosen.joined_s < OVER_S):
            return None
        share.placed += 1
        if share.placed <= share.allowed + MORE:
            return None
        age_s = now_s - chosen.joined_s
        return (
            f"{chosen.worker_id} joined {age_s:.1f} s ago and got {share.placed} requests of "
            f"{share.allowed:.1f}"
        )
