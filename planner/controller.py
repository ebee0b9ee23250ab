"""Decides which worker should change its role, and says why each step is or is not taken.

    FleetSample ─▶ LoadWindow ─▶ forecast of each ratio ─▶ brakes ─▶ Decision: a step, or a reason

A step is taken where another ratio's forecast is better by MIN_GAIN for HOLD_S, and would be no
worse without what waits now: a queue ends, and a worker that was moved for it alone would have to
move back. What holds a step back, in this order: stale or missing reports, too little known, the
last worker of a role, changes under way, the cool-down after a change, the time between reversals,
the budget of an hour. A role without any worker gets one from the other, with traffic or without:
only the budget holds that back, and the last worker there. Changes under way are known from the
reports too, so a controller that starts again neither repeats them nor adds to them. Pure: time is
given, and acting is another's. Owned by the controller process, or by a simulation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from baton.planner.change_history import CHANGE_S, ChangeHistory, RoleStep, read_history
from baton.planner.controller_forecast import (
    NEAR,
    Forecast,
    ServiceGoals,
    forecast,
    needed_workers,
    unmet_objectives,
)
from baton.planner.controller_load import (
    FleetLoad,
    FleetSample,
    LoadWindow,
    WorkerRole,
    WorkerSample,
)

STALE_S = 5.0  # older samples are not acted on
GAP_S = 10.0  # between samples, after which rates begin again
MIN_SPAN_S = 8.0  # of samples before the first step
HOLD_S = 2.0  # for which the same direction has to be better
EMPTY_S = 10.0  # for which a role has no worker: the one that ended may come back by itself
MIN_GAIN = 0.05  # of the score
SERVED_WEIGHT = 0.25  # of the served share in the score; the rest is the good share
COOL_DOWN_S = 5.0  # after a change has ended: the fleet shows its effect first
REVERSAL_S = 300.0  # between two reversals
REFUSED_S = 60.0  # a worker that refused is not asked again
CHANGES_PER_WORKER = 4  # and hour: the budget of the fleet
AT_ONCE_SHARE = 0.25  # of the workers may change at a time, and one may always
ATTAINMENT = 0.9  # share of requests for which the wanted number of workers suffices
MOST_FACTOR = 4  # at most so many times the present workers are asked for

Reason = Literal[
    "taken", "stale", "unreachable", "learning", "idle", "small_gain", "holding",
    "last_worker", "changing", "cool_down", "reversal", "budget", "no_worker",
]  # fmt: skip
REASONS: tuple[Reason, ...] = get_args(Reason)


@dataclass(frozen=True, slots=True)
class Decision:
    """`reason` is a code, `text` one sentence with its numbers. `now`: the forecast of the present
    ratio, changes under way included; `best` of the wanted one; `less` and `more` of one prefill
    worker less and more, where there is one. `wanted`: workers of each role that would do.
    `shortfall`: which objective no number of workers would meet; empty: there is none such."""

    at_s: float
    reason: Reason
    text: str
    step: RoleStep | None = None
    now: Forecast | None = None
    best: Forecast | None = None
    less: Forecast | None = None
    more: Forecast | None = None
    wanted: dict[str, int] = field(default_factory=dict)
    shortfall: str = ""


class RoleController:
    """`decide` is called every second or so with the newest sample, `took` when the step of a
    decision was accepted by its worker, `refused` when it was not. `memory` is what a controller
    that starts must `recall`, or it repeats what the brakes of this one would hold back."""

    def __init__(self, goals: ServiceGoals) -> None:
        self._goals = goals
        self._window = LoadWindow()
        self._history = ChangeHistory()
        self._refused: dict[str, float] = {}  # until when
        self._better: tuple[WorkerRole, float] | None = None  # direction, since when
        self._empty_role: tuple[WorkerRole, float] | None = None  # the role without a worker

    def decide(self, sample: FleetSample, now_s: float) -> Decision:
        """Return the step to take now, or why there is none."""
        if now_s - sample.at_s > STALE_S:
            self._better = self._empty_role = None
            age_s = now_s - sample.at_s
            return _none(now_s, "stale", f"the reports are {age_s:.1f} s old ({STALE_S:.0f} s)")
        if self._window.gap_s(sample) > GAP_S:
            self._window.clear()
            self._empty_role = None
        self._window.add(sample)
        for worker_id in self._history.settle(sample, now_s):
            self._refused[worker_id] = now_s + REFUSED_S
        decision = self._decide(sample, now_s)
        if decision.now is None:
            self._better = None
        return decision

    def took(self, step: RoleStep, now_s: float) -> None:
        """Record that a worker has accepted the order, or may have."""
        self._history.took(step, now_s)
        self._better = None

    def refused(self, step: RoleStep, now_s: float) -> None:
        """Record that a worker has refused: others come first for a while."""
        self._refused[step.worker_id] = now_s + REFUSED_S

    @property
    def changing(self) -> frozenset[str]:
        """Return the ids of the workers whose change is under way."""
        return self._history.under_way

    def permits(self, step: RoleStep, workers: int, now_s: float) -> bool:
        """Return whether the brakes allow a step that has another reason than a forecast."""
        refused = self._refused.get(step.worker_id, now_s) > now_s
        return not refused and self._timed_brake(step.role, workers, now_s) is None

    def memory(self, now_s: float, step: RoleStep | None = None) -> dict[str, object]:
        """Return the memory for the next controller, as JSON can hold it; with a step, as if the
        step had been accepted."""
        return self._history.written(now_s, step)

    def recall(self, memory: Mapping[str, Any], written_s: float) -> None:
        """Take the memory that the previous leader wrote at this time. Raises ValueError if it has
        another form."""
        self._history = read_history(memory, written_s)

    def _decide(self, sample: FleetSample, now_s: float) -> Decision:
        if (text := _unreported(sample)) is not None:
            return _none(now_s, "unreachable", text)
        if self._window.span_s < MIN_SPAN_S:
            text = f"{self._window.span_s:.1f} s of reports are known, {MIN_SPAN_S:.0f} s needed"
            return _none(now_s, "learning", text)
        load, counts = self._window.load(), self._history.counts(sample)
        if min(counts.values()) < 1:
            return self._fill(sample, counts, now_s)
        self._empty_role = None
        if load.idle:
            return _none(now_s, "idle", "there is no traffic")
        prompts = load.backlog_tokens or load.tokens_per_request  # else all are computed locally
        if (load.prefill_rate is None and prompts) or (load.step is None and load.running):
            return _none(now_s, "learning", "no speed of prefill or decode steps is known yet")
        view = self._view(load, counts, now_s)
        assert view.best is not None and view.now is not None
        if _score(view.best) - _score(view.now) < MIN_GAIN:
            self._better = None
            return _unhelpful(view, counts)
        role: WorkerRole = "prefill" if view.best.prefill > view.now.prefill else "decode"
        held = self._hold(role, now_s)
        if held < HOLD_S:
            return replace(view, reason="holding", text=f"{_compared(view)} for {held:.1f} s")
        return self._brake(sample, view, role, now_s)

    def _fill(self, sample: FleetSample, counts: dict[WorkerRole, int], now_s: float) -> Decision:
        """Return the step that gives a role without workers its first one, or why it must wait."""
        role: WorkerRole = "decode" if counts["decode"] < 1 else "prefill"
        other: WorkerRole = "prefill" if role == "decode" else "decode"
        if self._empty_role is None or self._empty_role[0] != role:
            self._empty_role = (role, now_s)
        held_s = now_s - self._empty_role[1]
        # one that is not ready may still start; one that drains may be on its way to this role
        least_s = CHANGE_S if sample.of(role, "not ready") else EMPTY_S
        text = f"no {role} worker is ready for {held_s:.1f} s"
        draining = sorted(e.worker_id for e in sample.workers if e.state == "draining")
        ready = [e for e in sample.of(other, "ready") if not self._history.leaves(e)]
        if draining or held_s < least_s:
            names = f", and {', '.join(draining)} drains" if draining else f" ({least_s:.0f} s)"
            return _none(now_s, "last_worker", text + names)
        if len(ready) < 2:
            text += f", and {len(ready)} ready {other} worker is no spare one: start more workers"
            return _none(now_s, "last_worker", text)
        if (reason := self._over_budget(len(sample.workers), now_s)) is not None:
            return _none(now_s, *reason)
        chosen = self._least_busy(ready, now_s)
        if chosen is None:
            return _none(now_s, "no_worker", _refusals(other))
        step = RoleStep(chosen.worker_id, chosen.boot_id, role)
        text = f"{chosen.worker_id} becomes a {role} worker: {text}"
        return replace(_none(now_s, "taken", text), step=step)

    def _view(self, load: FleetLoad, counts: dict[WorkerRole, int], now_s: float) -> Decision:
        """Return the forecasts of all ratios that may be wanted."""
        prefill, decode = counts["prefill"], counts["decode"]
        total = prefill + decode
        lasting = replace(load, backlog_tokens=0.0, waiting=0, running=0)
        least = _score(forecast(lasting, self._goals, prefill, decode)) - NEAR
        found = {0: forecast(load, self._goals, prefill, decode)}
        for offset in _offsets(prefill, total):
            ratio = prefill + offset, decode - offset
            if _score(forecast(lasting, self._goals, *ratio)) >= least:
                found[offset] = forecast(load, self._goals, *ratio)
        beside = {
            offset: forecast(load, self._goals, prefill + offset, decode - offset)
            for offset in (-1, 1)
            if 1 <= prefill + offset < total
        }
        largest = MOST_FACTOR * total
        return Decision(
            at_s=now_s,
            reason="small_gain",
            text="",
            now=found[0],
            best=found[_nearest(found)],
            less=beside.get(-1),
            more=beside.get(1),
            wanted=needed_workers(load, self._goals, ATTAINMENT, largest),
            shortfall=_shortfall(load, self._goals, largest),
        )

    def _hold(self, role: WorkerRole, now_s: float) -> float:
        """Return for how long this direction has been better."""
        if self._better is None or self._better[0] != role:
            self._better = (role, now_s)
        return now_s - self._better[1]

    def _brake(
        self, sample: FleetSample, view: Decision, role: WorkerRole, now_s: float
    ) -> Decision:
        """Return the step, or what holds it back."""
        other: WorkerRole = "decode" if role == "prefill" else "prefill"
        ready = [e for e in sample.of(other, "ready") if not self._history.leaves(e)]
        if len(ready) < 2:
            text = f"{len(ready)} {other} worker is ready, and the last one of a role stays"
            return replace(view, reason="last_worker", text=text)
        under_way = sum(e.state in ("draining", "not ready") for e in sample.workers)
        under_way = max(under_way, len(self._history.under_way))
        at_once = max(1, int(AT_ONCE_SHARE * len(sample.workers)))
        if under_way >= at_once:
            text = f"{under_way} workers are changing or not ready, and {at_once} may be at once"
            return replace(view, reason="changing", text=text)
        if (reason := self._timed_brake(role, len(sample.workers), now_s)) is not None:
            return replace(view, reason=reason[0], text=reason[1])
        chosen = self._least_busy(ready, now_s)
        if chosen is None:
            return replace(view, reason="no_worker", text=_refusals(other))
        step = RoleStep(chosen.worker_id, chosen.boot_id, role)
        text = f"{chosen.worker_id} becomes a {role} worker: {_compared(view)}"
        return replace(view, reason="taken", text=text, step=step)

    def _timed_brake(
        self, role: WorkerRole, workers: int, now_s: float
    ) -> tuple[Reason, str] | None:
        history = self._history
        reverses = history.last_role not in (None, role)
        if not history.under_way and history.ended_s is not None:
            since_s = now_s - history.ended_s
            if since_s < COOL_DOWN_S:
                return "cool_down", f"a change ended {since_s:.1f} s ago ({COOL_DOWN_S:.0f} s)"
        if reverses and history.under_way:
            return "changing", "changes in the other direction are under way"
        turned_s = history.reversed_s
        if reverses and turned_s is not None and (since_s := now_s - turned_s) < REVERSAL_S:
            return "reversal", f"the last reversal was {since_s:.0f} s ago ({REVERSAL_S:.0f} s)"
        return self._over_budget(workers, now_s)

    def _over_budget(self, workers: int, now_s: float) -> tuple[Reason, str] | None:
        if self._history.taken(now_s) >= (budget := CHANGES_PER_WORKER * workers):
            return "budget", f"{budget} changes were made within the hour"
        return None

    def _least_busy(self, workers: list[WorkerSample], now_s: float) -> WorkerSample | None:
        """Return the one whose change costs least; None if all have refused lately."""
        able = [e for e in workers if self._refused.get(e.worker_id, now_s) <= now_s]
        return min(
            able,
            key=lambda e: (e.running + e.waiting, e.queued_tokens, e.worker_id),
            default=None,
        )


def _refusals(role: WorkerRole) -> str:
    return f"every {role} worker has refused within {REFUSED_S:.0f} s"


def _unhelpful(view: Decision, counts: dict[WorkerRole, int]) -> Decision:
    """Return why no ratio is better: all are as good, or the other role has no worker to spare."""
    roles: tuple[tuple[WorkerRole, WorkerRole], ...] = (
        ("prefill", "decode"),
        ("decode", "prefill"),
    )
    for role, other in roles:
        if view.wanted[role] > counts[role] and counts[other] == 1:
            text = (
                f"{view.wanted[role]} {role} workers are needed and {counts[role]} are there; the "
                f"last {other} worker stays: start more workers"
            )
            return replace(view, reason="last_worker", text=text)
    text = "; ".join(each for each in (_compared(view), view.shortfall) if each)
    return replace(view, reason="small_gain", text=text)


def _shortfall(load: FleetLoad, goals: ServiceGoals, most: int) -> str:
    settings = {"prefill": "slo.ttft_s", "decode": "slo.itl_s"}
    return "; ".join(
        f"not even {most} {role} workers are predicted to serve {ATTAINMENT:.0%} of the requests "
        f"within {settings[role]}"
        for role in unmet_objectives(load, goals, ATTAINMENT, most)
    )


def _unreported(sample: FleetSample) -> str | None:
    """Return whose load is not known, and why; None if all have reported theirs."""
    silent = sorted(e.worker_id for e in sample.workers if e.state == "unreachable")
    unlike = sorted(e.worker_id for e in sample.workers if e.state == "no counters")
    found = [f"no report of {', '.join(silent)}"] if silent else []
    if unlike:
        names = ", ".join(unlike)
        found.append(f"another version of Baton, with other counters, on {names}: run one version")
    return "; ".join(found) or None


def _offsets(prefill: int, total: int) -> list[int]:
    """Return changes of the number of prefill workers: 3, and powers of two, both ways."""
    sizes = [3, *(1 << power for power in range(total.bit_length()))]
    found = [sign * size for size in sizes for sign in (1, -1)]
    return [each for each in found if 1 <= prefill + each < total]


def _nearest(found: dict[int, Forecast]) -> int:
    """Return the least change whose score is within NEAR of the best."""
    most = max(_score(each) for each in found.values())
    return min((each for each in found if _score(found[each]) >= most - NEAR), key=abs)


def _score(found: Forecast) -> float:
    return (1 - SERVED_WEIGHT) * found.good_share + SERVED_WEIGHT * found.served_share


def _compared(view: Decision) -> str:
    now, best = view.now, view.best
    assert now is not None and best is not None
    text = (
        f"{now.prefill}:{now.decode} is predicted to serve {now.good_share:.0%} of the requests "
        "within the objectives"
    )
    if best.prefill == now.prefill:
        return f"{text}, and no other ratio more"
    return f"{text}, {best.prefill}:{best.decode} {best.good_share:.0%}"


def _none(now_s: float, reason: Reason, text: str) -> Decision:
    return Decision(now_s, reason, text)
