"""Partial silence: one kind of message is withheld, while all others pass.

On handoffs it may last longer than any request, for its reader or granter has to give up; a
checksum thread that is stuck is the same from outside. On links and block feeds it lasts a while.
Pure: draws what draw_scenario.py makes faults and events of.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from baton.simulation.fleet.history import Ask

FOR_S = (0.1, 0.4, 1.5, 4.0)
FOR_EVER_S = 25.0  # longer than any request may take
AT_S = 0.3  # it begins
LATER_S = 3.8  # a request that comes where the silence is known, if it lasts
BY_GRANTER = ("handshake", "opened", "acknowledged", "offer", "checksums", "first_tokens", "failed")
BY_READER = ("handshake", "open", "renew", "closed")
BY_ROUTER = ("hello", "submit", "cancel", "settled", "heartbeat")
BY_WORKER = ("hello", "outputs", "load", "snapshot", "delta")


@dataclass(frozen=True, slots=True)
class Silence:
    """`kind` of fault; its targets are the sender and the receiver, or the granter alone."""

    kind: str
    targets: tuple[str, ...]
    for_s: float
    what: str = ""


def draw_silence(dice: random.Random, granter: str, reader: str, router: str) -> Silence:
    pair, worker = (granter, reader), dice.choice([granter, reader, reader])
    long_s, short_s = dice.choice([*FOR_S, FOR_EVER_S, FOR_EVER_S]), dice.choice(FOR_S)
    return dice.choice(
        [
            *(Silence("withhold", pair, long_s, what) for what in BY_GRANTER),
            *(Silence("withhold", pair[::-1], long_s, what) for what in BY_READER),
            *(Silence("withhold", (router, worker), short_s, what) for what in BY_ROUTER),
            *(Silence("withhold", (worker, router), short_s, what) for what in BY_WORKER),
            *3 * [Silence("checksums", (granter,), long_s)],
            *2 * [Silence("withhold", pair, FOR_EVER_S, "failed")],
        ]
    )


def draw_asks(dice: random.Random, routers: tuple[str, ...]) -> list[tuple[float, Ask]]:
    """Requests and their times: before the silence, as it begins, and later."""
    times = [dice.uniform(0.1, 0.2), dice.uniform(0.1, 0.2), AT_S - 0.005]
    times += [*(AT_S + dice.uniform(-0.02, 0.2) for _ in range(4)), AT_S + LATER_S]
    return [(at_s, _draw_ask(dice, routers)) for at_s in times]


def _draw_ask(dice: random.Random, routers: tuple[str, ...]) -> Ask:
    return Ask(
        router=dice.choice(routers),
        prompt=tuple(dice.randrange(100) for _ in range(dice.randint(2, 22))),
        max_tokens=dice.choice([1, 4, 8, 16]),
        choices=dice.choice([1, 1, 2]),
        temperature=dice.choice([0.0, 1.0]),
        seed=dice.randrange(1 << 32),
        deadline_s=20.0,
        leaves_s=dice.uniform(0, 0.2) if dice.random() < 0.1 else None,
    )
