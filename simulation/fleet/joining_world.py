"""A world in which a worker joins a fleet under load: restarted, drained, or in its other role.

    load ─▶ one worker leaves ─▶ it is back, and empty ─▶ load goes on ─▶ end

The fleet is old enough by then that the worker is new to it. Pure: draws what draw_scenario.py
makes a scenario of.
"""

from __future__ import annotations

import random
from dataclasses import replace

from baton.simulation.fleet.history import Ask
from baton.simulation.fleet.scenario import Event, Fault, Scenario

STRUCK_S = 5.6
AWAY_S = 0.1
LOAD_S = 6.2, 7.8  # it is linked again within the first second
EVERY_S = 0.045
EARLY_S = (0.1, 0.2, 0.3, 0.4, 5.5, 5.56, 5.59)
BLOCKS = 160
KINDS = ("kill", "drain", "role")


def joining(made: Scenario) -> Scenario:
    """Give a scenario a fleet that is loaded as a worker of it joins."""
    dice = random.Random(made.seed ^ 0x701)
    prefill = [f"p{number}" for number in range(3)]
    decode = [f"d{number}" for number in range(dice.choice([3, 4]))]
    count = int((LOAD_S[1] - LOAD_S[0]) / EVERY_S)
    times = [LOAD_S[0] + number * EVERY_S for number in range(count)]
    asks = [Event(at_s, _ask(dice, made.routers[0])) for at_s in (*EARLY_S, *times)]
    fault = Fault(dice.choice(KINDS), (dice.choice([*prefill, *decode]),), AWAY_S)
    router = replace(made.config.router, max_requests=64, placement="disaggregated")
    step = replace(made.config.step, max_queue=32, max_sequences=16)
    return replace(
        made,
        config=replace(made.config, router=router, step=step),
        routers=made.routers[:1],
        prefill=dict.fromkeys(prefill, BLOCKS),
        decode=dict.fromkeys(decode, BLOCKS),
        events=tuple(sorted([*asks, Event(STRUCK_S, fault)], key=lambda event: event.at_s)),
        step_s=0.01,
        named_hosts=True,
    )


def _ask(dice: random.Random, router: str) -> Ask:
    return Ask(
        router=router,
        prompt=tuple(dice.randrange(100) for _ in range(dice.randint(8, 32))),
        max_tokens=dice.choice([16, 24, 36]),
        temperature=dice.choice([0.0, 1.0]),
        seed=dice.randrange(1 << 32),
        deadline_s=20.0,
    )
