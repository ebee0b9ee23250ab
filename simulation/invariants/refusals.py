"""Check that a refusing process is full: every refusal is compared with what is there at that
moment.

    refused ─ at its limit ─▶ noted: a request may end with these words
       └───── with room ────▶ a breach

A request that ends as Overloaded with other words was refused by no process known to be full.
Counts tickets and failed moves by itself; of queues it looks at what waits in them. Sits on the
processes of one world, and changes nothing of what happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from baton.decode_worker.sequences import Group
from baton.decode_worker.worker import DecodeWorker
from baton.prefill_worker.prompts import Prompt
from baton.router.dispatch.retry_budget import HOLD_S, RetryPermit
from baton.runtime.errors import Overloaded
from baton.simulation.fleet.history import History
from baton.simulation.fleet.world import RouterProcess, WorkerProcess, World


class Refusals:
    """`breaches` gets a line for each refusal with room."""

    def __init__(self, world: World, breaches: list[str]) -> None:
        self._world = world
        self._breaches = breaches
        self._noted: dict[str, float] = {}  # by words: when a full worker last said them
        self._busy: dict[bytes, float] = {}  # prefill workers' boots: when each was last full

    def explain(self, history: History) -> bool:
        """Whether a process was full that said while it was served what it ended with."""
        return self._noted.get(history.detail, -1.0) >= history.asked_s

    def over(self, process: WorkerProcess) -> None:
        """Watch a worker that has just been started."""
        if isinstance(process.worker, DecodeWorker):
            self._over_line(process, process.worker)
            self._over_fetches(process, process.worker)
        else:
            self._over_prompts(process, process.worker._scheduler)

    def over_router(self, process: RouterProcess) -> None:
        self._over_tickets(process)
        self._over_budget(process)
        self._over_deadlines(process)

    def _judge(self, name: str, error: Overloaded, full: bool) -> None:
        if full:
            self._noted[str(error)] = self._world.loop.world_s
        else:
            self._breaches.append(f"{name} refuses with room: {error}")

    # -- workers --------------------------------------------------------------------------------

    def _over_line(self, process: WorkerProcess, worker: DecodeWorker) -> None:
        line, limit = worker._scheduler.queue, self._world.config.step.max_queue
        check = line.check_room

        def watched() -> None:
            try:
                check()
            except Overloaded as error:
                waiting = sum(group.live for group in line._groups)
                self._judge(process.machine.name, error, waiting >= limit)
                raise

        line.check_room = watched  # type: ignore[method-assign]  # wraps this instance alone

    def _over_prompts(self, process: WorkerProcess, scheduler: Any) -> None:
        submit, limit = scheduler.submit, self._world.config.step.max_queue

        def watched(prompt: Prompt) -> None:
            try:
                submit(prompt)
            except Overloaded as error:
                full = sum(not waits.ended for waits in scheduler._waiting) >= limit
                self._judge(process.machine.name, error, full)
                self._busy[process.boot_id] = self._world.loop.world_s
                raise

        scheduler.submit = watched

    def _over_fetches(self, process: WorkerProcess, worker: DecodeWorker) -> None:
        """It gives up on prefill workers once each that is left has refused it."""
        handoffs = worker._handoffs
        fetch = handoffs.fetch

        async def watched(group: Group, on_first: Any) -> Any:
            began_s = self._world.loop.world_s
            try:
                return await fetch(group, on_first)
            except Overloaded as error:
                boots = [candidate.boot_id for candidate in group.request.candidates]
                full = any(self._busy.get(boot_id, -1.0) >= began_s for boot_id in boots)
                self._judge(process.machine.name, error, full)
                raise

        handoffs.fetch = watched  # type: ignore[method-assign]  # wraps this instance alone

    # -- routers --------------------------------------------------------------------------------

    def _over_tickets(self, process: RouterProcess) -> None:
        admission, limit = process.admission, self._world.config.router.max_requests
        ticket, taken = admission.ticket, 0

        @contextmanager
        def watched() -> Iterator[None]:
            nonlocal taken
            admitted = False
            try:
                with ticket():
                    admitted, taken = True, taken + 1
                    yield
            except Overloaded as error:
                if not admitted:
                    self._judge(process.machine.name, error, taken >= limit)
                raise
            finally:
                taken -= admitted

        admission.ticket = watched  # type: ignore[method-assign]  # wraps this instance alone

    def _over_budget(self, process: RouterProcess) -> None:
        budget, config = process.dispatcher._retries._budget, self._world.config.router
        take, failed = budget.take, budget.failed
        # by whether memory was short: when each is forgotten, on the router's clock
        failures: dict[bool, deque[float]] = {True: deque(), False: deque()}

        def watched_failure(permit: RetryPermit, now_s: float, *, short: bool = False) -> None:
            failures[short].append(now_s + HOLD_S)
            failed(permit, now_s, short=short)

        def watched(active: int, now_s: float, *, short: bool = False) -> RetryPermit | None:
            try:
                return take(active, now_s, short=short)
            except Overloaded as error:
                recent = sum(forgotten_s > now_s for forgotten_s in failures[short])
                limit = max(config.retry_floor, int(config.retry_share * active))
                self._judge(process.machine.name, error, recent >= limit)
                raise

        budget.take = watched  # type: ignore[method-assign]  # wraps this instance alone
        budget.failed = watched_failure  # type: ignore[method-assign]  # wraps this instance alone

    def _over_deadlines(self, process: RouterProcess) -> None:
        """Check that a request is refused for its deadline only where requests wait on every decode
        worker, as far as the router has been informed."""
        submitter, fleet = process.dispatcher._submitter, process.fleet
        check: Callable[[float], None] = submitter.check_deadline

        def watched(deadline_s: float) -> None:
            try:
                check(deadline_s)
            except Overloaded as error:
                links = [fleet.link(name) for name in self._world.workers]
                taking = [link for link in links if link is not None and link.takes_work]
                decoders = [link.load for link in taking if link.record.role == "decode"]
                full = bool(decoders) and all(load.waiting for load in decoders)
                self._judge(process.machine.name, error, full)
                raise

        submitter.check_deadline = watched  # type: ignore[method-assign]  # wraps this instance alone
