"""What a step accepts of the tokens that were proposed."""

from __future__ import annotations

import pytest

from baton.engine.scheduling.batch import (
    DraftWork,
    Draw,
    Drawn,
    Slice,
    StepBatch,
    StepResult,
    resolve_feeds,
)
from baton.engine.scheduling.token_history import history_of
from baton.engine.scheduling.verification import accepted, check_proposals, with_proposals
from baton.runtime.errors import EngineError
from baton.runtime.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def one_token(draws: int) -> Slice:
    history = history_of([1, 2, 3], 2)
    return Slice((3,), 2, (0,), tuple(Draw(0, 3 + row, GREEDY, history) for row in range(draws)))


def drawn(*tokens: int) -> tuple[Drawn, ...]:
    return tuple(Drawn(0, token) for token in tokens)


def test_proposals_follow_the_known_token_and_the_histories() -> None:
    item = with_proposals(one_token(4), [7, 8, 9])
    assert (item.tokens, item.proposed) == ((3, 7, 8, 9), 3)
    assert [list(draw.history or ()) for draw in item.draws] == [
        [1, 2, 3],
        [1, 2, 3, 7],
        [1, 2, 3, 7, 8],
        [1, 2, 3, 7, 8, 9],
    ]
    assert [draw.position for draw in item.draws] == [3, 4, 5, 6]


@pytest.mark.parametrize(("proposals", "tokens"), [([], 1), ([7], 2), ([7, 8, 9], 3)])
def test_a_slice_takes_no_more_proposals_than_draws(proposals: list[int], tokens: int) -> None:
    item = with_proposals(one_token(3), proposals)
    assert len(item.tokens) == len(item.draws) == tokens
    assert item.proposed == tokens - 1


@pytest.mark.parametrize(
    ("target", "kept"),
    [((5, 8, 9, 1), 1), ((7, 5, 9, 1), 2), ((7, 8, 5, 1), 3), ((7, 8, 9, 1), 4)],
)
def test_acceptance_ends_with_the_first_difference(target: tuple[int, ...], kept: int) -> None:
    item = with_proposals(one_token(4), [7, 8, 9])
    assert accepted(item, drawn(*target)) == drawn(*target[:kept])


def test_rows_that_were_not_drawn_are_not_accepted() -> None:
    item = with_proposals(one_token(4), [7, 8, 9])
    assert accepted(item, drawn(7, 8)) == drawn(7, 8)


def test_draws_of_several_choices_are_all_kept() -> None:
    assert accepted(one_token(3), drawn(7, 8, 9)) == drawn(7, 8, 9)


@pytest.mark.parametrize(
    "item",
    [
        Slice((3, 7), 2, (0,), one_token(1).draws, proposed=1),
        Slice((3,), 2, (0,), one_token(2).draws, proposed=1),
        Slice((0, 7), 2, (0,), one_token(2).draws, feed=0, proposed=1),
    ],
)
def test_a_slice_that_cannot_be_verified_is_refused(item: Slice) -> None:
    with pytest.raises(EngineError, match="slice 1"):
        check_proposals(StepBatch((one_token(1), item)))


def test_a_fed_slice_keeps_its_draft_work() -> None:
    item = Slice((0,), 2, (0,), one_token(3).draws, feed=0, draft=DraftWork((), 2))
    (found,) = resolve_feeds(StepBatch((item,)), StepResult((drawn(4),))).slices
    assert (found.tokens, found.feed, found.draft) == ((4,), None, DraftWork((), 2))
