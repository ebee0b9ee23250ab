"""A world of workers whose models are split over ranks, of which one dies or stands still.

    rank dies              ─▶ the step under way breaks off, the worker ends, its requests migrate
    rank stops for 2.5 s   ─▶ same, once the step has waited for it; before, the step goes on

A rank writes its KV heads of a step's blocks by itself, so what a broken step leaves is torn. Half
of the fleets speculate, some of these by a draft model over the ranks. Pure: draws what
draw_scenario.py makes a scenario of.
"""

from __future__ import annotations

import random
from dataclasses import replace

from baton.simulation.fleet.history import Ask
from baton.simulation.fleet.scenario import Event, Fault, Proposing, Scenario

RANKS = 2
ASKS = (5, 8)
MAX_TOKENS = (4, 12, 24, 40)
FIRST_S, LAST_S = 0.1, 0.14
STRUCK_STEPS = (1, 24)  # after the first request
STEP_S = (0.003, 0.01)
BRIEF_S = 0.4  # a rank that stands still for so long ends no worker
STOPPED_S = (BRIEF_S, 6.0, 6.0)
LATE_S = (0.2, 4.5)  # a request that comes once a worker waits for its rank, or has ended


def ranked(made: Scenario) -> Scenario:
    """Give the fleet of a scenario ranks, requests, and faults of one or two ranks."""
    dice = random.Random(made.seed ^ 0x4A2C)
    decode = {f"d{number}": 80 for number in range(dice.choice([2, 2, 3]))}
    prefill = dict.fromkeys(made.prefill, 80)
    step_s = dice.choice(STEP_S)
    times = sorted(dice.uniform(FIRST_S, LAST_S) for _ in range(dice.randint(*ASKS)))
    struck_s = times[0] + 4 * made.delay_s + dice.randint(*STRUCK_STEPS) * step_s
    late_s = struck_s + dice.uniform(*LATE_S)
    events = [Event(at_s, _ask(dice, made.routers)) for at_s in (*times, late_s)]
    first, second = _workers(dice, sorted(decode), sorted(prefill))
    events.append(Event(struck_s, _fault(dice, first)))
    if dice.random() < 0.3:
        events.append(Event(struck_s + dice.uniform(0, 1.0), _fault(dice, second)))
    settings = replace(made.config.router, max_requests=64)
    step = replace(made.config.step, max_queue=32, max_sequences=16)
    speculates = dice.random() < 0.5
    proposer: Proposing = random.Random(made.seed ^ 0xD4AF).choice(["oracle", "draft"])
    return replace(
        made,
        config=replace(made.config, router=settings, step=step),
        prefill=prefill,
        decode=decode,
        events=tuple(sorted(events, key=lambda event: event.at_s)),
        step_s=step_s,
        proposer=proposer if speculates else None,
        right_share=dice.choice([0.5, 0.9]),
        ranks=RANKS,
    )


def _workers(dice: random.Random, decode: list[str], prefill: list[str]) -> tuple[str, str]:
    """Return two workers, the first a decode worker in two cases of three."""
    first = dice.choice(decode) if dice.random() < 2 / 3 else dice.choice(prefill)
    second = dice.choice([name for name in (*decode, *prefill) if name != first])
    return first, second


def _ask(dice: random.Random, routers: tuple[str, ...]) -> Ask:
    return Ask(
        router=dice.choice(routers),
        prompt=tuple(dice.randrange(100) for _ in range(dice.randint(1, 32))),
        max_tokens=dice.choice(MAX_TOKENS),
        choices=dice.choice([1, 1, 1, 2]),
        temperature=dice.choice([0.0, 1.0]),
        penalty=1.5 if dice.random() < 0.25 else 1.0,
        seed=dice.randrange(1 << 32),
        deadline_s=20.0,
        leaves_s=dice.uniform(0, 0.2) if dice.random() < 0.1 else None,
    )


def _fault(dice: random.Random, worker: str) -> Fault:
    if dice.random() < 0.5:
        return Fault("rank", (worker,), 0.0, "dies")
    return Fault("rank", (worker,), dice.choice(STOPPED_S), "stops")
