"""A world in which two controllers change roles and the number of workers, and faults befall them.

    asks, few and long ─▶ a reason for steps: an empty role, too few or too many workers
      ─▶ the leader is struck amid a step ─▶ the other leads ─▶ the fleet comes to rest

All meet over a Redis server, which has the leadership too. Pure: draws what draw_scenario.py makes
a scenario of.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from baton.simulation.fleet.history import Ask
from baton.simulation.fleet.scenario import ControlPlan, Event, Fault, Scenario

ARMED_S = 2.0  # before any leader may act
EMPTIED_S = 2.5  # a role loses its only worker
STRUCK_S = (9.0, 30.0)  # what strikes by time: steps begin after 10 s
SECOND_SHARE = 0.7  # of the seeds have another fault
LAST_ASK_S = 45.0
ASK_EVERY_S = (0.8, 2.4)
BEFORE_S = 0.02  # a fault: less than the shortest answer takes
START_S = (0.5, 6.0, 30.0)  # of a worker: up to more than a lease and a term's first wait
MAX_TOKENS = (8, 24, 60)
BLOCKS = 80
STAGES = ("before order", "after order", "before resize", "after resize", "at once")
KILLED_S = (4.0, 30.0)  # until a controller is back
PAUSED_S = (3.0, 12.0, 24.0)  # a lease lasts 10 s
REDIS = ("killed", "paused", "flushed", "full", "slow", "cut")
EMPTY_FOR_S = 45.0
STEP_FAULTS = (
    "report lost",
    "reports old",
    "order lost",
    "order late",
    "never ready",
    "dies in its drain",
    "worker killed",
)
OF_ORDERS = ("order lost", "order late", "dies in its drain")
AT_NEXT = (*OF_ORDERS, "never ready")  # strike the next step


@dataclass(frozen=True, slots=True)
class _Layout:
    """Workers, of which the last one leaves first, and the bounds of their number."""

    names: tuple[str, ...]
    least: int
    most: int
    emptied: str | None = None  # the worker whose loss leaves its role empty
    grows: bool = False  # no worker gets an order


_LAYOUTS = (
    _Layout(("p0", "d0", "d1", "d2"), 2, 6, emptied="p0"),
    _Layout(("d0", "p0", "p1", "p2"), 2, 6, emptied="d0"),
    _Layout(("d0", "d1", "d2", "p0"), 2, 3),  # the last of its role would leave: a handover
    _Layout(("p0", "p1", "d0"), 2, 2),  # the same, of the other role
    _Layout(("p0", "p1", "d0", "d1", "d2"), 2, 4),
    _Layout(("p0", "d0", "d1"), 4, 6, grows=True),
)


def controlled(made: Scenario) -> Scenario:
    """Give a scenario a small fleet with two controllers."""
    dice = random.Random(made.seed ^ 0xC047)
    layout = dice.choice(_LAYOUTS)
    prefill = [name for name in layout.names if name[0] == "p"]
    decode = [name for name in layout.names if name[0] == "d"]
    faults = [_leader_fault(dice, layout)]
    if layout.emptied is not None:
        faults.append(Event(EMPTIED_S, _control("worker killed", layout.emptied, EMPTY_FOR_S)))
    if dice.random() < SECOND_SHARE:
        faults.append(_second_fault(dice, layout))
    router = replace(made.config.router, max_requests=64)
    step = replace(made.config.step, max_queue=32, max_sequences=16)
    worker = replace(made.config.worker, drain_s=dice.choice([1.0, 4.0]))
    asks = _asks(dice, made.routers[0], [fault.at_s for fault in faults])
    return replace(
        made,
        config=replace(made.config, router=router, step=step, worker=worker),
        routers=made.routers[:1],
        prefill=dict.fromkeys(prefill, BLOCKS),
        decode=dict.fromkeys(decode, BLOCKS),
        events=tuple(sorted([*asks, *faults], key=lambda event: event.at_s)),
        step_s=0.03,
        delay_s=min(made.delay_s, 0.01),
        proposer=None,
        shared_registry=True,
        control=ControlPlan(layout.names, layout.least, layout.most, dice.choice(START_S)),
    )


def _leader_fault(dice: random.Random, layout: _Layout) -> Event:
    """Strike the controller that comes first to a stage of a step, or that leads at a time."""
    how = dice.choice(["killed", "paused"])
    for_s = dice.choice(KILLED_S if how == "killed" else PAUSED_S)
    stage = dice.choice([each for each in STAGES if not (layout.grows and "order" in each)])
    at_s = dice.uniform(*STRUCK_S) if stage == "at once" else ARMED_S
    return Event(at_s, _control(f"{how} {stage}", "leader", for_s))


def _second_fault(dice: random.Random, layout: _Layout) -> Event:
    for_s = dice.choice([3.0, 8.0])
    kinds = [each for each in STEP_FAULTS if not (layout.grows and each in OF_ORDERS)]
    what = dice.choice(["redis", *kinds, "leader"])
    if what == "leader":
        return _leader_fault(dice, layout)
    at_s = ARMED_S if what in AT_NEXT else dice.uniform(*STRUCK_S)
    if what != "redis":
        return Event(at_s, _control(what, dice.choice(layout.names), for_s))
    kind = dice.choice(REDIS)
    target = dice.choice(["c0", "c1"]) if kind == "cut" else "redis"
    return Event(at_s, Fault("redis", (target,), for_s, kind))


def _control(what: str, name: str, for_s: float) -> Fault:
    return Fault("control", (name,), for_s, what)


def _asks(dice: random.Random, router: str, struck_s: list[float]) -> list[Event]:
    """Return requests at all times, one of them just before each fault."""
    times, at_s = [ARMED_S - 0.5, ARMED_S - 0.4], ARMED_S
    while at_s < LAST_ASK_S:
        times.append(at_s)
        at_s += dice.uniform(*ASK_EVERY_S)
    times += [each - BEFORE_S for each in struck_s]
    return [Event(each, _ask(dice, router)) for each in times]


def _ask(dice: random.Random, router: str) -> Ask:
    return Ask(
        router=router,
        prompt=tuple(dice.randrange(100) for _ in range(dice.randint(1, 32))),
        max_tokens=dice.choice(MAX_TOKENS),
        temperature=dice.choice([0.0, 1.0]),
        seed=dice.randrange(1 << 32),
        deadline_s=20.0,
    )
