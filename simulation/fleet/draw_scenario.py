"""Draws the values of a seed's scenario, and runs nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from baton.runtime.config import (
    Config,
    HandoffConfig,
    PoolConfig,
    RouterConfig,
    StepConfig,
    WorkerConfig,
)
from baton.simulation.fleet import partial_silence
from baton.simulation.fleet.constrained_world import constrained
from baton.simulation.fleet.controlled_world import controlled
from baton.simulation.fleet.engine_kind import HASHES
from baton.simulation.fleet.history import Ask
from baton.simulation.fleet.joining_world import joining
from baton.simulation.fleet.ranked_world import ranked
from baton.simulation.fleet.redis_world import over_redis
from baton.simulation.fleet.scenario import BLOCK, READ_BLOCKS, Event, Fault, Scenario
from baton.simulation.fleet.turns_world import sized, talking, unlike

# most fleets are small: a seed's time grows with its links
ROUTERS = (1, 1, 1, 1, 1, 2, 2, 3)
PREFILLS = (1, 1, 1, 2, 2, 2, 3, 4)
DECODES = (1, 1, 2, 2, 2, 2, 2, 3, 3, 4, 5)
PAIR_S = 0.1  # two faults come within this time
LONG_OUTPUT = 60  # tokens: with a prompt, the smallest pool of a worker, which may come to decode
LEAVING = 30  # tokens of a request whose client may leave before
SLOW_READS = 0.25  # of the seeds
TIGHT = 0.15  # of the seeds: pools that cannot hold all that they are asked for
BUSY_STEPS = 8  # the first one, so many steps after a request at most
SLOW_BUSY = (8, 22)  # so many small READs: after a first contact's, while the handoff's go on
STORM_EVERY, STORM_SEED = 20, 13  # seeds
STORMS = (("fails always", "fails always"), ("no memory at all", "fails always"))
HANG_EVERY, HANG_SEED = 40, 16  # seeds
HANG_S = 5.5  # so long a router has time to notice it, and the lab to see what follows
LINK_EVERY, LINK_SEED = 4, 3  # seeds
LINK_S = (0.05, 0.3, 1.0)  # in which the link could carry the first contacts of all workers
CONTACT_BLOCKS = 48  # six READs of eight blocks, from each reader to each granter
WITHHELD_EVERY, WITHHELD_SEED = 10, 5  # seeds
REGISTRY_EVERY, REGISTRY_SEED = 20, 14  # seeds
REGISTRY_S = (0.4, 1.5, 4.0, partial_silence.FOR_EVER_S)
SPECULATING_EVERY, SPECULATING_SEED = 5, 1  # seeds
RANKED_EVERY, RANKED_SEEDS = 40, (12, 28)  # seeds
CONSTRAINED_EVERY, CONSTRAINED_SEEDS = 40, (19, 39)  # seeds
REDIS_EVERY, REDIS_SEEDS = 40, (24, 37)  # seeds
TURNS_EVERY, TURNS_SEEDS = 40, (6, 23, 27, 36)  # seeds
JOINING_EVERY, JOINING_SEED = 200, 20  # seeds
UNLIKE_EVERY, UNLIKE_SEEDS = 200, (60, 100, 140)  # seeds
SIZED_EVERY, SIZED_SEEDS = 200, (80, 120, 160)  # seeds
CONTROLLED_EVERY, CONTROLLED_SEED = 200, 180  # seeds
RIGHT_SHARES = (0.3, 0.8, 0.8, 1.0)
READ_FAULTS = ("failed", "stuck", "corrupt", "short", "wrong", "stale")


def draw(seed: int) -> Scenario:
    """The scenario of a seed, always the same. In one of STORM_EVERY, many ask and workers fail
    all that they are given; in one of HANG_EVERY, one prefill worker hangs as another fails; in
    one of LINK_EVERY, READs share a link; in one of WITHHELD_EVERY, one kind of message is
    withheld; in one of REGISTRY_EVERY, the registry cannot be read; in one of SPECULATING_EVERY,
    decode workers speculate; in two of CONSTRAINED_EVERY, they do, and requests have
    grammars; in two of RANKED_EVERY, workers have ranks, one of which is lost; in two of
    REDIS_EVERY, all meet over a Redis server; in four of TURNS_EVERY, conversations have
    several turns; in three of UNLIKE_EVERY, so they have, between workers of unlike KV dtypes; in
    three of SIZED_EVERY, between workers with blocks of unlike sizes; in one of JOINING_EVERY, a
    worker joins a loaded fleet; and in one of CONTROLLED_EVERY, two controllers change it."""
    made = _speculating(_linked(_usual(seed)))
    if seed % HANG_EVERY == HANG_SEED:
        return _one_hangs(made)
    if seed % WITHHELD_EVERY == WITHHELD_SEED:
        return _withheld(made)
    if seed % REGISTRY_EVERY == REGISTRY_SEED:
        return _unread_registry(made)
    if seed % CONSTRAINED_EVERY in CONSTRAINED_SEEDS:
        return _linked(constrained(made))
    if seed % RANKED_EVERY in RANKED_SEEDS:
        return _linked(ranked(made))
    if seed % REDIS_EVERY in REDIS_SEEDS:
        return over_redis(made)
    if seed % TURNS_EVERY in TURNS_SEEDS:
        return _linked(talking(made))
    if seed % JOINING_EVERY == JOINING_SEED:
        return joining(made)
    if seed % CONTROLLED_EVERY == CONTROLLED_SEED:
        return controlled(made)
    if seed % UNLIKE_EVERY in UNLIKE_SEEDS:
        return unlike(talking(made))
    if seed % SIZED_EVERY in SIZED_SEEDS:
        return sized(talking(made))
    return _storm(made) if seed % STORM_EVERY == STORM_SEED else made


def _usual(seed: int) -> Scenario:
    """Draw a usual scenario. In some, READs are slow beside the lease, and what is cut is the way
    between a reader and its granter, while READs go on; in some, outputs are long and pools
    small, so that sequences are preempted."""
    dice = random.Random(seed)
    slow, tight = dice.random() < SLOW_READS, dice.random() < TIGHT
    routers = tuple(f"r{n}" for n in range(dice.choice(ROUTERS)))
    prefills = dice.choice([1, 1, 2] if slow else PREFILLS)
    decodes = dice.choice([1, 2] if slow or tight else DECODES)
    prefill = {f"p{n}": dice.choice([24, 32, 64]) for n in range(prefills)}
    decode = {f"d{n}": 24 if tight else dice.choice([24, 40, 80]) for n in range(decodes)}
    step_s = dice.choice([0.001, 0.003, 0.01])
    read_s = dice.choice([0.02, 0.04]) if slow else dice.choice([0.0, 0.001, 0.01])
    asks = _asks(dice, routers, tight=tight)
    after_s = dice.uniform(*SLOW_BUSY) * read_s if slow else dice.uniform(0, BUSY_STEPS) * step_s
    first_s = dice.choice(asks[3:]).at_s + after_s
    fleet = _Fleet(routers, tuple(prefill), tuple(decode))
    faults = _faults(dice, first_s, fleet, between=slow and dice.random() < 0.7)
    return Scenario(
        seed=seed,
        config=_config(dice, read_s, slow=slow),
        routers=routers,
        prefill=prefill,
        decode=decode,
        events=tuple(sorted([*asks, *faults], key=lambda event: event.at_s)),
        step_s=step_s,
        delay_s=dice.choice([0.0002, 0.001, 0.01, 0.03]),
        read_s=read_s,
        one_sided=dice.random() < 0.5,
        own_fabric=slow or dice.random() < 0.5,
        shuffle=dice.random() < 0.5,
    )


def _speculating(made: Scenario) -> Scenario:
    """Decode workers propose what the model is about to draw, and err now and then."""
    if made.seed % SPECULATING_EVERY != SPECULATING_SEED:
        return made
    dice = random.Random(made.seed ^ 0x5BEC)
    return replace(made, proposer="oracle", right_share=dice.choice(RIGHT_SHARES))


def _linked(made: Scenario) -> Scenario:
    """The more workers, the faster: all first contacts together take no longer than LINK_S."""
    if made.seed % LINK_EVERY != LINK_SEED:
        return made
    within_s = random.Random(made.seed ^ 0x11C).choice(LINK_S)
    pairs = len(made.prefill) * len(made.decode)
    return replace(made, blocks_per_s=CONTACT_BLOCKS * pairs / within_s)


def _storm(made: Scenario) -> Scenario:
    """More requests at once than may be moved, while one decode worker or two fail every step,
    or have no memory for any, and another does not: what failed is moved as the budget allows,
    and one of those that fail is passed over. Lines and batches are short."""
    dice = random.Random(made.seed ^ 0x570)
    decode = {f"d{n}": 64 for n in range(dice.choice([2, 3, 3, 4]))}
    asks = [
        Ask(
            router="r0",
            prompt=tuple(dice.randrange(100) for _ in range(dice.randint(2, 12))),
            max_tokens=dice.choice([2, 4, 6]),
            temperature=dice.choice([0.0, 1.0]),
            seed=dice.randrange(1 << 32),
            deadline_s=dice.choice([0.5, 20.0, 20.0, 20.0]),
            leaves_s=dice.uniform(0, 0.2) if dice.random() < 0.1 else None,
        )
        for _ in range(dice.randint(12, 16))
    ]
    events = [Event(dice.uniform(0.1, 0.2), ask) for ask in asks]
    events.sort(key=lambda event: event.at_s)
    failing = dice.sample(sorted(decode), min(2, len(decode) - 1))
    for_s = dice.choice([0.1, 0.4, 1.5])
    at_s = events[3].at_s + made.step_s
    router = replace(
        made.config.router,
        max_requests=dice.choice([8, 64, 64]),
        retry_floor=dice.choice([1, 2]),
    )
    step = replace(made.config.step, max_queue=dice.choice([2, 32, 32]), max_sequences=3)
    faults = [
        Event(at_s, Fault("step", (name,), for_s, what))
        for name, what in zip(failing, dice.choice(STORMS), strict=False)
    ]
    return replace(
        made,
        config=replace(made.config, router=router, step=step),
        routers=("r0",),
        prefill={"p0": 64},
        decode=decode,
        events=tuple(sorted([*events, *faults], key=lambda event: event.at_s)),
    )


def _one_hangs(made: Scenario) -> Scenario:
    """One prefill worker hangs, and another fails what it has: requests turn from it to the one
    that hangs. Before, all have computed prompts: how long theirs take is known."""
    dice = random.Random(made.seed ^ 0x4A6)
    prefill = [f"p{n}" for n in range(dice.choice([2, 2, 3]))]
    hung, failing = dice.sample(prefill, 2)
    at_s = 0.5
    times = [dice.uniform(0.1, 0.2) for _ in (*prefill, *prefill)]
    times += [at_s - 0.01, *(at_s + dice.uniform(-0.02, 0.06) for _ in range(3))]
    asks = [
        Ask(
            router="r0",
            prompt=tuple(dice.randrange(100) for _ in range(dice.randint(20, 32))),
            max_tokens=dice.choice([1, 2, 4]),
            choices=dice.choice([1, 1, 2]),
            temperature=dice.choice([0.0, 1.0]),
            seed=dice.randrange(1 << 32),
            deadline_s=20.0,
        )
        for _ in times
    ]
    events = [Event(when_s, ask) for when_s, ask in zip(times, asks, strict=True)]
    events.append(Event(at_s, Fault("hang", (hung,), HANG_S)))
    events.append(Event(at_s + dice.uniform(0, PAIR_S), _failing(dice, failing)))
    router = replace(made.config.router, max_requests=64, placement="disaggregated")
    step = replace(made.config.step, max_queue=32, max_sequences=16)
    return replace(
        made,
        config=replace(made.config, router=router, step=step),
        routers=("r0",),
        prefill=dict.fromkeys(prefill, 80),
        decode={f"d{n}": 80 for n in range(dice.choice([1, 2]))},
        events=tuple(sorted(events, key=lambda event: event.at_s)),
        step_s=0.01,
    )


def _withheld(made: Scenario) -> Scenario:
    """Withhold one kind of message; requests come before, during and after it."""
    dice = random.Random(made.seed ^ 0x517)
    prefill, decode = sorted(made.prefill), sorted(made.decode)
    granter, reader, router = map(dice.choice, (prefill, decode, made.routers))
    silence = partial_silence.draw_silence(dice, granter, reader, router)
    faults = [Fault(silence.kind, silence.targets, silence.for_s, silence.what)]
    if silence.what == "failed":  # else there is nothing to tell
        faults.append(Fault("step", (granter,), 1.5, "fails always"))
    events = [Event(partial_silence.AT_S, fault) for fault in faults]
    events += [Event(at_s, ask) for at_s, ask in partial_silence.draw_asks(dice, made.routers)]
    settings = replace(made.config.router, max_requests=64, placement="disaggregated")
    step = replace(made.config.step, max_queue=32, max_sequences=16)
    return replace(
        made,
        config=replace(made.config, router=settings, step=step),
        prefill=dict.fromkeys(prefill, 80),
        decode=dict.fromkeys(decode, 80),
        events=tuple(sorted(events, key=lambda event: event.at_s)),
    )


def _unread_registry(made: Scenario) -> Scenario:
    """Make the registry hang or fail while decode workers need prefill workers that they have not
    contacted; in half of these scenarios a prefill worker restarts as well."""
    dice = random.Random(made.seed ^ 0x4E6)
    asks = made.asks
    at_s = asks[3].at_s + dice.uniform(0, BUSY_STEPS) * made.step_s
    for_s, what = dice.choice(REGISTRY_S), dice.choice(["hangs", "hangs", "cannot be read"])
    faults = [Event(at_s, Fault("registry", ("registry",), for_s, what))]
    if dice.random() < 0.5:
        struck_s = at_s + dice.uniform(0, PAIR_S)
        faults.append(Event(struck_s, Fault("kill", ("p0",), dice.choice([0.1, 0.4]))))
    later = [
        Event(at_s + dice.uniform(0, partial_silence.LATER_S), replace(event.does, deadline_s=20.0))
        for event in asks
        if isinstance(event.does, Ask)
    ]
    settings = replace(made.config.router, placement="disaggregated")
    return replace(
        made,
        config=replace(made.config, router=settings),
        events=tuple(sorted([*asks, *later, *faults], key=lambda event: event.at_s)),
    )


def _failing(dice: random.Random, prefill: str) -> Fault:
    for_s = dice.choice([0.4, 1.5])
    kinds = [("kill", ""), ("reads", "failed"), ("step", "fails always")]
    kind, what = dice.choice(kinds)
    return Fault(kind, (prefill,), for_s, what)


@dataclass(frozen=True, slots=True)
class _Fleet:
    routers: tuple[str, ...]
    prefill: tuple[str, ...]
    decode: tuple[str, ...]


def _config(dice: random.Random, read_s: float, *, slow: bool) -> Config:
    return Config(
        router=RouterConfig(
            placement="disaggregated" if slow else dice.choice(["auto", "disaggregated"]),
            max_requests=dice.choice([8, 64, 64]),
            stream_buffer_messages=dice.choice([8, 64]),
            link_heartbeat_s=0.5,
            link_silence_s=1.2,
            link_grace_s=0.5,
        ),
        pool=PoolConfig(block_size=BLOCK),
        step=StepConfig(
            prefill_tokens=32,
            chunk_tokens=dice.choice([8, 16]),
            local_prefill_tokens=dice.choice([4, 16]),
            expected_growth_tokens=dice.choice([1, 8]),
            max_sequences=dice.choice([3, 16]),
            max_queue=dice.choice([4, 32, 32]),
            waiting_share=dice.choice([0.5, 1.0]),
        ),
        worker=WorkerConfig(drain_s=dice.choice([0.01, 1.0])),
        handoff=HandoffConfig(
            lease_s=dice.choice([0.15, 0.25]) if slow else dice.choice([0.3, 0.5, 1.0]),
            read_timeout_s=max(8 * read_s, dice.choice([0.1, 0.4, 2.0])),
            read_bytes=(1 if slow else dice.choice([1, READ_BLOCKS])) * HASHES.block_bytes(BLOCK),
            window_reads=1 if slow else dice.choice([1, 2, 4]),
        ),
    )


def _asks(dice: random.Random, routers: tuple[str, ...], *, tight: bool) -> list[Event]:
    # of few kinds of blocks: the same block follows different ones
    kinds = [[dice.randrange(100) for _ in range(BLOCK)] for _ in range(3)]
    prefixes = [sum((dice.choice(kinds) for _ in range(6)), []) for _ in range(3)]
    events = []
    for _ in range(dice.randint(4, 5)):
        prompt = list(dice.choice(prefixes))[: dice.randint(1, 24)]
        prompt += [dice.randrange(100) for _ in range(dice.choice([0, 1, 3, 8]))]
        max_tokens = dice.choice([8, 12, LONG_OUTPUT] if tight else [1, 1, 2, 3, 4, 4, 6, 6, 8, 16])
        leaves = dice.random() < 0.15
        ask = Ask(
            router=dice.choice(routers),
            prompt=tuple(prompt),
            max_tokens=LEAVING if leaves else max_tokens,
            choices=dice.choice([1, 1, 1, 1, 1, 2, 3]),
            temperature=dice.choice([0.0, 1.0]),
            penalty=1.5 if dice.random() < 0.25 else 1.0,
            seed=dice.randrange(1 << 32),
            stops=tuple(range(50)) if dice.random() < 0.2 else (),
            salt=dice.choice([b"", b"", b"tenant"]),
            deadline_s=dice.choice([0.02, 0.2, 0.5, 2.0]) if dice.random() < 0.25 else 20.0,
            leaves_s=dice.uniform(0, 0.2) if leaves else None,
            enough=dice.randint(1, max_tokens) if dice.random() < 0.1 else None,
            reads_s=dice.choice([0.01, 0.2]) if dice.random() < 0.1 else 0.0,
            top_logprobs=dice.choice([0, 2]) if dice.random() < 0.15 else None,
        )
        events.append(Event(dice.uniform(0.1, 0.25), ask))
    return sorted(events, key=lambda event: event.at_s)


def _faults(
    dice: random.Random,
    first_s: float,
    fleet: _Fleet,
    *,
    between: bool,
) -> list[Event]:
    """None, one, or two within PAIR_S; `between`: the first cuts a reader from its granter."""
    count = dice.choice([0, 1, 1, 1, 1, 2, 2, 2, 2, 2])
    times = [first_s, first_s + dice.uniform(0, PAIR_S)][:count]
    faults = [_fault(dice, fleet) for _ in times]
    if between and faults:
        pair = (dice.choice(fleet.prefill), dice.choice(fleet.decode))
        faults[0] = Fault("cut", pair, dice.choice([0.4, 1.5]), "both")
    return [Event(at_s, fault) for at_s, fault in zip(times, faults, strict=True)]


def _fault(dice: random.Random, fleet: _Fleet) -> Fault:
    routers, prefill, decode = fleet.routers, fleet.prefill, fleet.decode
    kind = dice.choices(
        ["kill", "pause", "slow", "hang", "drain", "role", "cut", "reset", "reads", "step"],
        [4, 3, 1, 1, 2, 2, 4, 2, 5, 2],
    )[0]
    any_worker = dice.choice([*prefill, *decode, dice.choice(decode)])
    for_s = dice.choice([0.02, 0.1, 0.4, 1.5, 4.0])
    if kind in ("kill", "pause", "slow"):
        target = dice.choice(routers) if dice.random() < 0.15 else any_worker
        what = dice.choice(["", "silently"]) if kind == "kill" else ""
        return Fault(kind, (target,), for_s, what, share=dice.choice([5.0, 30.0]))
    if kind in ("cut", "reset"):
        pairs = [(dice.choice(routers), any_worker), (dice.choice(prefill), dice.choice(decode))]
        pair = dice.choice(pairs)
        if dice.random() < 0.5:
            pair = pair[::-1]
        ways = ["both", "one way"] if kind == "cut" else ["both ends", "one end"]
        return Fault(kind, pair, for_s, dice.choice(ways))
    if kind == "reads":
        share = dice.choice([0.2, 1.0])
        return Fault(kind, (dice.choice(prefill),), for_s, dice.choice(READ_FAULTS), share)
    if kind in ("hang", "drain", "role"):
        return Fault(kind, (any_worker,), for_s)
    return Fault(kind, (any_worker,), for_s, dice.choice(["fails", "breaks a slice", "no memory"]))
