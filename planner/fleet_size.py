"""Decides whether a fleet needs more or fewer workers, and says why it asks for them or does not.

    Decision on roles ─▶ workers needed ─▶ brakes ─▶ SizeDecision: a number to ask for, or a reason

More are needed where no ratio of the present workers would meet the objectives: each role's needs
add up to more than there are. That has to last for GROW_HOLD_S, and those asked for before have to
be ready and past their slow start; one that changes its role is none of these. While one of them is
overdue (overdue_workers.py), no more than the least are asked for. Fewer are asked for one at a
time, once fewer were enough for all of `release_s`; idle fleets go down to the least. No worker
leaves while a role changes, and the last one of a role stays: another one takes its role first, and
then it may leave. Pure: time is given, and acting is another's. Owned by the controller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from baton.planner.change_history import HOUR_S, UNTAKEN_S, RoleStep, age_of, ages_of
from baton.planner.controller import Decision
from baton.planner.controller_load import FleetSample, WorkerSample

GROW_HOLD_S = 10.0  # for which more have to be needed: starting one takes longer than a burst
SETTLE_S = 10.0  # after all are ready: the slow start of new ones (router/fleet/slow_start.py)
SHRINK_GAP_S = 60.0  # between a change of the number and a worker that leaves
NEED_GAP_S = 60.0  # without a forecast, after which `release_s` begins again
FAILED_S = 60.0  # after the orchestrator has refused or not answered
GROWTHS_PER_HOUR = 12
MOST_GROWTH = 2.0  # times the present number, in one step

SizeReason = Literal[
    "grow", "shrink", "enough", "unknown", "holding", "starting", "changing", "cool_down",
    "budget", "at_most", "at_least", "last_worker", "failed", "overdue",
]  # fmt: skip
SIZE_REASONS: tuple[SizeReason, ...] = get_args(SizeReason)


@dataclass(frozen=True, slots=True)
class SizeBounds:
    """The least and the most workers, and for how long fewer must be enough before one leaves."""

    least: int
    most: int
    release_s: float


@dataclass(frozen=True, slots=True)
class SizeStep:
    """`workers` are asked for instead of `before`. `leaving` drains first; None: none leaves, or
    one that is not registered."""

    workers: int
    before: int
    leaving: WorkerSample | None = None


@dataclass(frozen=True, slots=True)
class SizeDecision:
    """`reason` is a code, `text` one sentence with its numbers. `needed` is within the bounds;
    None: not known, or not what the decision follows from. `handover` is the change by which
    another worker takes the role of the one that would leave."""

    at_s: float
    reason: SizeReason
    text: str
    step: SizeStep | None = None
    needed: int | None = None
    handover: RoleStep | None = None


@dataclass(frozen=True, slots=True)
class PoolState:
    """`asked` workers are those that the orchestrator has been asked for, `last_id` names the one
    that it would remove first (None: none is asked for), `changing` are the ids of those whose role
    changes, `overdue` counts those that were asked for and do not get ready. The orchestrator takes
    no number below `least`."""

    asked: int
    last_id: str | None
    changing: frozenset[str]
    overdue: int = 0
    least: int = 1


class SizeController:
    """`decide` is called every few seconds, `took` when the number of a step was accepted, `failed`
    when it was not, `unanswered` when the worker that leaves has not answered the order to drain.
    Its memory is what a successor must `recall`."""

    def __init__(self, bounds: SizeBounds) -> None:
        self._bounds = bounds
        self._needs: deque[tuple[float, int]] = deque()  # when, and how many: of release_s
        self._more_s: float | None = None  # since when more are needed
        self._ready_s: float | None = None  # since when all that were asked for are ready
        self._grown: deque[float] = deque()
        self._changed_s: float | None = None
        self._failed_s: float | None = None
        self._may_drain: tuple[str, float] | None = None  # which worker, and since when

    def decide(
        self, roles: Decision, sample: FleetSample, pool: PoolState, now_s: float
    ) -> SizeDecision:
        """Return the number to ask for now, or why there is none. `roles` is of the same sample."""
        ready = {each.worker_id for each in sample.workers if each.state == "ready"}
        if len(ready | pool.changing) < pool.asked:
            self._ready_s = None
        elif self._ready_s is None:
            self._ready_s = now_s
        needed = self._needed(roles)
        if needed is None or min(needed, self._bounds.most) <= pool.asked:
            self._more_s = None
        elif self._more_s is None:
            self._more_s = now_s
        if needed is not None:
            self._note(self._within(needed), now_s)
        if self._failed_s is not None and now_s - self._failed_s < FAILED_S:
            text = f"the last request failed {now_s - self._failed_s:.0f} s ago ({FAILED_S:.0f} s)"
            within = None if needed is None else self._within(needed)
            return SizeDecision(now_s, "failed", text, None, within)
        if pool.asked < self._bounds.least:
            text = f"{pool.asked} workers are asked for, the minimum is {self._bounds.least}"
            return self._step(now_s, "grow", text, SizeStep(self._bounds.least, pool.asked))
        if pool.asked > self._bounds.most:
            text = f"{pool.asked} workers are asked for, {self._bounds.most} are the most"
            return self._shrink(sample, pool, text, now_s)
        if needed is None:
            return SizeDecision(now_s, "unknown", f"{roles.reason}: {roles.text}")
        text = f"{needed} workers are needed, {pool.asked} are asked for and {len(ready)} are ready"
        text = "; ".join(each for each in (text, roles.shortfall) if each)
        return self._compared(needed, text, sample, pool, now_s)

    def took(self, step: SizeStep, now_s: float) -> None:
        """Record that the orchestrator has accepted the number."""
        self._changed_s = now_s
        self._failed_s = self._more_s = self._ready_s = None
        if step.workers > step.before:
            self._grown.append(now_s)

    def failed(self, now_s: float) -> None:
        """Record that the orchestrator refused, or did not answer."""
        self._failed_s = now_s

    def unanswered(self, worker_id: str, now_s: float) -> None:
        """Record that a worker may still begin to drain."""
        self._may_drain = worker_id, now_s

    def drain_hindrance(self, now_s: float) -> str | None:
        """Return why no other worker may leave its role yet: one may have got the order to drain,
        and the reports may not show it."""
        if self._may_drain is None:
            return None
        worker_id, ordered_s = self._may_drain
        if now_s - ordered_s > UNTAKEN_S:
            self._may_drain = None
            return None
        return (
            f"{worker_id} may have got an order to drain in the last {UNTAKEN_S:.0f} s, which the "
            "reports may not show yet"
        )

    def memory(self, now_s: float, step: SizeStep | None = None) -> dict[str, object]:
        """Return the memory for a successor, as JSON can hold it, as if the step were taken and
        the worker that leaves had not answered."""
        grown, changed_s, may_drain = [*self._grown], self._changed_s, self._may_drain
        if step is not None:
            changed_s = now_s
            grown += [now_s] if step.workers > step.before else []
            if step.leaving is not None:
                may_drain = step.leaving.worker_id, now_s
        drain = None
        if may_drain is not None:
            drain = {"worker_id": may_drain[0], "ordered_ago_s": now_s - may_drain[1]}
        return {
            "grown_ago_s": [now_s - each for each in grown if now_s - each <= HOUR_S],
            "changed_ago_s": None if changed_s is None else now_s - changed_s,
            "may_drain": drain,
        }

    def recall(self, memory: Mapping[str, Any], written_s: float) -> None:
        """Take the previous leader's memory. Raises ValueError if it has another form."""
        fields = {"grown_ago_s", "changed_ago_s", "may_drain"}
        if not isinstance(memory, Mapping) or memory.keys() != fields:
            raise ValueError(f"{str(memory)[:80]} is not a memory of a fleet's size")
        ago_s = memory["changed_ago_s"]
        changed_s = None if ago_s is None else written_s - age_of(ago_s)
        may_drain = _drain_of(memory["may_drain"], written_s)
        self._grown = deque(sorted(written_s - each for each in ages_of(memory["grown_ago_s"])))
        self._changed_s, self._may_drain = changed_s, may_drain
        self._needs.clear()
        self._more_s = None

    def _needed(self, roles: Decision) -> int | None:
        """Return the workers of both roles with which the objectives would be met."""
        if roles.reason == "idle":
            return self._bounds.least
        return sum(roles.wanted.values()) or None

    def _within(self, workers: int) -> int:
        return min(max(workers, self._bounds.least), self._bounds.most)

    def _note(self, needed: int, now_s: float) -> None:
        if self._needs and now_s - self._needs[-1][0] > NEED_GAP_S:
            self._needs.clear()
        self._needs.append((now_s, needed))
        while len(self._needs) > 1 and now_s - self._needs[1][0] >= self._bounds.release_s:
            self._needs.popleft()  # the first that stays is at least release_s old

    def _compared(
        self, needed: int, text: str, sample: FleetSample, pool: PoolState, now_s: float
    ) -> SizeDecision:
        asked, most = pool.asked, self._bounds.most
        if needed > asked and asked >= most:
            return SizeDecision(now_s, "at_most", f"{text}: {most} are the most", None, most)
        if self._within(needed) > asked:
            return self._grow(self._within(needed), text, pool, now_s)
        since_s = now_s - self._needs[0][0]
        if (peak := max(count for _, count in self._needs)) >= asked:
            return SizeDecision(now_s, "enough", text, None, self._within(needed))
        if since_s < self._bounds.release_s:
            text += f"; {peak} were enough for {since_s:.0f} s ({self._bounds.release_s:.0f} s)"
            return SizeDecision(now_s, "holding", text, None, self._within(needed))
        return self._shrink(sample, pool, f"{text}; {peak} were enough for long", now_s)

    def _grow(self, needed: int, text: str, pool: PoolState, now_s: float) -> SizeDecision:
        held_s = 0.0 if self._more_s is None else now_s - self._more_s
        reason: SizeReason = "grow"
        while self._grown and now_s - self._grown[0] > HOUR_S:
            self._grown.popleft()
        if held_s < GROW_HOLD_S:
            reason, text = "holding", f"{text}, for {held_s:.0f} s ({GROW_HOLD_S:.0f} s)"
        elif pool.overdue:
            reason, text = "overdue", f"{text}: {pool.overdue} of them are overdue"
        elif self._ready_s is None:
            reason, text = "starting", f"{text}: those asked for have to be ready first"
        elif now_s - self._ready_s < SETTLE_S:
            reason, text = "cool_down", f"{text}, for less than {SETTLE_S:.0f} s"
        elif len(self._grown) >= GROWTHS_PER_HOUR:
            reason, text = "budget", f"{text}; it grew {len(self._grown)} times within the hour"
        if reason != "grow":
            return SizeDecision(now_s, reason, text, None, needed)
        workers = min(needed, max(pool.asked + 1, int(MOST_GROWTH * pool.asked)))
        return self._step(now_s, "grow", text, SizeStep(workers, pool.asked), needed)

    def _shrink(
        self, sample: FleetSample, pool: PoolState, text: str, now_s: float
    ) -> SizeDecision:
        """Return the step by which the last worker leaves, or what holds it back."""
        if pool.asked <= pool.least:
            text += f"; {pool.least} are the least that the orchestrator takes"
            return SizeDecision(now_s, "at_least", text)
        if self._changed_s is not None and now_s - self._changed_s < SHRINK_GAP_S:
            since_s = now_s - self._changed_s
            text += f"; the number changed {since_s:.0f} s ago ({SHRINK_GAP_S:.0f} s)"
            return SizeDecision(now_s, "cool_down", text)
        found = [each for each in sample.workers if each.worker_id == pool.last_id]
        leaving = found[0] if found else None
        step = SizeStep(pool.asked - 1, pool.asked, leaving)
        others = [each for each in sample.workers if each.worker_id != pool.last_id]
        unready = sorted(e.worker_id for e in others if e.state != "ready" and leaving is not None)
        if pool.changing or unready:  # a worker amid a change may not be registered
            names = f"; {', '.join(unready)} are not ready" if unready else ""
            text += f"; {len(pool.changing)} roles are changing{names}"
            return SizeDecision(now_s, "changing", text)
        if leaving is None:  # its pod waits for a node, or has just ended
            return self._step(now_s, "shrink", f"{text}; {pool.last_id} is not registered", step)
        if not any(each.role == leaving.role for each in others):
            text += f"; {pool.last_id} would leave, the last {leaving.role} worker: it stays"
            return SizeDecision(now_s, "last_worker", text, handover=_handover(leaving, others))
        return self._step(now_s, "shrink", f"{text}; {pool.last_id} leaves", step)

    def _step(
        self,
        now_s: float,
        reason: SizeReason,
        text: str,
        step: SizeStep,
        needed: int | None = None,
    ) -> SizeDecision:
        return SizeDecision(now_s, reason, text, step, step.workers if needed is None else needed)


def _drain_of(found: object, written_s: float) -> tuple[str, float] | None:
    """Return the worker that may drain, and since when, from a memory. Raises ValueError."""
    if found is None:
        return None
    if not isinstance(found, Mapping) or found.keys() != {"worker_id", "ordered_ago_s"}:
        raise ValueError(f"{str(found)[:80]} is not a memory of an order to drain")
    return str(found["worker_id"]), written_s - age_of(found["ordered_ago_s"])


def _handover(leaving: WorkerSample, others: Sequence[WorkerSample]) -> RoleStep | None:
    """Return the change by which the least busy of the others takes the role of `leaving`; None if
    its own role would have no worker then."""
    if len(others) < 2:
        return None
    chosen = min(others, key=lambda e: (e.running + e.waiting, e.queued_tokens, e.worker_id))
    return RoleStep(chosen.worker_id, chosen.boot_id, leaving.role)
