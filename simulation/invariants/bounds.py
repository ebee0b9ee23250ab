"""The bounds of what a router does about failures: migrations, and workers passed over.

Counts migrations by the calls of the retry budget, and their limit by the configuration and what is
being served; counts workers passed over by role. A worker's failure may cost no more than that.
Sits on the routers of one world, and changes nothing of what happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from baton.router.dispatch.attempt import Attempt
from baton.router.dispatch.retry_budget import HOLD_S, RetryPermit
from baton.router.fleet.worker_link import WorkerLink
from baton.simulation.fleet.world import RouterProcess, World


class Bounds:
    """`breaches` gets a line for each time that a bound is passed."""

    def __init__(self, world: World, breaches: list[str]) -> None:
        self._config = world.config.router
        self._breaches = breaches

    def over_router(self, process: RouterProcess) -> None:
        """Watch a router that has just been started."""
        self._over_budget(process)
        self._over_retries(process)
        self._over_circuits(process)

    def _over_budget(self, process: RouterProcess) -> None:
        """Migrations under way, and those that failed in the last HOLD_S for want of memory or
        else, are no more than its limit."""
        dispatcher, budget = process.dispatcher, process.dispatcher._retries._budget
        take, release, failed = budget.take, budget.release, budget.failed
        under_way: dict[RetryPermit, float] = {}  # when each was taken, on the router's clock
        failures: dict[bool, deque[float]] = {True: deque(), False: deque()}

        def taken(active: int, now_s: float, *, short: bool = False) -> RetryPermit | None:
            move = take(active, now_s, short=short)
            if move is not None:
                under_way[move] = now_s
                counted = (*under_way.values(), *failures[short])
                recent = [at_s for at_s in counted if at_s > now_s - HOLD_S]
                active = len(dispatcher.attempts)
                limit = max(self._config.retry_floor, int(self._config.retry_share * active))
                if len(recent) > limit:
                    self._breaches.append(
                        f"{process.machine.name}: {len(recent)} moves of {limit} in {HOLD_S:g} s"
                    )
            return move

        def released(permit: RetryPermit) -> None:
            under_way.pop(permit, None)
            release(permit)

        def has_failed(permit: RetryPermit, now_s: float, *, short: bool = False) -> None:
            under_way.pop(permit, None)
            failures[short].append(now_s)
            failed(permit, now_s, short=short)

        budget.take = taken  # type: ignore[method-assign]  # wraps this instance alone
        budget.release = released  # type: ignore[method-assign]  # wraps this instance alone
        budget.failed = has_failed  # type: ignore[method-assign]  # wraps this instance alone

    def _over_retries(self, process: RouterProcess) -> None:
        """Every placement after a failure takes a permit of the retry budget."""
        submitter = process.dispatcher._submitter
        try_place = submitter.try_place

        def placed(attempt: Attempt) -> WorkerLink:
            link = try_place(attempt)
            moved = attempt.attempt > 1 and not attempt.drains
            if moved and attempt.permit is None:
                name = attempt.active_request.request_id
                self._breaches.append(f"{process.machine.name}: {name} is moved beside the budget")
            return link

        submitter.try_place = placed  # type: ignore[method-assign]  # wraps this instance alone

    def _over_circuits(self, process: RouterProcess) -> None:
        """A third of a role's workers is passed over at most, or one of two."""
        circuits = process.fleet.circuits
        passed_over = circuits.passed_over

        def passed(fleet: Mapping[bytes, str], now_s: float) -> frozenset[bytes]:
            found = passed_over(fleet, now_s)
            for role in {fleet[boot_id] for boot_id in found}:
                count = sum(fleet[boot_id] == role for boot_id in found)
                workers = sum(other == role for other in fleet.values())
                if count > (1 if workers == 2 else workers // 3):
                    self._breaches.append(
                        f"{process.machine.name}: {count} of {workers} {role} workers passed over"
                    )
            return found

        circuits.passed_over = passed  # type: ignore[method-assign]  # wraps this instance alone
