"""A scenario: a topology, settings, what clients ask, and what goes wrong.

A scenario is a list of events in order of their time, so that a failing one can be made shorter
by leaving events out. draw_scenario.py makes one of a seed. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from baton.runtime.config import Config
from baton.runtime.registry import Role
from baton.simulation.fleet.engine_kind import HASHES, EngineKind
from baton.simulation.fleet.history import Ask

BLOCK = 4
STOP_S = 0.1  # to stop working, beside steps and ways
LONGEST_STEP = 4.5  # usual ones: of 32 tokens, by chance half as long again
READ_BLOCKS = 3  # of the longest READ
LONGEST_READ = 2.1  # usual ones: of READ_BLOCKS, by chance half as long again

# What decode workers propose: what is about to be drawn, with errors; what the text had before; or
# what a draft model with KV of its own draws.
Proposing: TypeAlias = Literal["oracle", "ngram", "draft"]


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind` with its targets; `for_s` until it is over (a killed process: until it is back)."""

    kind: str
    targets: tuple[str, ...]
    for_s: float
    what: str = ""
    share: float = 1.0  # of the READs; the factor of what is slow

    def __str__(self) -> str:
        return f"{self.kind} {self.what} {' '.join(self.targets)} for {self.for_s:g} s"


@dataclass(frozen=True, slots=True)
class ControlPlan:
    """Two controllers of the fleet: `names` are the workers that were asked for, of which the last
    one leaves first, `least` and `most` the bounds of their number, `start_s` a worker's start."""

    names: tuple[str, ...]
    least: int
    most: int
    start_s: float


@dataclass(frozen=True, slots=True)
class Event:
    at_s: float
    does: Ask | Fault


@dataclass(frozen=True, slots=True)
class Scenario:
    """`blocks` by worker; `step_s`, `delay_s`, `read_s` are the world's usual times. READs take
    turns on a link that moves `blocks_per_s`, where it is given."""

    seed: int
    config: Config
    routers: tuple[str, ...]
    prefill: dict[str, int]
    decode: dict[str, int]
    events: tuple[Event, ...]
    step_s: float
    delay_s: float
    read_s: float
    one_sided: bool  # READs go on while the granter's process is paused
    own_fabric: bool  # READs do not go over the network that is cut
    shuffle: bool
    blocks_per_s: float | None = None
    proposer: Proposing | None = None  # of decode workers; None: they do not speculate
    right_share: float = 1.0  # of the tokens that an oracle proposes
    constrained: bool = False  # workers have the lab's vocabulary, for grammars
    ranks: int = 1  # of each worker; more than one: a worker ends with any of them
    shared_registry: bool = False  # all meet over a Redis server
    named_hosts: bool = False  # workers pace and share their measurements
    wide: tuple[str, ...] = ()  # workers that store KV in another dtype than the others
    sizes: dict[str, int] = field(default_factory=dict)  # of blocks, of workers with others
    control: ControlPlan | None = None  # controllers change roles and the number of workers

    @property
    def faults(self) -> list[Event]:
        return [event for event in self.events if isinstance(event.does, Fault)]

    @property
    def asks(self) -> list[Event]:
        return [event for event in self.events if isinstance(event.does, Ask)]

    @property
    def roles(self) -> dict[str, Role]:
        """Return the roles in which its workers start."""
        prefill: dict[str, Role] = {name: "prefill" for name in self.prefill}
        return prefill | {name: "decode" for name in self.decode}

    @property
    def stops_s(self) -> dict[Role, float]:
        """The time after a request's end from which no worker of a role works for it: two full
        steps, the way to it, and a bit; a prefill worker hears of it after the READs that are in
        flight."""
        decode_s = 2 * LONGEST_STEP * self.step_s + self.delay_s + STOP_S
        read_s = LONGEST_READ * self.read_s
        if self.blocks_per_s is not None:  # one that waits for its turn is dropped
            read_s += READ_BLOCKS / self.blocks_per_s
        return {"decode": decode_s, "prefill": decode_s + self.delay_s + read_s}

    def computed_by(self, kind: EngineKind) -> Scenario:
        """Return the scenario with READs of as many blocks, whatever the size of those, and without
        the grammars of another vocabulary."""
        if kind is HASHES:
            return self
        handoff = self.config.handoff
        blocks = handoff.read_bytes // HASHES.block_bytes(BLOCK)
        handoff = replace(handoff, read_bytes=blocks * kind.block_bytes(BLOCK))
        read = replace(self, config=replace(self.config, handoff=handoff))
        if kind.name == HASHES.name:
            return read
        read = replace(read, wide=(), sizes={})
        plain = tuple([replace(event, does=_without_grammar(event.does)) for event in self.events])
        return replace(read, events=plain, constrained=False)

    def only(self, kept: tuple[int, ...]) -> Scenario:
        """Return the scenario with these of its events alone."""
        return replace(self, events=tuple(self.events[index] for index in kept))


def _without_grammar(does: Ask | Fault) -> Ask | Fault:
    if isinstance(does, Ask) and does.grammar:
        return replace(does, grammar="", stops=())
    return does
