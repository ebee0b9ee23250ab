"""The plan and the outcome of a decode worker's step, as values that the scheduler creates, and the
order of steps between requests that are computed alone and all others. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from baton.decode_worker.sequences import Group, Request, Sequence
from baton.engine.scheduling.batch import Drawn, StepBatch
from baton.engine.scheduling.chunks import Chunk
from baton.runtime.errors import EngineError


@dataclass(slots=True)
class StepPlan:
    """One step: the batch, and the owners of its slices in the same order."""

    batch: StepBatch
    decoding: list[Sequence]
    chunks: list[Chunk[Group]]
    verifies: bool = False  # some slice verifies proposals
    looked: bool = False  # for proposals, whether there were any or not

    def __bool__(self) -> bool:
        return bool(self.batch.slices)


@dataclass(frozen=True, slots=True)
class VerifiedRun:
    """The tokens that a sequence got from one step that verified its proposals: `accepted` of
    `proposed` tokens, then the target's own, unless the last accepted token ends the sequence."""

    sequence: Sequence
    drawn: tuple[Drawn, ...]
    proposed: int
    accepted: int


@dataclass(slots=True)
class StepOutcome:
    """The result of a step: tokens, sequences whose numbers were not finite, sequences that could
    not be computed, and the chunks of prompts that were."""

    drawn: list[tuple[Sequence, Drawn]] = field(default_factory=list)
    runs: list[VerifiedRun] = field(default_factory=list)  # of sequences that are not in `drawn`
    broken: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Sequence, EngineError]] = field(default_factory=list)
    chunks: list[Chunk[Group]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.drawn) + sum(len(run.drawn) for run in self.runs)


class RequestTurns:
    """The alternation of steps: requests that are computed alone use every other step, one after
    another; the others share the rest. The decode scheduler owns it."""

    def __init__(self) -> None:
        self._turns = 0  # steps planned for one request alone
        self._was_alone = False
        self._next: Request | None = None  # has the next step alone; None: the others share it

    def next(self, computable: Collection[Request]) -> Callable[[Request], bool]:
        """Return a predicate: does a request take part in the next step? `computable` are the
        requests that a step could compute tokens of."""
        alone = {each for each in computable if each.alone}
        others = alone and any(not each.alone for each in computable)
        if alone and not (self._was_alone and others):
            request = min(alone, key=lambda each: (each.last_turn, each.arrived_s))
            self._next = request
            return lambda each: each is request
        self._next = None
        return lambda each: not each.alone

    def take(self) -> None:
        """Record that the next step was planned. Until then the requests that take part in it keep
        their turn: a plan without a block for them is empty, and they are planned again."""
        self._was_alone = self._next is not None
        if self._next is not None:
            self._turns += 1
            self._next.last_turn = self._turns
