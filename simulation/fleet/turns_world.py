"""A world of conversations: each turn's prompt is the one before with its answer and new tokens.

    turn 1 ─ answer ─▶ turn 2 = turn 1 + answer + new tokens ─▶ turn 3 ...
                          └ a prefill worker READs the answer from the decode worker that made it

What strikes, strikes a decode worker as the granter of such a READ, or the prefill worker that
reads, about when a later turn comes. Some decode workers speculate; some workers have ranks, one of
which is lost; some change their role. Pure: draws what draw_scenario.py makes a scenario of.
"""

from __future__ import annotations

import random
from dataclasses import replace

from baton.simulation.fleet.history import Ask
from baton.simulation.fleet.partial_silence import BY_GRANTER, BY_READER, FOR_EVER_S
from baton.simulation.fleet.scenario import Event, Fault, Proposing, Scenario

TALKS = (3, 4)
TURNS = (2, 3)
FIRST_TOKENS = (4, 24)
ANSWER_TOKENS = (20, 28, 36)
NEW_TOKENS = (1, 8)
FIRST_S = (0.1, 0.16)
TURN_S, SPREAD_S = 0.7, 0.05  # from turn to turn: the one before has ended, if nothing strikes
STRUCK_S = (-0.01, 0.06)  # after a turn
STEP_S = (0.001, 0.003)
BLOCKS = 120
RANKS = (1, 1, 1, 2)
RANK_FAULTS = (("dies", 0.0), ("stops", 0.4), ("stops", 6.0))
PROPOSERS: tuple[Proposing | None, ...] = (None, None, "oracle", "ngram")
RIGHT_SHARES = (0.3, 0.8)
SIZES = (8, 16)  # tokens of a block, of workers with larger ones
FOR_S = (0.1, 0.4, 1.5, 4.0)
READ_FAULTS = ("failed", "stuck", "corrupt", "short", "wrong", "stale")


def talking(made: Scenario) -> Scenario:
    """Give a scenario conversations, and faults of workers that read each other's history."""
    dice = random.Random(made.seed ^ 0x7A1C)
    prefill = [f"p{number}" for number in range(dice.choice([1, 1, 2]))]
    decode = [f"d{number}" for number in range(dice.choice([1, 2, 2, 3]))]
    events: list[Event] = []
    for _ in range(dice.randint(*TALKS)):
        events += _talk(dice, dice.choice(made.routers))
    later = [event.at_s for event in events if event.at_s > FIRST_S[1]]
    struck_s = dice.choice(later) + dice.uniform(*STRUCK_S)
    events.append(Event(struck_s, _fault(dice, dice.choice(prefill), dice.choice(decode))))
    if dice.random() < 0.4:
        again = _fault(dice, dice.choice(prefill), dice.choice(decode))
        events.append(Event(struck_s + dice.uniform(0, TURN_S), again))
    if dice.random() < 0.3:  # the reader holds nothing of the history
        events.append(Event(FIRST_S[1] + 0.01, Fault("kill", (prefill[0],), 0.05)))
    router = replace(made.config.router, max_requests=64, placement="disaggregated")
    step = replace(made.config.step, max_queue=32, max_sequences=16)
    # The lab's blocks are so small that each pair would count as degraded after its first contact,
    # and would compute history rather than read it slowly.
    handoff = replace(made.config.handoff, preflight_floor_gb_per_s=0.0)
    ranks = dice.choice(RANKS)
    if ranks > 1:
        what, for_s = dice.choice(RANK_FAULTS)
        fault = Fault("rank", (dice.choice([*prefill, *decode]),), for_s, what)
        events.append(Event(dice.choice(later) + dice.uniform(*STRUCK_S), fault))
    elif len(prefill) > 1 and len(decode) > 1 and dice.random() < 0.5:
        fault = Fault("role", (dice.choice([*prefill, *decode]),), dice.choice(FOR_S))
        events.append(Event(dice.choice(later) + dice.uniform(*STRUCK_S), fault))
    return replace(
        made,
        config=replace(made.config, router=router, step=step, handoff=handoff),
        prefill=dict.fromkeys(prefill, BLOCKS),
        decode=dict.fromkeys(decode, BLOCKS),
        events=tuple(sorted(events, key=lambda event: event.at_s)),
        step_s=dice.choice(STEP_S),
        proposer=dice.choice(PROPOSERS),
        right_share=dice.choice(RIGHT_SHARES),
        ranks=ranks,
    )


def unlike(made: Scenario) -> Scenario:
    """Let the workers of one role store KV in another dtype than those of the other role: both
    convert for their readers. None changes its role: what the only decode worker of a dtype has
    begun could not go on."""
    dice = random.Random(made.seed ^ 0xD7E5)
    kept = [each for each in made.events if getattr(each.does, "kind", "") != "role"]
    wide = tuple(dice.choice([made.prefill, made.decode]))
    return replace(made, wide=wide, events=tuple(kept))


def sized(made: Scenario) -> Scenario:
    """Let some workers have larger blocks than the others: all of one role, or one of a role with
    several. In some scenarios the roles differ in their KV dtype too, or a draft model proposes."""
    dice = random.Random(made.seed ^ 0x512E)
    role = dice.choice([made.prefill, made.decode])
    named = list(role) if dice.random() < 0.7 else [dice.choice(list(role))]
    sizes = dict.fromkeys(named, dice.choice(SIZES))
    step = replace(made.config.step, chunk_tokens=max(SIZES), local_prefill_tokens=max(SIZES))
    made = replace(made, sizes=sizes, config=replace(made.config, step=step))
    if dice.random() < 0.3:
        return unlike(made)
    return replace(made, proposer="draft") if dice.random() < 0.4 else made


def _talk(dice: random.Random, router: str) -> list[Event]:
    prompt = tuple(dice.randrange(100) for _ in range(dice.randint(*FIRST_TOKENS)))
    at_s, events = dice.uniform(*FIRST_S), []
    for _ in range(dice.randint(*TURNS)):
        ask = Ask(
            router=router,
            prompt=prompt,
            max_tokens=dice.choice(ANSWER_TOKENS),
            temperature=dice.choice([0.0, 1.0]),
            seed=dice.randrange(1 << 32),
            deadline_s=20.0,
            leaves_s=dice.uniform(0, 0.1) if dice.random() < 0.05 else None,
        )
        events.append(Event(at_s, ask))
        new = [dice.randrange(100) for _ in range(dice.randint(*NEW_TOKENS))]
        prompt = (*prompt, *ask.expected(0), *new)
        at_s += TURN_S + dice.uniform(0, SPREAD_S)
    return events


def _fault(dice: random.Random, reader: str, granter: str) -> Fault:
    for_s = dice.choice(FOR_S)
    kind = dice.choice(
        ["kill", "pause", "slow", "drain", "cut", "withhold", "checksums", *4 * ["reads"]]
    )
    if kind == "reads":
        what, share = dice.choice(READ_FAULTS), dice.choice([0.3, 1.0])
        return Fault(kind, (granter,), for_s, what, share)
    if kind == "cut":
        return Fault(kind, (reader, granter), for_s, dice.choice(["both", "one way"]))
    if kind == "withhold":
        long_s = dice.choice([for_s, FOR_EVER_S])
        if dice.random() < 0.5:
            return Fault(kind, (reader, granter), long_s, dice.choice(BY_READER))
        messages = {*BY_GRANTER, "held"} - {"first_tokens", "failed"}  # which it does not send
        return Fault(kind, (granter, reader), long_s, dice.choice(sorted(messages)))
    what = dice.choice(["", "silently"]) if kind == "kill" else ""
    return Fault(kind, (granter,), for_s, what, share=dice.choice([5.0, 30.0]))
