"""A world whose workers and routers meet over a Redis server, to which something happens.

    asks ─▶ Redis fault, in half of the seeds a process is killed or drained during it ─▶ more asks,
    during the fault and after it

Pure: draws what draw_scenario.py makes a scenario of.
"""

from __future__ import annotations

import random
from dataclasses import replace

from baton.simulation.fleet.history import Ask
from baton.simulation.fleet.redis_faults import KINDS
from baton.simulation.fleet.scenario import Event, Fault, Scenario

FIRST_S, LAST_S = 1.2, 1.3  # by then all have found each other
STRUCK_STEPS = (1, 8)  # after the third request
FOR_S = (0.4, 2.0, 4.0, 10.0)  # the last one is longer than an entry's lifetime
REPLAYED_S = 15.0  # until a boot that ended as it began must be forgotten
BACK_S = 9.0  # in which all are to be listed again
PROCESS_FAULTS = ("kill worker", "kill router", "drain", "reset", "pause")
AFTER_S = (0.05, 1.0)  # of the fault that strikes a process, after the server's
AWAY_S = (0.1, 1.5)
ASKS, LATE_ASKS = (4, 6), (2, 3)
MAX_TOKENS = (4, 12, 24, 40)


def over_redis(made: Scenario) -> Scenario:
    """Let the fleet of a scenario meet over Redis, with requests and faults of its own."""
    dice = random.Random(made.seed ^ 0x4ED15)
    what = dice.choice(KINDS)
    times = sorted(dice.uniform(FIRST_S, LAST_S) for _ in range(dice.randint(*ASKS)))
    struck_s = times[2] + made.delay_s + dice.randint(*STRUCK_STEPS) * made.step_s
    for_s = REPLAYED_S if what == "replayed" else dice.choice(FOR_S)
    everyone = (*made.routers, *made.prefill, *made.decode)
    target = dice.choice(everyone) if what == "cut" else "redis"
    faults = [Event(struck_s, Fault("redis", (target,), for_s, what))]
    if what == "replayed":
        killed = dice.choice((*made.prefill, *made.decode))
        faults.append(Event(struck_s + AFTER_S[0], Fault("kill", (killed,), dice.choice(AWAY_S))))
    elif dice.random() < 0.6:
        faults.append(_process_fault(dice, made, struck_s + dice.uniform(*AFTER_S)))
    late = [struck_s + dice.uniform(0, for_s) for _ in range(dice.randint(*LATE_ASKS))]
    late += [struck_s + for_s + dice.uniform(0, 0.5), struck_s + for_s + BACK_S]
    events = [*faults, *(Event(at_s, _ask(dice, made.routers)) for at_s in (*times, *late))]
    settings = replace(made.config.router, max_requests=64)
    step = replace(made.config.step, max_queue=32, max_sequences=16)
    return replace(
        made,
        config=replace(made.config, router=settings, step=step),
        prefill=dict.fromkeys(made.prefill, 80),
        decode=dict.fromkeys(made.decode, 80),
        events=tuple(sorted(events, key=lambda event: event.at_s)),
        proposer=None,
        shared_registry=True,
    )


def _process_fault(dice: random.Random, made: Scenario, at_s: float) -> Event:
    kind, away_s = dice.choice(PROCESS_FAULTS), dice.choice(AWAY_S)
    worker = dice.choice((*made.prefill, *made.decode))
    router = dice.choice(made.routers)
    if kind == "reset":
        return Event(at_s, Fault("reset", (router, worker), away_s, "both ends"))
    target = router if kind == "kill router" else worker
    return Event(at_s, Fault(kind.split()[0], (target,), away_s))


def _ask(dice: random.Random, routers: tuple[str, ...]) -> Ask:
    return Ask(
        router=dice.choice(routers),
        prompt=tuple(dice.randrange(100) for _ in range(dice.randint(1, 32))),
        max_tokens=dice.choice(MAX_TOKENS),
        choices=dice.choice([1, 1, 1, 2]),
        temperature=dice.choice([0.0, 1.0]),
        seed=dice.randrange(1 << 32),
        deadline_s=20.0,
    )
