"""A world of requests with grammars, whose decode workers speculate; faults strike those workers.

    decode worker with sequences that verify ─▶ killed, paused, drained, hung, its messages withheld

Half of the requests end by their grammar, others by `max_tokens` within it. Pure: draws what
draw_scenario.py makes a scenario of.
"""

from __future__ import annotations

import random
from dataclasses import replace

from baton.runtime.grammar.grammar_text import (
    choice_grammar,
    json_schema_grammar,
    regex_grammar,
)
from baton.simulation.fleet.history import Ask
from baton.simulation.fleet.lab_vocabulary import END
from baton.simulation.fleet.scenario import Event, Fault, Proposing, Scenario

GRAMMARS = (
    regex_grammar("[ab]{6,16}(,[a-c]{2,6}){1,3}"),
    regex_grammar("((yes|no|[0-9]{3});){3,6}"),
    choice_grammar(["the stone is in the river", "the stove is in the kitchen", "there is none"]),
    json_schema_grammar(
        {
            "type": "object",
            "properties": {
                "size": {"type": "integer", "minimum": 0, "maximum": 999},
                "kind": {"enum": ["round", "square", None]},
                "names": {"type": "array", "items": {"enum": ["Ada", "Bob"]}, "minItems": 2,
                          "maxItems": 3},
            },
            "required": ["size", "kind", "names"],
        }
    ),
)  # fmt: skip
ASKS = (4, 6)
MAX_TOKENS = (4, 12, 24, 40)
PROPOSERS: tuple[Proposing, ...] = ("oracle", "ngram", "draft", "draft")
RIGHT_SHARES = (0.3, 0.7, 0.9)
WITHHELD = ("outputs", "load", "submit", "cancel", "heartbeat")
BY_ROUTER = ("submit", "cancel", "heartbeat")
FOR_S = (0.1, 0.4, 1.5, 4.0)
FIRST_S, LAST_S = 0.1, 0.12
STRUCK_STEPS = (3, 16)  # of the first answer, whose prompt has been computed
PROMPT_WAYS = 6  # messages before an answer's first token
STEP_S = (0.003, 0.01)


def constrained(made: Scenario) -> Scenario:
    """Give the fleet of a scenario such requests and faults."""
    dice = random.Random(made.seed ^ 0x6AA)
    decode = {f"d{number}": 80 for number in range(2)}
    times = sorted(dice.uniform(FIRST_S, LAST_S) for _ in range(dice.randint(*ASKS)))
    events = [Event(at_s, _ask(dice, made.routers)) for at_s in times]
    step_s = dice.choice(STEP_S)
    struck_s = times[0] + PROMPT_WAYS * made.delay_s + dice.randint(*STRUCK_STEPS) * step_s
    router = dice.choice(made.routers)
    events += [Event(struck_s, _fault(dice, dice.choice(sorted(decode)), router))]
    if dice.random() < 0.4:  # the worker that took over is struck too
        second_s = struck_s + dice.uniform(0.02, 0.3)
        events.append(Event(second_s, _fault(dice, dice.choice(sorted(decode)), router)))
    settings = replace(made.config.router, max_requests=64)
    step = replace(made.config.step, max_queue=32, max_sequences=16)
    return replace(
        made,
        config=replace(made.config, router=settings, step=step),
        prefill=dict.fromkeys(made.prefill, 80),
        decode=decode,
        events=tuple(sorted(events, key=lambda event: event.at_s)),
        step_s=step_s,
        proposer=dice.choice(PROPOSERS),
        right_share=dice.choice(RIGHT_SHARES),
        constrained=True,
    )


def _ask(dice: random.Random, routers: tuple[str, ...]) -> Ask:
    return Ask(
        router=dice.choice(routers),
        prompt=tuple(dice.randrange(100) for _ in range(dice.randint(1, 24))),
        max_tokens=dice.choice(MAX_TOKENS),
        choices=dice.choice([1, 1, 1, 2]),
        temperature=dice.choice([0.0, 1.0]),
        penalty=1.5 if dice.random() < 0.25 else 1.0,
        seed=dice.randrange(1 << 32),
        stops=(END,),
        deadline_s=20.0,
        leaves_s=dice.uniform(0, 0.2) if dice.random() < 0.1 else None,
        top_logprobs=2 if dice.random() < 0.15 else None,
        grammar=dice.choice(GRAMMARS) if dice.random() < 0.8 else "",
    )


def _fault(dice: random.Random, worker: str, router: str) -> Fault:
    kind = dice.choice(["kill", "kill", "pause", "drain", "hang", "withhold", "withhold"])
    for_s = dice.choice(FOR_S)
    if kind == "withhold":
        what = dice.choice(WITHHELD)
        pair = (router, worker) if what in BY_ROUTER else (worker, router)
        return Fault(kind, pair, for_s, what)
    return Fault(kind, (worker,), for_s, "silently" if dice.random() < 0.3 else "")
