"""The loop of the role controller: read the fleet, decide, and act if it leads and may.

    every TICK_S: reports ─▶ RoleController ─▶ metrics, log ─▶ a step, if `acts` and leader ─▶ order

A reading that fails leaves the last sample, which grows stale. Leadership is renewed before each
order, and before each call by which the number of workers changes; what may have changed since the
decision is checked again (`_hindrance`). A new term begins with the memory of the one before, and a
step is in the memory before it is ordered: a leader that can neither read nor write it orders
nothing. Without `acts` each step is advice: logged, counted, never ordered. The number of workers
is decided beside the roles, where a size loop is given (size_loop.py). Owns no worker.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, Protocol

from baton.planner.change_history import RoleStep
from baton.planner.control import control_metrics
from baton.planner.control.controller_memory import ControllerMemory, RecalledMemory
from baton.planner.control.leadership import TERM_S
from baton.planner.control.order_rules import ORDER_TIMEOUT_S, OrderUnanswered
from baton.planner.control.repeated_event import RepeatedEvent
from baton.planner.control.size_loop import SizeLoop
from baton.planner.control.size_step import SizeGate
from baton.planner.controller import STALE_S, Decision, RoleController
from baton.planner.controller_forecast import Forecast
from baton.planner.controller_load import FleetSample
from baton.planner.fleet_size import SizeStep
from baton.runtime import logs
from baton.runtime.errors import BatonError

TICK_S = 1.0

log = logs.get(__name__)


class FleetReader(Protocol):
    async def read(self, term: int) -> FleetSample:
        """Ask the workers as the leader of this term, 0 without one. Raises Unavailable if they
        cannot be listed."""
        ...


class RoleLoop:
    """`order` sends one step of a term to its worker; it raises BatonError if the worker does not
    accept, OrderUnanswered if it may. `decision` is the last one."""

    def __init__(
        self,
        reader: FleetReader,
        controller: RoleController,
        memory: ControllerMemory,
        order: Callable[[RoleStep, int], Awaitable[None]],
        clock: Callable[[], float],
        *,
        acts: bool,
        sizes: SizeLoop | None = None,
    ) -> None:
        self._reader = reader
        self._controller = controller
        self._memory = memory
        self._leadership = memory.leadership
        self._recalled_term = 0  # the last term that has read its memory
        self._order = order
        self._clock = clock
        self._acts = acts
        self._sizes = sizes
        self._sample: FleetSample | None = None
        self._term, self._term_s = 0, 0.0  # the term held last, and when it began
        self._decided, self._held, self._unread = (RepeatedEvent() for _ in range(3))
        self.decision: Decision | None = None

    async def run(self, stopped: asyncio.Event) -> None:
        """Decide every TICK_S until `stopped` is set; then, and after any error, give the
        leadership up."""
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(self._leadership.close)
            if self._sizes is not None:
                closing.push_async_callback(self._sizes.close)
            while not stopped.is_set():
                await self.tick()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await stopped.wait()

    async def tick(self) -> Decision | None:
        """Read, decide and act once. Return the decision; None before the first reading."""
        leads = self._acts and await self._lead()
        control_metrics.CONTROL_ACTS.set(self._acts)
        control_metrics.CONTROL_LEADS.set(leads)
        if not leads and self._sizes is not None:
            self._sizes.rest()
        try:
            self._sample = await self._reader.read(self._leadership.term if leads else 0)
        except BatonError as error:
            if self._unread.should_log(str(error), self._clock()):
                log.warning("fleet not read", reason=str(error))
        if self._sample is None:
            return None
        decision = self._controller.decide(self._sample, self._clock())
        self.decision = decision
        publish(decision)
        self._log(decision, leads=leads)
        if decision.step is not None and leads and await self._lead():
            await self._act(decision.step, self._sample)
        elif decision.step is None and leads and self._sizes is not None:
            await self._resize(self._sizes, decision, self._sample)
        return decision

    async def _resize(self, sizes: SizeLoop, decision: Decision, sample: FleetSample) -> None:
        async def hindrance() -> str | None:
            return await self._lost() or self._hindrance(sample)

        gate = SizeGate(hindrance, self._lost, lambda step: self._keep(None, step))
        found = await sizes.tick(decision, sample, self._controller.changing, gate)
        step = None if found is None else found.handover
        if step is None or not self._controller.permits(step, len(sample.workers), self._clock()):
            return
        if await self._lead() and await self._act(step, sample):
            log.info("role handed over", **asdict(step), reason="the last worker of it may leave")

    async def _lead(self) -> bool:
        if not await self._leadership.hold():
            return False
        if self._leadership.term != self._term:
            self._term, self._term_s = self._leadership.term, self._clock()
        if self._recalled_term != self._term:
            await self._recall()
        return True

    async def _lost(self) -> str | None:
        """Renew the leadership. Return why this controller may not act as its holder."""
        if not await self._lead():
            return "this controller does not lead any more"
        return self._term_hindrance()

    async def _recall(self) -> None:
        """Take what the leader before has left. Where it cannot be read, the next tick asks."""
        try:
            found = await self._memory.recall()
            if found is None:
                log.info("controller memory not found", term=self._term)
            else:
                self._take(found)
        except BatonError as error:
            log.warning("controller memory not read", reason=str(error))
            return
        except ValueError as error:  # it does not count, and would not at the next tick
            log.warning("controller memory refused", term=self._term, reason=str(error))
        self._recalled_term = self._term

    def _take(self, found: RecalledMemory) -> None:
        written_s = self._clock() - found.age_s
        self._controller.recall(found.memory.get("roles", {}), written_s)
        if self._sizes is not None and "size" in found.memory:
            self._sizes.controller.recall(found.memory["size"], written_s)
        log.info("controller memory recalled", term=self._term, age_s=round(found.age_s, 1))

    async def _keep(self, step: RoleStep | None, size: SizeStep | None = None) -> str | None:
        """Write the memory, as if the step had been accepted. Return why that has failed. The next
        step writes it again; until then a step that is refused holds a successor back longer."""
        now_s = self._clock()
        memory: dict[str, object] = {"roles": self._controller.memory(now_s, step)}
        if self._sizes is not None:
            memory["size"] = self._sizes.controller.memory(now_s, size)
        try:
            await self._memory.keep(memory)
        except BatonError as error:
            return f"the memory for the next controller is not written: {error}"
        return None

    def _hindrance(self, sample: FleetSample) -> str | None:
        """Return why no order may be sent now: another leader's may be on its way, or this process
        was held up since it has read the fleet."""
        now_s = self._clock()
        if now_s - sample.at_s > STALE_S:
            return f"the reports are more than {STALE_S:.0f} s old by now"
        drains = None if self._sizes is None else self._sizes.controller.drain_hindrance(now_s)
        return drains or self._term_hindrance()

    def _term_hindrance(self) -> str | None:
        if self._clock() - self._term_s < TERM_S:
            return f"it has led for less than {TERM_S:.0f} s: the one before may have ordered"
        if self._leadership.lasts_s() < ORDER_TIMEOUT_S:
            return f"its leadership ends before an order may: within {ORDER_TIMEOUT_S:g} s"
        if self._recalled_term != self._term:
            return "what the leader before has left is not read"
        return None

    async def _act(self, step: RoleStep, sample: FleetSample) -> bool:
        """Order a step. Return whether the worker has accepted it."""
        reason = self._hindrance(sample) or await self._keep(step) or self._hindrance(sample)
        if reason is not None:  # asked twice, since writing may have taken long
            if self._held.should_log((step, reason), self._clock()):
                log.warning("role step not ordered", **asdict(step), reason=reason)
            return False
        try:
            await self._order(step, self._leadership.term)
        except OrderUnanswered as error:
            log.warning("role step unanswered", **asdict(step), reason=str(error))
            self._controller.took(step, self._clock())  # else another one could change beside it
        except BatonError as error:
            log.warning("role step refused", **asdict(step), reason=str(error))
            self._controller.refused(step, self._clock())
        else:
            self._controller.took(step, self._clock())
            log.info("role step accepted", **asdict(step), term=self._leadership.term)
            return True
        return False

    def _log(self, decision: Decision, *, leads: bool) -> None:
        if not self._decided.should_log((decision.reason, decision.step), decision.at_s):
            return
        mode = ("leads" if leads else "follows") if self._acts else "observes"
        fields: dict[str, Any] = {"reason": decision.reason, "detail": decision.text, "mode": mode}
        log.info(
            "role step withheld" if decision.step is None else "role step decided",
            **fields,
            wanted=decision.wanted,
        )

    def report(self) -> dict[str, Any]:
        """Return the last decision as JSON can hold it."""
        return {} if self.decision is None else asdict(self.decision)

    def size_report(self) -> dict[str, Any]:
        """Return the last decision on the number of workers; empty without one."""
        return {} if self._sizes is None else self._sizes.report()


def publish(decision: Decision) -> None:
    """Count a decision and set the gauges of what it forecasts. One without a forecast leaves the
    recommended workers as they were."""
    control_metrics.CONTROL_DECISIONS.labels(decision.reason).inc()
    for role, workers in decision.wanted.items():
        control_metrics.RECOMMENDED_WORKERS.labels(role).set(workers)
    control_metrics.FORECAST_SHARE.labels("less_prefill").set(_share(decision.less))
    control_metrics.FORECAST_SHARE.labels("now").set(_share(decision.now))
    control_metrics.FORECAST_SHARE.labels("more_prefill").set(_share(decision.more))


def _share(found: Forecast | None) -> float:
    return 0.0 if found is None else found.good_share
