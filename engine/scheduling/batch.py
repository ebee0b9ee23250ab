"""The `Engine` seam: what a step is, what comes back, and who may run it.

A step is a list of slices. A prefill chunk, a decode token and a speculative run are all
slices: tokens of one sequence whose KV is to be computed. The engine knows no requests, no
schedulers and no text; the caller owns the block tables and promises that the blocks of a step
are neither freed nor shared for writing until its result is in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from baton.engine.scheduling.token_history import History
from baton.runtime.errors import EngineError
from baton.runtime.sampling import SamplingParams

__all__ = [
    "Done",
    "DraftWork",
    "Draw",
    "Drawn",
    "Engine",
    "NOTHING",
    "Scores",
    "Scoring",
    "SamplingParams",
    "Slice",
    "StepBatch",
    "StepHandle",
    "Started",
    "StepResult",
    "continued",
    "fed",
    "forsake",
    "unfinished",
]


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to draw from the logits of a slice's last token, or of one of its rows where it
    verifies proposals."""

    choice: int
    position: int  # absolute position of the token to be drawn
    params: SamplingParams
    history: History | None = None  # prompt and output so far; only where params.needs_history


@dataclass(frozen=True, slots=True)
class Scoring:
    """Known tokens whose log-probabilities are wanted: target i follows token i of the slice."""

    targets: Sequence[int]
    top: int  # so many of the best tokens beside each


@dataclass(slots=True)
class Scores:
    """Of the targets of one slice, in their order; of the best tokens `Scoring.top` for each,
    best first, joined."""

    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)  # 1: the most likely token
    top_tokens: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DraftWork:
    """What a draft model computes of a slice: KV of its tokens and of those that it has missed,
    then proposals. Where it proposes, the slice holds one known token and `tokens` + 1 draws,
    whose histories miss the proposals, and its blocks cover the proposals too."""

    missing: Sequence[int] = ()  # tokens before `start` whose draft KV is not in the blocks
    tokens: int = 0  # to propose at most, in the same step, before the target verifies


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens of one sequence to compute, after `start` tokens that are in its blocks already.

        plain          t                draws: of t; several for the choices of one prompt
        verification   t  p1  p2  p3    proposed = 3: draw i is made from the logits of token i,
                       │  │   │   │     with the history after p1 to pi; `drawn` ends with the
                       d0 d1  d2  d3    first that differs from its proposal (d0 from p1, ..)

    So the tokens drawn are those of plain decoding, whatever was proposed. KV of rejected proposals
    is written behind the accepted ones, and written over by the steps that follow.
    """

    tokens: Sequence[int]
    start: int  # position of tokens[0]
    blocks: Sequence[int]  # block table, covering start + len(tokens)
    draws: tuple[Draw, ...] = ()  # none: not the last chunk
    # Place, in the step submitted before, of the slice whose first draw is the only token here
    # (`tokens` then holds one 0): so that a step can be submitted before that one's result is in.
    # That token is missing at the end of the draws' histories, too.
    feed: int | None = None
    scoring: Scoring | None = None
    proposed: int = 0  # of `tokens`, all but the first: proposals; as many draws, and one more
    draft: DraftWork | None = None  # None: a draft model computes nothing of it


@dataclass(frozen=True, slots=True)
class StepBatch:
    slices: tuple[Slice, ...]
    copies: tuple[tuple[int, int], ...] = ()  # whole blocks (source, target), before the slices


NOTHING = StepBatch(())  # to compute


@dataclass(frozen=True, slots=True)
class Drawn:
    """A drawn token. `logprob` and `top` are of the distribution before temperature and
    truncation, after penalties and bias; present where the params ask for them."""

    choice: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """`drawn[i]` are the draws of slice i, in the order of its `draws`; of one that verifies, those
    up to the first that differs from its proposal. A slice whose logits were not finite has its
    index in `broken`, one that could not be computed has its error in `failed`; both have no
    draws. The others are unharmed."""

    drawn: tuple[tuple[Drawn, ...], ...]
    device_s: float = 0.0
    broken: frozenset[int] = field(default_factory=frozenset)
    failed: Mapping[int, EngineError] = field(default_factory=dict)
    shortages: int = 0  # how often memory was short, so that slices were run again in parts
    scores: Mapping[int, Scores] = field(default_factory=dict)  # of the slices with a `scoring`
    proposed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # by a draft model
    draft_s: float = 0.0  # of `device_s`


def fed(batch: StepBatch, before: StepResult | None) -> StepBatch:
    """`batch` with the drawn tokens of the step before in place of its feeds, and at the end of
    the histories that miss them. A slice that is broken or has failed feeds token 0. Raises
    EngineError if there is no such draw."""
    if all(item.feed is None for item in batch.slices):
        return batch
    slices = list(batch.slices)
    for index, item in enumerate(slices):
        if item.feed is None:
            continue
        known = before is not None and 0 <= item.feed < len(before.drawn)
        drawn = before.drawn[item.feed] if before and known else ()
        lost = before is not None and (item.feed in before.broken or item.feed in before.failed)
        if len(item.tokens) != 1 or not (drawn or lost):
            raise EngineError(f"slice {index}: slice {item.feed} of the step before drew nothing")
        token = drawn[0].token if drawn else 0
        draws = tuple([continued(draw, (token,)) for draw in item.draws])
        slices[index] = replace(item, tokens=(token,), draws=draws, feed=None)
    return StepBatch(tuple(slices))


def continued(draw: Draw, tokens: Sequence[int]) -> Draw:
    """Return `draw` with `tokens` at the end of its history, where it has one."""
    if draw.history is None or not tokens:
        return draw
    history = draw.history
    for token in tokens:
        history = history.continued(token)
    return replace(draw, history=history)


def unfinished(batch: StepBatch) -> StepResult:
    """What a step that failed as a whole is to the next one: each of its slices has failed. So
    it feeds only requests that are over, and the others of the next step go on."""
    failed = dict.fromkeys(range(len(batch.slices)), EngineError("its step failed"))
    return StepResult(((),) * len(batch.slices), failed=failed)


class Started(Protocol):
    """A step that a runner has started, and that may not be over."""

    def result(self) -> StepResult:
        """Wait for it. Raises what the device raised."""
        ...


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was over when its runner's `start` returned."""

    found: StepResult

    def result(self) -> StepResult:
        return self.found


def forsake(result: asyncio.Future[StepResult]) -> None:
    """Nobody awaits it any more, so asyncio must not take its error for one that was missed."""
    result.add_done_callback(lambda over: over.cancelled() or over.exception())


class StepHandle(Protocol):
    def result(self) -> Awaitable[StepResult]:
        """Wait for the step. Raises EngineError if the device failed, DeviceLost if it does not
        answer: that is the end of the worker."""
        ...

    def forsake(self) -> None:
        """Nobody will wait for the step: what it raises is nobody's."""
        ...


class Engine(Protocol):
    """Device work. Steps run in the order of submission; `submit` never blocks."""

    def submit(self, batch: StepBatch) -> StepHandle: ...

    async def close(self) -> None: ...
