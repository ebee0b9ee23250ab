"""Proposed tokens against the target's own draws: what a step accepts of them.

    proposals   p1 p2 p3            draws of the target   d0 d1 d2 d3
                accepted while p1 = d0, p2 = d1, ..       drawn: d0 .. the first that differs

Draws depend on seed, choice and position alone, so equality is the whole rule: no proposal changes
a token, and no random number decides on one. Pure; knows no proposer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from baton.engine.scheduling.batch import Drawn, Slice, StepBatch, extended
from baton.runtime.errors import EngineError


def with_proposals(item: Slice, proposals: Sequence[int]) -> Slice:
    """Return `item`, of one known token, as a slice that verifies `proposals`. Of its draws, whose
    histories miss the proposals, there is one more than it takes of these at most."""
    wanted = proposals[: len(item.draws) - 1]
    draws = [extended(draw, wanted[:row]) for row, draw in enumerate(item.draws)]
    return replace(
        item,
        tokens=(*item.tokens, *wanted),
        draws=tuple(draws[: len(wanted) + 1]),
        proposed=len(wanted),
    )


def with_drafts(batch: StepBatch, proposed: Mapping[int, Sequence[int]]) -> StepBatch:
    """Return `batch` with the proposals of a draft model, by slice, in the slices that asked for
    some: they verify these."""
    slices = tuple(
        replace(with_proposals(item, proposed.get(index, ())), draft=None)
        if speculates(item) and not item.proposed
        else item
        for index, item in enumerate(batch.slices)
    )
    return StepBatch(slices, batch.copies)


def speculates(item: Slice) -> bool:
    """Return whether `item` verifies proposals, or asks a draft model for some."""
    return item.proposed > 0 or (item.draft is not None and item.draft.tokens > 0)


def without_proposals(item: Slice) -> Slice:
    """Return `item` as a slice of its known token alone, with no work for a draft model."""
    return replace(item, tokens=item.tokens[:1], draws=item.draws[:1], proposed=0, draft=None)


def accepted(item: Slice, drawn: Sequence[Drawn]) -> tuple[Drawn, ...]:
    """Return the draws of a slice up to the first that differs from its proposal: all where it
    verifies none."""
    if item.proposed:
        for row, found in enumerate(drawn[: item.proposed], 1):
            if found.token != item.tokens[row]:
                return tuple(drawn[:row])
    return tuple(drawn)


def check_proposals(batch: StepBatch) -> None:
    """Raise EngineError naming a slice that verifies and has not one draw for each token, or
    whose token is not known yet, or one whose proposals no draft model has made."""
    for index, item in enumerate(batch.slices):
        if not item.proposed and speculates(item):
            raise EngineError(f"slice {index} asks for proposals, and no draft model is loaded")
        if not item.proposed:
            continue
        if len(item.tokens) != item.proposed + 1 or len(item.draws) != item.proposed + 1:
            raise EngineError(
                f"slice {index}: {item.proposed} proposals in {len(item.tokens)} tokens with "
                f"{len(item.draws)} draws; there must be one more of both"
            )
        if item.feed is not None or item.scoring is not None:
            raise EngineError(f"slice {index}: proposals follow a known token and score nothing")
