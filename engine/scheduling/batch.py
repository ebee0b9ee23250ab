"""The steps of an engine: batches of slices, and their results.

A step is a list of slices. A prefill chunk, a decode token and a speculative run are all
slices: tokens of one sequence whose KV is to be computed. The engine knows no requests, no
schedulers and no text. The caller owns the block tables and guarantees that the blocks of a step
are neither freed nor shared for writing until its result is in.

No value is changed once it is made. `Slice`, `Draw` and `Drawn` are nevertheless not frozen: a step
has hundreds of each, and to create a frozen one takes about six times as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from baton.engine.scheduling.token_history import History
from baton.runtime.errors import EngineError
from baton.runtime.sampling import SamplingParams


class AllowedTokens(Protocol):
    """The tokens that a grammar admits at one position of an output."""

    def bitmask(self) -> bytes | None:
        """Wait for the mask: one bit for each token id, lowest first; a token beyond its end is not
        admitted. None: all are."""
        ...

    def extended(self, tokens: Sequence[int]) -> AllowedTokens:
        """Return the mask after these tokens too. It is computed from now on, beside the step."""
        ...


@dataclass(slots=True)
class Draw:
    """One token to draw from the logits of a slice's last token, or of one of its rows where it
    verifies proposals."""

    choice: int
    position: int  # absolute position of the token to be drawn
    params: SamplingParams
    history: History | None = None  # prompt and output so far; only where params.needs_history
    allowed: AllowedTokens | None = None  # by the request's grammar; None: it has none


@dataclass(frozen=True, slots=True)
class Scoring:
    """Known tokens whose log-probabilities are computed: target i follows token i of the slice."""

    targets: Sequence[int]
    top: int  # most likely tokens to return per target


@dataclass(slots=True)
class Scores:
    """Log-probabilities of one slice's targets, in their order, and for each target the
    `Scoring.top` most likely tokens, best first, concatenated."""

    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)  # 1: the most likely token
    top_tokens: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DraftWork:
    """The work of a draft model on a slice: KV of its tokens and of earlier tokens without draft
    KV, then proposals. If it proposes, the slice holds one known token and `tokens` + 1 draws,
    whose histories lack the proposals, and its blocks cover the proposals too."""

    missing: Sequence[int] = ()  # tokens before `start` whose draft KV is not in the blocks
    tokens: int = 0  # to propose at most, in the same step, before the target verifies


@dataclass(slots=True)
class Slice:
    """Tokens of one sequence to compute, after `start` tokens whose KV is in its blocks.

        plain          t                draws: of t; several for the choices of one prompt
        verification   t  p1  p2  p3    proposed = 3: draw i is made from the logits of token i,
                       │  │   │   │     with the history after p1 to pi; `drawn` ends with the
                       d0 d1  d2  d3    first that differs from its proposal (d0 from p1, ..)

    The drawn tokens thus equal those of plain decoding for any proposals. KV of rejected proposals
    is written after that of the accepted ones and overwritten by later steps.
    """

    tokens: Sequence[int]
    start: int  # position of tokens[0]
    blocks: Sequence[int]  # block table, covering start + len(tokens)
    draws: tuple[Draw, ...] = ()  # none before the last chunk
    # Index, in the previously submitted step, of the slice whose first drawn token is this slice's
    # only token (`tokens` then holds one 0), so that a step can be submitted before the result of
    # the previous one is known. The draws' histories lack that token at their end as well.
    feed: int | None = None
    scoring: Scoring | None = None
    proposed: int = 0  # `tokens` after the first that are proposals; draws: one more
    draft: DraftWork | None = None  # None: no draft model work


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The slices of one step, and the block copies that precede them."""

    slices: tuple[Slice, ...]
    copies: tuple[tuple[int, int], ...] = ()  # blocks (source, target), before the slices


EMPTY_BATCH = StepBatch(())


@dataclass(slots=True)
class Drawn:
    """A drawn token. `logprob` and `top` describe the distribution after penalties and bias,
    before temperature and truncation; they are present where the params request them."""

    choice: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step. `drawn[i]` are the tokens of slice i, in the order of its `draws`; a
    slice that verifies has those up to the first that differs from its proposal. `broken` has the
    index of each slice whose logits were not finite, `failed` the error of each slice that could
    not be computed; both have no drawn tokens. Other slices are unaffected."""

    drawn: tuple[tuple[Drawn, ...], ...]
    device_s: float = 0.0
    broken: frozenset[int] = field(default_factory=frozenset)
    failed: Mapping[int, EngineError] = field(default_factory=dict)
    shortages: int = 0  # times memory ran out and slices were run again in parts
    scores: Mapping[int, Scores] = field(default_factory=dict)  # by index of slices with `scoring`
    proposed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # by a draft model
    draft_s: float = 0.0  # of `device_s`
    interval_s: float | None = None  # from the end of the step before, which this one followed


def resolve_feeds(batch: StepBatch, before: StepResult | None) -> StepBatch:
    """Replace the feeds of `batch` with the tokens that the previous step drew, and append them to
    the histories that lack them. A broken or failed slice feeds token 0. Raises EngineError if the
    fed slice drew nothing."""
    if all(item.feed is None for item in batch.slices):
        return batch
    slices = list(batch.slices)
    for index, item in enumerate(slices):
        if item.feed is None:
            continue
        known = before is not None and 0 <= item.feed < len(before.drawn)
        drawn = before.drawn[item.feed] if before and known else ()
        invalid = before is not None and (item.feed in before.broken or item.feed in before.failed)
        if len(item.tokens) != 1 or not (drawn or invalid):
            raise EngineError(
                f"slice {index}: slice {item.feed} of the previous step drew no token"
            )
        token = drawn[0].token if drawn else 0
        draws = tuple([extended(draw, (token,)) for draw in item.draws])
        slices[index] = replace(item, tokens=(token,), draws=draws, feed=None)
    return StepBatch(tuple(slices))


def extended(draw: Draw, tokens: Sequence[int]) -> Draw:
    """Return `draw` with `tokens` at the end of its history and of what its grammar has read, where
    it has one."""
    if not tokens or (draw.history is None and draw.allowed is None):
        return draw
    history = draw.history
    if history is not None:
        for token in tokens:
            history = history.extended(token)
    allowed = None if draw.allowed is None else draw.allowed.extended(tokens)
    return replace(draw, history=history, allowed=allowed)


def failed_result(batch: StepBatch) -> StepResult:
    """Return the result that the next step sees of a step that raised: every slice has failed.
    The next step then feeds only requests that have ended; its other slices are computed."""
    failed = dict.fromkeys(range(len(batch.slices)), EngineError("the step of this slice failed"))
    return StepResult(((),) * len(batch.slices), failed=failed)


class RunningStep(Protocol):
    """A step that a runner has started and that may still run on the device."""

    def result(self) -> StepResult:
        """Wait for the step. Raises the device's error."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that ended before its runner's `start` returned."""

    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


def abandon(result: asyncio.Future[StepResult]) -> None:
    """Retrieve the error of a result that has no waiter, so that asyncio does not report it."""
    result.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


class StepHandle(Protocol):
    """A submitted step."""

    def result(self) -> Awaitable[StepResult]:
        """Wait for the step. Raises EngineError if the device failed, DeviceLost if it does not
        respond: the worker then ends."""
        ...

    def abandon(self) -> None:
        """Discard the step's outcome, errors included."""
        ...
